"""The command as a user runs it: on a real trial, and with rewards of the user's own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from reports.evaluations.files import read_evaluation

ROOT = Path(__file__).resolve().parents[2]
VOTES = '''
"""A reward for format and answer: a response's first word is its answer."""

def score(response, ground_truth):
    words = response.split()
    answer = words[0] if words else None
    right = float(answer is not None and answer[0] in "AOT")
    return {"reward": right, "format_reward": 1.0, "answer_reward": right, "answer": answer}

def fails(response, ground_truth):
    if len(response) % 2:
        raise ValueError("odd")
    return 1.0
'''


def run(script: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "launch" / script), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=cwd,
        check=False,
    )


@pytest.fixture(scope="module")
def trial(tmp_path_factory) -> Path:
    """A trial of three rounds that really ran, its last evaluation after the third."""
    storage = tmp_path_factory.mktemp("storage")
    settings = [
        *("rollout.prompts=4", "rollout.group_size=4", "rollout.max_new_tokens=16", "seed=7"),
        *("eval.prompts=12", "eval.samples=2", "eval.every=2", "optim.lr=1e-3", "arm=sync"),
    ]
    done = run(
        "tune.py",
        *("--space", "async_vs_sync", "--name", "short", "--iterations", "3"),
        *("--storage", str(storage)),
        *(word for setting in settings for word in ("--set", setting)),
        cwd=storage,
    )
    assert done.returncode == 0, done.stderr
    (directory,) = (path.parent for path in (storage / "short").glob("*/result.json"))
    return directory


def test_a_checkpoint_gives_the_trials_own_last_evaluation(trial, tmp_path):
    done = run("evaluate.py", "--checkpoint", str(trial), "--out", "mine", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (trial / "result.json").read_text().splitlines()]
    assert rows[-1]["eval/round"] == 3
    data = json.loads((tmp_path / "mine" / "evaluation.json").read_text())
    assert data["figures"]["reward"]["value"] == rows[-1]["reward/eval_mean"]
    assert (data["policy"]["round"], data["policy"]["version"]) == (3, 3)
    # Not the figure alone: every response.
    parts = sorted((trial / "evaluations").glob("part-*.parquet"))
    last = [row for row in pq.read_table(parts[-1]).to_pylist() if row["round"] == 3]
    theirs = [
        (row["cursor"], row["response_index"], row["prompt"], row["response"], row["tokens"])
        for row in last
    ]
    ours = [
        (own.prompt_index, own.response_index, own.prompt, own.response, own.tokens)
        for own in read_evaluation(tmp_path / "mine").generations
    ]
    assert ours == theirs
    assert len(ours) == 24


def test_before_and_after_are_compared(trial, tmp_path):
    shared = ("--prompts", "12", "--samples", "2", "--set", "rollout.max_new_tokens=16")
    before = run("evaluate.py", *shared, "--seed", "7", "--out", "before", cwd=tmp_path)
    assert before.returncode == 0, before.stderr
    after = run(
        "evaluate.py",
        *("--checkpoint", str(trial), "--out", "after", "--against", "before"),
        cwd=tmp_path,
    )
    assert after.returncode == 0, after.stderr
    assert "against before, over 12 prompts that both answered" in after.stdout
    data = json.loads((tmp_path / "after" / "evaluation.json").read_text())
    figures, reward = data["figures"], data["against"]["differences"]["reward"]
    assert reward["own"] == pytest.approx(figures["reward"]["value"])
    first = json.loads((tmp_path / "before" / "evaluation.json").read_text())["figures"]["reward"]
    assert reward["other"] == pytest.approx(first["value"])


def test_answers_of_a_reward_of_ones_own_are_voted_on(tmp_path):
    (tmp_path / "votes.py").write_text(VOTES)
    done = run(
        "evaluate.py",
        *("--set", "task.reward=votes.py:score", "--samples", "4", "--prompts", "8"),
        *("--set", "rollout.max_new_tokens=16", "--out", "mine"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    generations = read_evaluation(tmp_path / "mine").generations
    assert all(own.answer == own.response.split()[0] for own in generations)
    figures = json.loads((tmp_path / "mine" / "evaluation.json").read_text())["figures"]
    assert figures.keys() >= {"pass@4", "majority@1", "majority@2", "majority@4"}
    assert figures["majority@1"]["value"] == pytest.approx(figures["pass@1"]["value"])
    assert "majority@4" in done.stdout


def test_a_reward_that_fails_too_often_is_told_and_nothing_is_lost(tmp_path):
    (tmp_path / "votes.py").write_text(VOTES)
    done = run(
        "evaluate.py",
        *("--set", "task.reward=votes.py:fails", "--samples", "4", "--prompts", "8"),
        *("--set", "rollout.max_new_tokens=16", "--out", "mine"),
        cwd=tmp_path,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("evaluate.py: the reward failed on ")
    record = read_evaluation(tmp_path / "mine")
    assert {own.error for own in record.errors} == {"ValueError: odd"}
    assert all((own.reward is None) == (len(own.response) % 2 == 1) for own in record.generations)
