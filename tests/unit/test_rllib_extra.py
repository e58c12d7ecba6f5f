"""What there is of RLlib without RLlib, and of its benchmark without running it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Benchmarks import their neighbours by bare names.
sys.path.append(str(ROOT / "benchmarks"))


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
    assert error.endswith("; install it by: pip install 'grpo-trainable[rllib]'")


@pytest.mark.slow
def test_the_trainable_loads_nothing_of_rllib():
    done = run(
        "import sys, grpo_trainable.trainable\n"
        "print([name for name in sys.modules if name.startswith(('ray.rllib', 'gymnasium'))])"
    )
    assert done.stdout == "[]\n"


@pytest.mark.slow
def test_an_iteration_of_ppo_is_told_under_our_names():
    from grpo_vs_ppo import ppo_row, samples_of

    runners = {
        "num_episodes_lifetime": 70,
        "episode_return_mean": 0.5,
        "episode_len_mean": 39.0,
        "num_env_steps_sampled_lifetime": 4155,
    }
    row = ppo_row({"training_iteration": 2, "env_runners": runners})
    assert row["reward/train_mean"] == 0.5
    assert row["count/trained"] == 17.5  # groups of 4
    assert samples_of(row) == 70


@pytest.mark.slow
def test_a_summary_has_the_curve_of_the_rounds_that_were_evaluated(tmp_path):
    from grpo_vs_ppo import summary

    rows = [
        {
            "training_iteration": n,
            "eval/round": evaluated,
            "reward/eval_first": 0.25,
            "reward/eval_mean": held_out,
            "reward/train_mean": 0.1 * n,
            "count/trained": 16.0 * n,
            "num_env_steps_sampled_lifetime": 1000.0 * n,
            "time/wall_clock_s": 3.0 * n,
        }
        for n, evaluated, held_out in ((1, 0, 0.25), (2, 2, 0.5), (3, 2, 0.5), (4, 4, 0.75))
    ]
    (tmp_path / "params.json").write_text(json.dumps({"arm": "grpo", "seed": 3}))
    (tmp_path / "result.json").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = summary(tmp_path / "result.json")
    assert found["held_out"] == {128: 0.5, 256: 0.75}
    assert list(found["training"]) == [64, 128, 192, 256]
    assert (found["samples"], found["tokens"], found["seconds"]) == (256.0, 4000.0, 12.0)
    assert (found["first"], found["last"]) == (0.25, 0.75)
