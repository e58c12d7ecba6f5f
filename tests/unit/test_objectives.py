"""The atlas of objectives by lag, put together from what each seed came to."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

# Benchmarks import their neighbours by bare names.
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from objectives import atlas, number, side_by_side, table


def arm(last: float, mean: float, **kept: float) -> dict[str, Any]:
    return {"last": last, "mean": mean, **kept}


SEEDS = {
    "seed 0": {
        "grpo_lag0": arm(0.8, 0.6),
        "grpo_lag8": arm(0.7, 0.5, kl_sampler_nats=0.2, clip_fraction=0.02),
    },
    "seed 1": {
        "grpo_lag0": arm(0.9, 0.8),
        "grpo_lag8": arm(0.6, 0.4, kl_sampler_nats=0.4, clip_fraction=0.04),
    },
}


def test_a_lag_is_compared_with_lag_0_of_its_own_seed():
    row = atlas(SEEDS)["grpo"]
    assert row[0]["last"]["value"] == pytest.approx(0.85)
    assert "last_against_lag_0" not in row[0]
    # -0.1 and -0.4 with two seeds: Student's t is 12.706, the standard error 0.15.
    found = row[8]["mean_against_lag_0"]
    assert found["value"] == pytest.approx(-0.25)
    assert found["low"] == pytest.approx(-0.25 - 12.706 * 0.15, abs=1e-3)
    assert found["high"] == pytest.approx(-0.25 + 12.706 * 0.15, abs=1e-3)
    assert found["seeds"] == 2
    assert row[8]["kl_sampler_nats"] == pytest.approx(0.3)


def test_a_single_seed_has_no_interval():
    row = atlas({"seed 0": SEEDS["seed 0"]})["grpo"]
    assert row[8]["last"] == {"value": 0.7, "low": None, "high": None, "seeds": 1}


def test_the_table_has_a_row_for_each_objective_and_shows_the_deepest_lag():
    header, row = table(atlas(SEEDS))
    assert header[0] == "objective"
    assert header[-2:] == ["KL from sampler, lag 8", "clipped, lag 8"]
    assert row[0] == "grpo"
    assert row[-2:] == ["0.3", "3.0%"]


def test_what_an_arm_lacks_in_a_seed_is_left_out():
    seeds = {
        "seed 0": SEEDS["seed 0"],
        "seed 1": {"grpo_lag8": arm(0.6, 0.4)},
        "seed 2": {"grpo_lag0": {"last": None, "mean": 0.8}, "dapo_lag0": arm(0.5, 0.5)},
    }
    found = atlas(seeds)
    row = found["grpo"]
    assert row[0]["last"] == {"value": 0.8, "low": None, "high": None, "seeds": 1}
    assert row[8]["last"]["seeds"] == 2
    assert row[8]["last_against_lag_0"]["value"] == pytest.approx(-0.1)
    assert row[8]["last_against_lag_0"]["seeds"] == 1
    assert found["dapo"][0]["last"]["value"] == 0.5


def test_seeds_come_in_the_order_of_their_numbers():
    assert sorted(["seed 10", "seed 9", "seed 0"], key=number) == ["seed 0", "seed 9", "seed 10"]


def test_arms_of_another_kind_are_refused():
    with pytest.raises(SystemExit, match="sync: the arms of this benchmark"):
        atlas({"seed 0": {"sync": arm(0.5, 0.5)}})


def test_trials_side_by_side_share_two_cores():
    assert side_by_side(1) == []
    assert side_by_side(2) == [
        *("--max-concurrent", "2"),
        *("--set", "resources.generator_cpus=0.45", "--set", "resources.learner_cpus=0.45"),
    ]
