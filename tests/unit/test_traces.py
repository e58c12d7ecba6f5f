"""Calls of an actor from its trace, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_trainable.simulation.traces import calls_of


def spans(*stages: tuple[str, float, float], round_: int = 5) -> list[dict[str, Any]]:
    """(stage, start, end) in seconds; the trace has microseconds."""
    return [
        {"name": name, "ts": start * 1e6, "dur": (end - start) * 1e6, "args": {"round": round_}}
        for name, start, end in stages
    ]


def test_waiting_separates_calls() -> None:
    events = spans(
        ("rollout", 0.0, 1.0),
        ("reward", 1.0, 1.5),
        ("waiting", 1.5, 2.0),
        ("sync", 2.0, 2.25),
        ("waiting", 2.25, 2.3),
        ("reference", 2.3, 3.0),
        ("optimize", 3.0, 5.0),
        ("reference", 5.0, 5.5),
        ("waiting", 5.5, 6.0),
        ("evaluation", 6.0, 7.0),
    )
    expected = [("rollout", 1.5), ("sync", 0.25), ("optimize", 3.2), ("eval", 1.0)]
    assert [(kind, s) for kind, _, s in calls_of(events)] == [
        (kind, pytest.approx(seconds)) for kind, seconds in expected
    ]


def test_weights_taken_in_between_two_tokens_belong_to_the_unit() -> None:
    events = spans(("rollout", 0.0, 1.0), ("sync", 1.0, 1.25), ("rollout", 1.25, 2.0))
    assert calls_of(events) == [("rollout", 5, pytest.approx(2.0))]


def test_a_deposit_is_made_beside_the_calls() -> None:
    events = spans(
        ("rollout", 0.0, 2.0),
        ("sync", 1.0, 1.25),
        ("waiting", 2.0, 4.0),
        ("sync", 3.0, 3.5),
        ("rollout", 4.0, 5.0),
    )
    assert calls_of(events) == [
        ("sync", 5, pytest.approx(0.25)),
        ("sync", 5, pytest.approx(0.5)),
        ("rollout", 5, pytest.approx(2.0)),
        ("rollout", 5, pytest.approx(1.0)),
    ]
