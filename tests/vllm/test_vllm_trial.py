"""Whole trials that vLLM samples, run by the command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

TUNE = Path(__file__).resolve().parents[2] / "launch" / "tune.py"


def run(*arguments: str, storage: Path) -> subprocess.CompletedProcess[str]:
    vllm = ["--space", "async_vs_sync", "--set", "engine=vllm"]
    return subprocess.run(
        [sys.executable, str(TUNE), *vllm, *arguments, "--storage", str(storage)],
        capture_output=True,
        text=True,
        timeout=900,
        cwd=storage,
        check=False,
    )


def test_the_arm_of_lag_1_trains_through_vllm(tmp_path):
    rounds = ("--iterations", "16", "--set", "eval.every=16", "--set", "weight_update=in_flight")
    done = run("--set", "arm=async_k1", *rounds, "--name", "vllm", storage=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = (tmp_path / "vllm").glob("*/result.json")
    rows = [json.loads(line) for line in result.read_text().splitlines()]
    assert len(rows) == 16
    # In six trials in benchmarks/results/learning.json, this reward rose by 0.18 to 0.29.
    assert rows[-1]["reward/eval_mean"] > rows[0]["reward/eval_first"]
    assert max(row["lag/max"] for row in rows) == 1
    assert all(row["count/dropped"] == 0 for row in rows)
    # In the first round, the learner's own weights sampled all tokens.
    assert rows[0]["kl/sampler_mismatch_nats"] < 1e-6
    assert json.loads((result.parent / "params.json").read_text())["engine"] == "vllm"


def test_generators_of_their_own_processes_recompute_what_they_sampled(tmp_path):
    few = ("--iterations", "4", "--set", "eval.prompts=8", "--set", "rollout.max_new_tokens=24")
    apart = ("transport=object_store", "resources.num_generators=2", "rollout.stop=.")
    fixed = [part for setting in apart for part in ("--set", setting)]
    update = ("--set", "weight_update=interrupt_recompute")
    done = run("--set", "arm=async_k1", *few, *fixed, *update, "--name", "two", storage=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = (tmp_path / "two").glob("*/result.json")
    rows = [json.loads(line) for line in result.read_text().splitlines()]
    assert [row["count/trained"] for row in rows] == [16, 32, 48, 64]
    assert all(row["count/dropped"] == 0 for row in rows)


WORDS = """
from grpo_trainable.environments import Turn
from grpo_trainable.tasks import Example


class Task:
    stop = (" ",)

    def __init__(self, seed):
        pass

    def train_example(self, prompt_index):
        return Example("Once ", {})

    def eval_examples(self, count):
        return [self.train_example(0)] * count


class Env:
    def reset(self, spec):
        self.turns = 0
        return "Once "

    def step(self, action):
        self.turns += 1
        return Turn("more ", float("e" in action), self.turns == 3)

    def close(self):
        pass
"""


def test_a_trial_of_episodes_trains_through_vllm(tmp_path):
    (tmp_path / "words.py").write_text(WORDS)
    words = ("task.name=words.py:Task", "env.name=words.py:Env", "eval.prompts=8")
    fixed = [part for setting in ("arm=async_k1", *words) for part in ("--set", setting)]
    done = run(*fixed, "--iterations", "2", "--name", "episodes", storage=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = (tmp_path / "episodes").glob("*/result.json")
    rows = [json.loads(line) for line in result.read_text().splitlines()]
    assert len(rows) == 2
    assert all(row["count/dropped"] == 0 and row["response/turns_mean"] > 2 for row in rows)
    # In the first round, the learner's own weights sampled all tokens.
    assert rows[0]["kl/sampler_mismatch_nats"] < 1e-6


def test_the_correction_of_the_default_shows_and_can_be_turned_off(tmp_path):
    one = ("--set", "arm=sync", "--dry-run", "json")
    shown = {
        cap: json.loads(run(*one, *given, storage=tmp_path).stdout)
        for cap, given in ((2.0, ()), (0.0, ("--set", "loss.importance_cap=0")))
    }
    for cap, plan in shown.items():
        assert f'"importance_cap": {cap}' in json.dumps(plan)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            (),
            "engine=vllm: does not work with placement=colocated: on CPUs, vLLM fixes the number",
        ),
        (("arm=sync", "transport=gloo"), "transport=gloo: does not work with engine=vllm: "),
    ],
)
def test_what_vllm_cannot_do_is_one_line(tmp_path, settings, message):
    fixed = [part for setting in settings for part in ("--set", setting)]
    done = run(*fixed, "--dry-run", storage=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
