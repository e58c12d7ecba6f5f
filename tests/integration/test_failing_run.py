"""An experiment of two trials that fail for different reasons and finish after repairs.

The reward has a mistake, which the first trial reaches in round 2. Before the second trial starts,
the keywords file is edited. After the reward and the file are mended, a service that the second
trial needs is unavailable.
"""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from commands import SMALL, trial_directories, tune, tune_command
from conftest import rows, wait_for

from grpo_trainable.config import GRPOConfig, TaskSettings
from grpo_trainable.tasks import KeywordTask
from grpo_trainable.tasks.keyword import NOUNS_FILE

PROMPTS = 4  # per round

# The service is unavailable to the first two workers that ask it. Each attempt has a new worker.
REWARD = """
import os
from pathlib import Path

WEIGHTS = {{"other": 1.0}}


def is_served():
    workers = Path({workers!r})
    (workers / str(os.getppid())).touch()
    return len(list(workers.iterdir())) > 2


def score(response, ground_truth):
    if {served!r} in ground_truth and not is_served():
        raise ConnectionError("no reward")
    kind = "rare" if {rare!r} in ground_truth else "other"
    return WEIGHTS[kind] * len(response)
"""
RESUME = ("--resume", "must", "--name", "failing")


@dataclass
class Story:
    """The directory of an experiment, and the result of the command that started it."""

    storage: Path
    started: CompletedProcess[str]

    @property
    def experiment(self) -> Path:
        return self.storage / "failing"

    @property
    def trials(self) -> list[Path]:
        return sorted(path.parent for path in self.experiment.glob("*/params.json"))


def words_of_round(words: Path, seed: int, round_: int) -> list[str]:
    """Return the keywords of the prompts that a trial with this seed trains on in a round."""
    task = KeywordTask(TaskSettings(keywords_file=str(words), reward="r:s"), seed=seed)
    indices = range(PROMPTS * (round_ - 1), PROMPTS * round_)
    truths: list[Any] = [task.train_example(index).ground_truth for index in indices]
    return [word for keywords in truths for word in keywords]


def failed_lines(command: CompletedProcess[str]) -> list[str]:
    return [line for line in command.stdout.splitlines() if line.startswith("failed: ")]


def failures(trial: Path) -> int:
    return max(map(int, re.findall(r"Failure # (\d+)", (trial / "error.txt").read_text())))


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Story:
    """Run the experiment, and edit the keywords file during the first trial."""
    storage = tmp_path_factory.mktemp("storage")
    words = storage / "words.txt"
    words.write_text(NOUNS_FILE.read_text())
    rare, *_ = words_of_round(words, seed=0, round_=2)
    first_trial = {word for round_ in (1, 2) for word in words_of_round(words, 0, round_)}
    served, *_ = (word for word in words_of_round(words, 1, 1) if word not in first_trial)
    (storage / "workers").mkdir()
    reward = REWARD.format(served=served, workers=str(storage / "workers"), rare=rare)
    (storage / "rewards.py").write_text(reward)
    argv = ["--space", "async_vs_sync", "--name", "failing", "--set", "arm=colocated_k1", *SMALL]
    argv += ["--set", "task.keywords_file=words.txt", "--set", "task.reward=rewards.py:score"]
    argv += ["--set", "task.strict=true", "--checkpoint-every", "1", "--max-failures", "1"]
    command = tune_command(*argv, "--num-samples", "2", "--iterations", "2", storage=storage)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=storage, **pipes) as process:
        wait_for(lambda: trial_directories(storage / "failing"), 120)
        with words.open("a") as file:
            file.write("one more\n")
        out, err = process.communicate(timeout=240)
    return Story(storage, CompletedProcess(command, process.returncode, out, err))


@pytest.fixture(scope="module")
def refused(failed: Story) -> CompletedProcess[str]:
    """Restore the keywords file, mend the reward, and resume."""
    (failed.storage / "words.txt").write_text(NOUNS_FILE.read_text())
    reward = failed.storage / "rewards.py"
    reward.write_text(reward.read_text().replace("WEIGHTS[kind]", "WEIGHTS.get(kind, 2.0)"))
    return tune(*RESUME, storage=failed.storage)


@pytest.fixture(scope="module")
def accepted(failed: Story, refused: CompletedProcess[str]) -> CompletedProcess[str]:
    """Accept the mended reward, and resume with more retries than the first command allowed."""
    options = ("--accept-changed-code", "--max-failures", "2")
    return tune(*RESUME, *options, storage=failed.storage)


def test_a_file_that_is_edited_meanwhile_ends_the_later_trials_and_is_named(failed):
    assert failed.started.returncode == 1, failed.started.stderr
    _, line = failed_lines(failed.started)
    words = failed.storage / "words.txt"
    assert f"task.keywords_file: {words} has changed since this run started" in line
    for params in failed.experiment.glob("*/params.json"):
        config = json.loads(params.read_text())
        assert GRPOConfig.from_dict(config).to_dict() == config


def test_a_failure_that_would_repeat_is_not_retried(failed):
    line, _ = failed_lines(failed.started)
    assert line.startswith("failed: colocated_k1/0: ")
    assert re.search(r"KeyError: 'rare' \(rewards\.py, line \d+\)", line)
    again = [line for line in failed.started.stdout.splitlines() if "starts again" in line]
    assert len(again) == 1  # a line about the second trial
    assert all("words.txt has changed" in line for line in again)
    first, *_ = failed.trials
    assert failures(first) == 1
    assert len(rows(first)) == 1


def test_a_mended_reward_is_accepted_once_the_user_says_so(failed, refused, accepted):
    assert refused.returncode == 2
    file = failed.storage / "rewards.py"
    assert f"task.reward: {file} has changed since this run started" in refused.stderr
    assert "add --accept-changed-code" in refused.stderr

    assert "task.reward has changed since the checkpoint" in accepted.stdout
    assert [row["training_iteration"] for row in rows(failed.trials[0])] == [1, 2]
    assert "Your own files at the last resume" in (failed.experiment / "report.html").read_text()


def test_a_service_that_comes_back_in_time_costs_only_retries(failed, accepted):
    assert accepted.returncode == 0, accepted.stderr
    again = [line for line in accepted.stdout.splitlines() if "starts again" in line]
    assert ["no reward" in line for line in again] == [True, True]
    # The --max-failures=2 of the resume applies, not the 1 of the first command. The first command
    # had two failures of the second trial, and the resume had two more.
    assert failures(failed.trials[1]) == 2 + 2
    trained = [[row["training_iteration"] for row in rows(trial)] for trial in failed.trials]
    assert trained == [[1, 2]] * 2
