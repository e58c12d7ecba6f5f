"""The parts of the RLlib support that need no RLlib, and its benchmark without a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from grpo_vs_ppo import curve_of, reached

ROOT = Path(__file__).resolve().parents[3]


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


@pytest.mark.slow
def test_a_missing_extra_is_one_line_that_says_how_to_install_it():
    done = run("import sys; sys.modules['gymnasium'] = None; import grpo_trainable.rllib")
    assert done.returncode == 1
    error = done.stderr.splitlines()[-1]
    assert error.startswith("ImportError: grpo_trainable.rllib needs RLlib (")
    assert "gymnasium" in error
    assert error.endswith("; install it with: pip install 'grpo-trainable[rllib]'")


@pytest.mark.slow
def test_the_trainable_loads_nothing_of_rllib():
    done = run(
        "import sys, grpo_trainable.trainable\n"
        "print([name for name in sys.modules if name.startswith(('ray.rllib', 'gymnasium'))])"
    )
    assert done.stdout == "[]\n"


def test_a_curve_has_the_rounds_that_were_evaluated_after_training():
    rows = [
        {
            "eval/round": evaluated,
            "reward/eval_mean": held_out,
            "num_env_steps_sampled_lifetime": 1000.0 * n,
            "time/wall_clock_s": 3.0 * n,
        }
        for n, evaluated, held_out in ((1, 0, 0.25), (2, 2, 0.5), (3, 2, 0.5), (4, 4, 0.75))
    ]
    curve = curve_of(rows)
    assert [(point["steps"], point["mean"]) for point in curve] == [(2000.0, 0.5), (4000.0, 0.75)]
    assert reached(curve, 0.7)["seconds"] == 12.0
    assert reached(curve, 0.8)["seconds"] is None
    assert reached(curve, 0.8)["best"] == 0.75
