"""A user's search space and task, run by the command from files outside the repository."""

from __future__ import annotations

import json

import pytest
from commands import SMALL, parts, trial_directories, tune
from conftest import rows

from launch import report
from launch import tune as tune_command

OWN_SPACE = """\
from search_spaces import Column, SearchSpace
from search_spaces.columns import SPEED

RATES = SearchSpace(
    name="rates",
    question="which of two learning rates learns more?",
    arms={
        rate: {"placement": "colocated", "optim.lr": float(rate)} for rate in ("1e-4", "5e-4")
    },
    columns=(Column(name="lr", title="rate", metric="optim/lr", form="{:.0e}"), SPEED),
)
"""

TASK = """
import random
from dataclasses import dataclass

from grpo_trainable.config import text
from grpo_trainable.tasks import Example, keyword_prompt


class Letters:
    @dataclass(frozen=True, kw_only=True)
    class Settings:
        letters: str = text("e")

    def __init__(self, settings, seed):
        self.letters, self.seed = settings.letters, seed

    def train_example(self, prompt_index):
        word = random.Random(f"{self.seed} {prompt_index}").choice(["cat", "drum", "fox"])
        return Example(keyword_prompt([word]), word)

    def eval_examples(self, count):
        return [Example(keyword_prompt(["hen"]), "hen")] * count

    def reward(self, response, ground_truth):
        if "fox" in ground_truth:
            raise RuntimeError("no foxes")
        return sum(letter in self.letters for letter in response) / max(1, len(response))
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """Run an experiment of two arms; return its storage and the output."""
    storage = tmp_path_factory.mktemp("storage")
    file = storage / "elsewhere" / "my_space.py"
    file.parent.mkdir()
    file.write_text(OWN_SPACE)
    (storage / "mine.py").write_text(TASK)
    argv = ["--space", "elsewhere/my_space.py", "--name", "own", "--iterations", "3", *SMALL]
    task = ["--set", "task.name=mine.py:Letters", "--set", "task.letters=aeiou"]
    done = tune(*argv, *task, "--set", "task.max_error_rate=0.9", storage=storage)
    assert done.returncode == 0, done.stderr
    return storage, done.stdout


def test_a_space_of_ones_own_is_run_and_reported_on_without_its_file(own, capsys):
    storage, out = own
    experiment = storage / "own"
    assert len(trial_directories(experiment)) == 2
    assert "rates: which of two learning rates learns more?" in out
    assert "report: " in out
    (storage / "elsewhere").rename(storage / "gone")
    (experiment / "report.html").unlink()
    assert report.main([str(experiment)]) == 0
    (storage / "gone").rename(storage / "elsewhere")
    assert capsys.readouterr().err == ""
    page = (experiment / "report.html").read_text()
    assert "<h1>Which of two learning rates learns more?</h1>" in page
    for words in ("rate", "1e-04", "5e-04", "samples/s"):
        assert f">{words}" in page
    assert page.index(">1e-04") < page.index(">5e-04")  # in the order of the space's arms


def test_a_task_from_outside_the_repository_is_what_trains(own):
    storage, _ = own
    for trial in trial_directories(storage / "own"):
        params = json.loads((trial / "params.json").read_text())
        assert params["task"]["name"] == f"{storage}/mine.py:Letters"
        assert params["task"]["letters"] == "aeiou"
        assert "keywords_file" not in params["task"]
        responses = parts(trial, "rollouts")
        assert len(responses) % 4 == 0
        for row in responses:
            vowels = sum(letter in "aeiou" for letter in row["response"])
            assert row["reward"] == pytest.approx(vowels / max(1, len(row["response"])))
        # Responses that the task cannot score are dropped and counted.
        last = rows(trial)[-1]
        assert last["count/reward_errors"] > 0
        assert not any("fox" in row["prompt"] for row in responses)
        assert 0 < last["reward/eval_mean"] < 1


def test_the_file_of_a_task_is_guarded(own, capsys):
    storage, _ = own
    (storage / "mine.py").write_text(TASK + "# changed\n")
    resume = ["--resume", "must", "--name", "own", "--storage", str(storage)]
    assert tune_command.main(resume) == 2
    assert "mine.py has changed since this run started" in capsys.readouterr().err
