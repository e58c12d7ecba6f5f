"""Whole trials in virtual time: the duration of a round, computed by hand."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_trainable.config import GRPOConfig
from grpo_trainable.simulation.trial import simulate, wall_clock_a_round

SECONDS = {"rollout": 1.0, "optimize": 4.0, "sync": 0.25, "eval": 7.0}


def round_s(
    *,
    generators: int = 1,
    rounds: int = 40,
    gap_s: float = 0.0,
    unit_s: float = 1.0,
    **settings: Any,
) -> float:
    """Return the seconds of a round.

    The round has four chunks of `unit_s` seconds each, four seconds of training, 0.25 s for
    publishing and 0.25 s for loading.
    """
    config = GRPOConfig.from_dict(
        {
            "placement": "disaggregated",
            "rounds": rounds,
            "rollout": {"prompts": 4, "unit_prompts": 1, "group_size": 2},
            "eval": {"every": rounds, "prompts": 1, "samples": 1},
            "resources": {"num_generators": generators, "deadline_s": 1e9},
            **settings,
        }
    )
    reports = simulate(
        config, lambda actor, stage: {**SECONDS, "rollout": unit_s}[stage], gap_s=gap_s, seed=0
    )
    return wall_clock_a_round(reports[2:])


@pytest.mark.slow
def test_a_synchronous_round_is_the_sum_of_its_stages():
    assert round_s(lag=0) == pytest.approx(4 * 1.0 + 4.0 + 2 * 0.25)


@pytest.mark.slow
def test_generators_share_the_units_of_a_round():
    assert round_s(lag=0, generators=2) == pytest.approx(2 * 1.0 + 4.0 + 2 * 0.25)
    # One of three generators samples two of the four chunks.
    assert round_s(lag=0, generators=3) == pytest.approx(2 * 1.0 + 4.0 + 2 * 0.25)


@pytest.mark.slow
def test_colocated_stages_follow_each_other():
    assert round_s(placement="colocated") == pytest.approx(4 * 1.0 + 4.0 + 2 * 0.25)


@pytest.mark.slow
def test_gaps_between_steps_delay_a_synchronous_round():
    # Every counted round has a gap before it, except the first one.
    assert round_s(lag=0, gap_s=0.5) == pytest.approx(8.5 + 0.5 * 37 / 38)


@pytest.mark.slow
def test_an_asynchronous_round_takes_as_long_as_its_longer_side():
    # The learner trains for 4 s and publishes for 0.25 s. Meanwhile, generators load weights and
    # sample the next chunks.
    assert round_s(lag=1) == pytest.approx(4.25, rel=0.02)
    assert round_s(lag=4) == pytest.approx(4.25, rel=0.02)
    # Two generators sample in half the time, but the learner is the longer side.
    assert round_s(lag=1, generators=2) == pytest.approx(4.25, rel=0.02)


@pytest.mark.slow
def test_a_slow_generator_sets_the_pace_and_its_loads_with_it():
    # The generator samples four chunks of 3 s and loads for 0.25 s, and the learner waits for it.
    assert round_s(lag=1, unit_s=3.0) == pytest.approx(12.25, rel=0.02)
    # Another thread loads the weights in the middle of a batch.
    seconds = round_s(lag=1, unit_s=3.0, weight_update="in_flight")
    assert seconds == pytest.approx(12.0, rel=0.02)
