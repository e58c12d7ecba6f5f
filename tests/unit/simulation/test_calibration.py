"""An actor's calls, read from its trace, compared with values computed by hand."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_trainable.config import GRPOConfig
from grpo_trainable.simulation.calibration import (
    calls_of,
    deposits_of,
    simulated_wall_clock,
    times_of,
)


def spans(*stages: tuple[str, float, float], round_: int = 5) -> list[dict[str, Any]]:
    """Return spans from (stage, start, end) in seconds; the trace has microseconds."""
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


def of_actor(number: int, name: str, *stages: tuple[str, float, float]) -> list[dict[str, Any]]:
    """Return one actor's events in a trace: its name, then its spans, given in seconds."""
    told = {"name": "thread_name", "ph": "M", "tid": number, "args": {"name": name}}
    return [told, *({"ph": "X", "tid": number, **span} for span in spans(*stages))]


@pytest.mark.slow
def test_a_synchronous_trial_is_simulated_by_its_own_times() -> None:
    """Simulate rounds of 2 s to sample, 3 s to update, and 0.5 s each to publish and to load.

    The driver adds 0.1 s to each of these four calls.
    """
    events = [
        *of_actor(1, "trial", ("round", 0.0, 6.4)),
        *of_actor(2, "learner", ("optimize", 2.3, 5.3), ("waiting", 5.3, 5.4), ("sync", 5.4, 5.9)),
        *of_actor(3, "generator-0", ("rollout", 0.1, 2.1), ("waiting", 2.1, 5.9)),
        *of_actor(
            3, "generator-0", ("sync", 5.9, 6.4), ("waiting", 6.4, 6.5), ("evaluation", 6.5, 7.5)
        )[1:],
    ]
    row = {"time/eval_s": 1.0, "time/step_s": 7.4, "time/reference_s": 1.0, "time/other_s": 0.4}
    rows = [{**row, "lag/max": 0.0, "time/wall_clock_s": 6.4 * (1 + i)} for i in range(2)]
    times = times_of(rows, events)
    assert times.calls["learner", "optimize"] == pytest.approx([3.0])
    assert times.calls["generator", "rollout"] == pytest.approx([2.0])
    assert (times.hop_s, times.gap_s, times.reference_s) == pytest.approx((0.1, 0.0, 1.0))
    config = GRPOConfig.from_dict(
        {"placement": "disaggregated", "rounds": 20, "eval": {"every": 20}}
    )
    assert simulated_wall_clock(config, times) == pytest.approx(6.4, rel=0.05)
    # A second pass over the batch repeats the update except for the reference model's pass.
    assert simulated_wall_clock(config, times, passes=2) == pytest.approx(8.4, rel=0.05)


def test_deposits_are_calls_of_their_own_beside_those_of_the_generators_thread() -> None:
    """The generator samples, waits and samples for 2, 2 and 1 s.

    Meanwhile, other threads load weights, score, and load weights again.
    """
    other = [("sync", 1.0, 1.25), ("reward", 1.5, 2.5), ("sync", 3.0, 3.5)]
    assert deposits_of(spans(*other)) == [
        ("sync", 5, pytest.approx(0.25)),
        ("sync", 5, pytest.approx(0.5)),
    ]
    own = [("rollout", 0.0, 2.0), ("waiting", 2.0, 4.0), ("rollout", 4.0, 5.0)]
    events = [
        *of_actor(1, "generator-0", *own),
        *of_actor(2, "generator-0, other threads", *other),
    ]
    row = {"time/eval_s": 0.0, "time/step_s": 5.0, "time/reference_s": 1.0, "time/other_s": 0.0}
    rows = [{**row, "lag/max": 1.0, "time/wall_clock_s": 5.0 * (1 + i)} for i in range(2)]
    calls = times_of(rows, events).calls
    assert calls["generator", "sync"] == pytest.approx([0.25, 0.5])
    assert calls["generator", "rollout"] == pytest.approx([2.0, 1.0])
