"""Experiments that fail and finish after repairs.

In the first experiment, a trial fails because a file was edited, and then because a service is
unavailable. In the second, a trial fails because of a mistake in its reward. The mistake is then
fixed.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from commands import SMALL, trial_directories, tune, tune_command
from conftest import rows, wait_for

from grpo_trainable.config import GRPOConfig, TaskSettings
from grpo_trainable.tasks import KeywordTask, keyword_prompt
from grpo_trainable.tasks.keyword import NOUNS_FILE

REWARD = """
from pathlib import Path

def score(response, ground_truth):
    if Path({flag!r}).exists():
        raise ConnectionError("no reward")
    return 1.0
"""
RESUME = ["--resume", "must", "--name", "failing"]


@pytest.fixture(scope="module")
def edited(tmp_path_factory):
    """Edit the keywords file of a run during the first trial; return storage, status and output."""
    storage = tmp_path_factory.mktemp("storage")
    words = storage / "words.txt"
    words.write_text(NOUNS_FILE.read_text())
    (storage / "rewards.py").write_text(REWARD.format(flag=str(storage / "flag")))
    argv = ["--space", "async_vs_sync", "--name", "failing", "--set", "arm=colocated_k1", *SMALL]
    argv += ["--set", "task.keywords_file=words.txt", "--set", "task.reward=rewards.py:score"]
    argv += ["--num-samples", "2", "--iterations", "2", "--max-failures", "0"]
    process = subprocess.Popen(
        tune_command(*argv, storage=storage), stdout=subprocess.PIPE, text=True, cwd=storage
    )
    wait_for(lambda: trial_directories(storage / "failing"), 120)
    with words.open("a") as file:
        file.write("one more\n")
    out, _ = process.communicate(timeout=120)
    return storage, process.returncode, out


@pytest.fixture(scope="module")
def broken(edited):
    """Restore the keywords file, and resume with a reward that fails."""
    storage, *_ = edited
    (storage / "words.txt").write_text(NOUNS_FILE.read_text())
    (storage / "flag").touch()
    done = tune(*RESUME, "--max-failures", "1", storage=storage)
    (storage / "flag").unlink()
    return storage, done


def failures(experiment: Path) -> int:
    (errors,) = experiment.glob("*/error.txt")
    return max(map(int, re.findall(r"Failure # (\d+)", errors.read_text())))


def test_a_file_that_is_edited_meanwhile_ends_the_later_trials_and_is_named(edited):
    storage, status, out = edited
    assert status == 1
    (line,) = [line for line in out.splitlines() if line.startswith("failed: ")]
    words = storage / "words.txt"
    assert f"task.keywords_file: {words} has changed since this run started" in line
    for params in (storage / "failing").glob("*/params.json"):
        config = json.loads(params.read_text())
        assert GRPOConfig.from_dict(config).to_dict() == config


def test_a_trial_that_fails_is_named_and_the_status_is_1(broken):
    storage, done = broken
    assert done.returncode == 1
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("failed: ")]
    assert "no reward" in line
    # The --max-failures=1 of the resume applies, not the 0 of the first command. The first command
    # had one failure, and the resume had two more.
    assert failures(storage / "failing") == 1 + 2


def test_what_is_mended_goes_on(broken):
    storage, _ = broken
    done = tune("--resume", "--name", "failing", storage=storage)
    assert done.returncode == 0, done.stderr
    trained = [
        [row["training_iteration"] for row in rows(trial)]
        for trial in trial_directories(storage / "failing")
    ]
    assert trained == [[1, 2]] * 2


# ---- A mistake in a reward -----------------------------------------------------------------------

# A reward function in TRL's form. It fails on prompts whose hint is not "some".
MISTAKEN = """
def score(completions, hint, **kwargs):
    return [float(len(text)) / {"some": 10.0}[hint[0]] for text in completions]
"""
MENDED = MISTAKEN.replace("}[hint[0]]", "}.get(hint[0], 20.0)")
ROUND = 4  # prompts in a round


@pytest.fixture(scope="module")
def mistaken(tmp_path_factory):
    """Run a trial whose reward fails in round 2; return its storage and the finished process."""
    storage = tmp_path_factory.mktemp("mistaken")
    prompts = [keyword_prompt([word]) for word in NOUNS_FILE.read_text().split()[:40]]
    held_out, *training = [prompts[i : i + 8] for i in range(0, 40, 8)]
    rows_of(storage / "eval.jsonl", held_out, "some")
    rows_of(storage / "train.jsonl", training[0], "some")
    files = {name: str(storage / f"{name}.jsonl") for name in ("train", "eval")}
    task = KeywordTask(
        TaskSettings(train_file=files["train"], eval_file=files["eval"], reward="r:s"), seed=0
    )
    second = {task.train_example(i).prompt for i in range(ROUND, 2 * ROUND)}
    rows_of(storage / "train.jsonl", training[0], "some", dict.fromkeys(second, "other"))
    (storage / "rewards.py").write_text(MISTAKEN)
    argv = ["--space", "async_vs_sync", "--name", "mistaken", "--set", "arm=colocated_k1", *SMALL]
    argv += ["--set", "task.train_file=train.jsonl", "--set", "task.eval_file=eval.jsonl"]
    argv += ["--set", "task.reward=rewards.py:score", "--set", "task.strict=true"]
    done = tune(*argv, "--iterations", "2", "--checkpoint-every", "1", storage=storage)
    return storage, done


def rows_of(path: Path, prompts: list[str], hint: str, other: dict[str, str] | None = None) -> None:
    """Write a data file of prompts without true answers, each with a hint."""
    rows = [{"prompt": prompt, "hint": (other or {}).get(prompt, hint)} for prompt in prompts]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def test_a_failure_that_would_repeat_is_not_retried(mistaken):
    storage, done = mistaken
    assert done.returncode == 1, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("failed: ")]
    assert "KeyError: 'other'" in line
    assert "starts again" not in done.stdout
    assert failures(storage / "mistaken") == 1
    (trial,) = trial_directories(storage / "mistaken")
    assert len(rows(trial)) == 1


def test_a_mended_reward_is_accepted_once_the_user_says_so(mistaken):
    storage, _ = mistaken
    (storage / "rewards.py").write_text(MENDED)
    resume = ("--resume", "--name", "mistaken")
    refused = tune(*resume, storage=storage)
    assert refused.returncode == 2
    assert f"task.reward: {storage}/rewards.py has changed since this run started" in refused.stderr
    assert "add --accept-changed-code" in refused.stderr

    done = tune(*resume, "--accept-changed-code", storage=storage)
    assert done.returncode == 0, done.stderr
    assert "task.reward has changed since the checkpoint" in done.stdout
    (trial,) = trial_directories(storage / "mistaken")
    assert [row["training_iteration"] for row in rows(trial)] == [1, 2]
    assert "Your own files at the last resume" in (storage / "mistaken/report.html").read_text()
