"""How long an actor's calls took, by its spans in `trace.json`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_trainable.stages import IDLE, TRACE_NAMES

UNIT, EVALUATION, UPDATE, SYNC = "rollout", "eval", "optimize", "sync"
# By a stage that only calls of the kind have; a load or a publication has no other.
KINDS = {TRACE_NAMES.get(kind, kind): kind for kind in (UNIT, EVALUATION, UPDATE, SYNC)}


def calls_of(events: Sequence[dict[str, Any]]) -> list[tuple[str, int, float]]:
    """(kind, round, seconds) of an actor's calls. It waits between any two of its own thread; a
    deposit of weights is made by another thread, beside them."""
    ordered = sorted(events, key=lambda event: event["ts"])
    calls: list[list[dict[str, Any]]] = [[]]
    result = []
    for event in ordered:
        if event["name"] == "sync" and any(_overlap(event, other) for other in ordered):
            result.append((SYNC, event["args"]["round"], event["dur"] / 1e6))
        elif event["name"] == TRACE_NAMES[IDLE]:
            calls.append([])
        else:
            calls[-1].append(event)
    for call in calls:
        names = {event["name"] for event in call}
        kind = next((kind for name, kind in KINDS.items() if name in names), None)
        if kind is not None:
            seconds = (call[-1]["ts"] + call[-1]["dur"] - call[0]["ts"]) / 1e6
            result.append((kind, call[0]["args"]["round"], seconds))
    return result


def _overlap(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """By more than the rounding of the times: a microsecond."""
    shared = min(one["ts"] + one["dur"], other["ts"] + other["dur"]) - max(one["ts"], other["ts"])
    return one is not other and shared > 1.0
