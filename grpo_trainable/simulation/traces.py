"""How long an actor's calls took, by its spans in `trace.json`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_trainable.telemetry.stages import IDLE, TRACE_NAMES

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
