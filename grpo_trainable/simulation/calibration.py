"""The times of a finished trial, read from its files to simulate other trials."""

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
    """The durations of a trial's calls, and the delays that the driver adds.

    A call belongs to the side "generator" or "learner". Its kind is the stage of the call, such as
    "rollout".
    """

    # (side, kind) -> seconds of each call, in the order of the rounds. The simulation keeps this
    # order, so if the machine was slow for a minute, both sides are slow at about the same time.
    calls: dict[tuple[str, str], list[float]]
    # Seconds that an update spends in the stage "reference", however many passes it makes over the
    # batch.
    reference_s: float
    hop_s: float  # time from the submission of a call to its start
    gap_s: float  # time from the end of one `step()` to the start of the next

    def in_order(self, passes: int = 1) -> Durations:
        """Return a function that assigns the durations of the trial's calls to simulated calls.

        The durations are used in order. After the last one, the function starts over.

        Args:
            passes: number of passes that an update makes over the batch. The recorded trial made
                one pass.
        """
        seen = {key: itertools.cycle(seconds) for key, seconds in self.calls.items()}

        def duration(actor: str, stage: str) -> float:
            own = next(seen[side_of(actor, stage), stage])
            if stage == UPDATE:
                own += (passes - 1) * (own - self.reference_s)
            return own

        return duration


def side_of(actor: str, kind: str) -> str:
    """Return the side of a call: "learner" or "generator".

    A colocated worker has calls of both sides.
    """
    return "learner" if actor == "learner" or kind == UPDATE else "generator"


def times_of(rows: Sequence[Mapping[str, float]], events: Sequence[dict[str, Any]]) -> Times:
    """Return the times of a finished trial from its metrics and the events of its `trace.json`.

    `rows` holds the metrics, one mapping for each round. `hop_s` is 0 if rounds overlap, because
    `time/other_s` does not show the driver's time in that case.
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
        # In a synchronous round, the actors are idle before four calls start: the load, the first
        # chunk of responses, the update and the publication. Each of these delays is `hop_s`.
        hop_s=other / 4 if synchronous else 0.0,
        gap_s=max(0.0, between / (len(rows) - 1)),
    )


def simulated_wall_clock(config: GRPOConfig, times: Times, passes: int = 1) -> float:
    """Return the mean seconds per round of a simulated trial, given the times of another trial.

    Args:
        config: the trial to simulate.
        times: the times of the other trial.
        passes: number of passes that an update makes over the batch. The other trial made one pass.
    """
    durations = times.in_order(passes)
    reports = simulate(config, durations, hop_s=times.hop_s, gap_s=times.gap_s, seed=0)
    return wall_clock_a_round(reports)


# ---- The durations of an actor's calls, from its spans in trace.json -----------------------------


SAMPLING, EVALUATION, UPDATE, SYNC = "rollout", "eval", "optimize", "sync"
VINE = "vine"  # a part of a sampling call; `calls_of` lists this part as a separate call
# A call's kind is recognised by a stage that only calls of this kind contain. The exception is
# `sync`, which calls of other kinds may contain too. So `sync` is looked for last, and then
# identifies only loads and publications, which contain no other stage.
KINDS = {TRACE_NAMES.get(kind, kind): kind for kind in (SAMPLING, EVALUATION, UPDATE, SYNC)}


def calls_of(events: Sequence[dict[str, Any]]) -> list[tuple[str, int, float]]:
    """Return (kind, round, seconds) for each call of an actor, from its main thread's spans.

    Any two calls are separated by a span of waiting. If a call also sampled completions of states,
    the seconds that this took follow the call as a separate entry of kind `VINE`.
    """
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
    """Return (kind, round, seconds) for each deposit of weights, from the other threads' spans.

    Each deposit is a separate call, in parallel with the actor's other work.
    """
    return [
        (SYNC, event["args"]["round"], event["dur"] / 1e6)
        for event in events
        if event["name"] == SYNC
    ]
