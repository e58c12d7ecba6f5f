"""An experiment of two trials whose second trial fails twice, and finishes after repairs.

The trial fails first because a file was edited, then because its reward raises an error.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from commands import SMALL, trial_directories, tune, tune_command
from conftest import rows, wait_for

from grpo_trainable.config import GRPOConfig
from grpo_trainable.tasks.keyword import NOUNS_FILE

REWARD = """
from pathlib import Path

def score(response, ground_truth):
    if Path({flag!r}).exists():
        raise RuntimeError("no reward")
    return 1.0
"""
RESUME = ["--resume", "must", "--name", "failing"]


@pytest.fixture(scope="module")
def edited(tmp_path_factory):
    """Edit the words of a run during its first trial; return storage, exit status and output."""
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
    """Restore the words and resume with a failing reward; return storage and finished process."""
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
    # The resume's --max-failures applies, not the first command's: one failure, then two more.
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
