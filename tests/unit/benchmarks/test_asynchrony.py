"""The asynchrony benchmark: the rounds that count, the order of arms, and the conclusions."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import asynchrony
import pytest


def rows(seconds: list[float], disturbed: list[float]) -> list[dict[str, Any]]:
    stages = (*asynchrony.GENERATOR, *asynchrony.LEARNER)
    return [
        {
            **{f"time/{stage}_s": 0.1 for stage in stages},
            "time/wall_clock_s": sum(seconds[: n + 1]),
            "time/disturbed_fraction": disturbed[n],
            "time/other_s": 0.0,
            "time/step_s": 1.0,
            "lag/max": 0.0,
        }
        for n in range(len(seconds))
    ]


def test_disturbed_rounds_are_left_out():
    found = asynchrony.summarise(rows([1.0, 9.0, 3.0, 2.0], [0.0, 0.5, 0.0, 0.0]))
    assert found is not None
    assert found["wall_clock_s"] == pytest.approx(2.0)
    assert found["disturbed_rounds"] == 1
    assert found["generator_s"] == pytest.approx(0.2)


def test_a_run_is_worth_nothing_when_most_rounds_were_disturbed():
    assert asynchrony.summarise(rows([1.0] * 3, [0.5, 0.5, 0.0])) is None


def test_every_arm_runs_once_a_repeat_in_an_order_of_its_own():
    labels = list(asynchrony.ARMS)
    orders = [asynchrony.drawn_order(labels, "tiny", seed) for seed in range(5)]
    assert all(sorted(order) == sorted(labels) for order in orders)
    assert len(set(map(tuple, orders))) > 1
    assert orders[0] == asynchrony.drawn_order(labels, "tiny", 0)


def test_a_speed_up_has_students_interval_over_the_repeats():
    runs = {
        "async": [{"wall_clock_s": 1.0, "generator_s": 0.9, "learner_s": 0.5}] * 2,
        "colocated 1+1": [{"wall_clock_s": 2.0}, {"wall_clock_s": 2.0 * math.e}],
        "colocated 1+2": [{"wall_clock_s": 1.5}, {"wall_clock_s": 1.5 * math.e}],
    }
    found = asynchrony.compared(runs)
    mean = found["speed_up_means"]["colocated 1+1"]
    # The logs of the speed-ups are log 2 and (log 2) + 1. The upper bound of the log is their mean
    # plus t = 12.706 times their standard error, 0.5.
    assert mean["value"] == pytest.approx(2.0 * math.exp(0.5))
    assert mean["high"] == pytest.approx(2.0 * math.exp(0.5 + 12.706 * 0.5), rel=1e-3)
    assert found["best_colocated"] == "colocated 1+2"
    assert found["share_of_bound_median"] == pytest.approx(0.9)


def test_one_repeat_has_no_interval():
    assert asynchrony.geometric_mean([2.0]) == {"value": 2.0, "low": None, "high": None}


def test_only_the_arms_that_were_asked_for_run(monkeypatch, tmp_path):
    run = {"generator_s": 1.0, "learner_s": 0.5, "other_share": 0.0, "wall_clock_s": 2.0}
    monkeypatch.setattr(asynchrony, "undisturbed", lambda workload, label, seed: dict(run))
    monkeypatch.setattr(asynchrony, "provenance", lambda args: {"command": "x", "seed": 0})
    monkeypatch.setattr(
        asynchrony, "write", lambda path, result, **how: path.write_text(json.dumps(result))
    )
    monkeypatch.setattr(asynchrony, "same_run", lambda kept, origin, *keys: False)
    out = tmp_path / "asynchrony.json"
    options = ["--workloads", "default", "--arms", "async", "colocated 1+1", "--repeats", "2"]
    monkeypatch.setattr(sys, "argv", ["asynchrony.py", *options, "--out", str(out)])
    asynchrony.main()
    found = json.loads(out.read_text())["workload"]["default"]
    assert {arm: len(runs) for arm, runs in found["runs"].items()} == {
        "async": 2,
        "colocated 1+1": 2,
    }
    assert found["speed_ups"] == {"colocated 1+1": [1.0, 1.0]}
    assert found["best_colocated"] == "colocated 1+1"
