"""The times of a trial that ran, taken from its files to simulate others with."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_trainable.config import GRPOConfig
from grpo_trainable.simulation.runtime import Durations
from grpo_trainable.simulation.trial import simulate, wall_clock_a_round
from grpo_trainable.telemetry.stages import IDLE, OTHER_THREADS, TRACE_NAMES


@dataclass(frozen=True, kw_only=True)
class Times:
    """The seconds of each call of a run, by side and kind, and what the driver adds to them."""

    calls: dict[tuple[str, str], list[float]]  # oldest first: a slow minute slows both sides
    reference_s: float  # part of an update that further gradient steps do not repeat
    hop_s: float  # time from the submission of a call to its start
    gap_s: float  # time from the end of a step to the start of the next

    def in_order(self, passes: int = 1) -> Durations:
        """The durations of the run's calls, in their order and again from the first when used up.

        `passes`: how often an update goes over the batch, which the run did once.
        """
        seen = {key: itertools.cycle(seconds) for key, seconds in self.calls.items()}

        def duration(actor: str, stage: str) -> float:
            own = next(seen[side_of(actor, stage), stage])
            if stage == UPDATE:
                own += (passes - 1) * (own - self.reference_s)
            return own

        return duration


def side_of(actor: str, kind: str) -> str:
    """The side that a call belongs to; a colocated worker is both."""
    return "learner" if actor == "learner" or kind == UPDATE else "generator"


def times_of(rows: Sequence[Mapping[str, float]], events: Sequence[dict[str, Any]]) -> Times:
    """The times of a finished trial, by its rows and the events of its `trace.json`.

    `hop_s` is 0 where rounds overlap: there `time/other_s` does not show what the driver adds.
    """
    actors = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X" and actors[event["tid"]] != "trial":
            spans[actors[event["tid"]]].append(event)
    calls: dict[tuple[str, str], list[float]] = defaultdict(list)
    every = [
        (row.removesuffix(OTHER_THREADS), *call)
        for row, own in spans.items()
        for call in (deposits_of if row.endswith(OTHER_THREADS) else calls_of)(own)
    ]
    for actor, kind, _, seconds in sorted(every, key=lambda call: call[2]):  # sorted by round
        calls[side_of(actor, kind), kind].append(seconds)
    wall_clock_s = rows[-1]["time/wall_clock_s"]
    between = wall_clock_s - sum(row["time/step_s"] - row["time/eval_s"] for row in rows)
    other = statistics.median(row["time/other_s"] for row in rows)
    synchronous = max(row["lag/max"] for row in rows) == 0
    return Times(
        calls=dict(calls),
        reference_s=statistics.median(row["time/reference_s"] for row in rows),
        # A round's load, first chunk, update and publication wait for each other.
        hop_s=other / 4 if synchronous else 0.0,
        gap_s=max(0.0, between / (len(rows) - 1)),
    )


def simulated_wall_clock(config: GRPOConfig, times: Times, passes: int = 1) -> float:
    """Seconds that a round of `config` takes with the times of another run.

    `passes`: how often an update goes over the batch, where that run did once.
    """
    durations = times.in_order(passes)
    reports = simulate(config, durations, hop_s=times.hop_s, gap_s=times.gap_s, seed=0)
    return wall_clock_a_round(reports)


# ---- How long an actor's calls took, by its spans in trace.json ----------------------------------


SAMPLING, EVALUATION, UPDATE, SYNC = "rollout", "eval", "optimize", "sync"
VINE = "vine"  # a part of a call of the first kind, told apart from it
# A call's kind follows from a stage that only calls of the kind have; a load or a publication has
# no other.
KINDS = {TRACE_NAMES.get(kind, kind): kind for kind in (SAMPLING, EVALUATION, UPDATE, SYNC)}


def calls_of(events: Sequence[dict[str, Any]]) -> list[tuple[str, int, float]]:
    """(kind, round, seconds) of an actor's calls, by the spans of its own thread, which waits
    between any two calls. What a call took to complete states follows it, as `VINE`."""
    calls: list[list[dict[str, Any]]] = [[]]
    for event in sorted(events, key=lambda event: event["ts"]):
        if event["name"] == TRACE_NAMES[IDLE]:
            calls.append([])
        else:
            calls[-1].append(event)
    result = []
    for call in calls:
        names = {event["name"] for event in call}
        kind = next((kind for name, kind in KINDS.items() if name in names), None)
        if kind is not None:
            round_ = call[0]["args"]["round"]
            seconds = (call[-1]["ts"] + call[-1]["dur"] - call[0]["ts"]) / 1e6
            completing_s = sum(event["dur"] for event in call if event["name"] == VINE) / 1e6
            result.append((kind, round_, seconds - completing_s))
            if completing_s:
                result.append((VINE, round_, completing_s))
    return result


def deposits_of(events: Sequence[dict[str, Any]]) -> list[tuple[str, int, float]]:
    """(kind, round, seconds) of the deposits of weights among the spans of an actor's other
    threads. Each is a call of its own, whatever the actor does meanwhile."""
    return [
        (SYNC, event["args"]["round"], event["dur"] / 1e6)
        for event in events
        if event["name"] == SYNC
    ]
