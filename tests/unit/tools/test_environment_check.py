"""Environments with one deliberate fault each, and the check that finds and names the faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpo_trainable.config import EnvSettings
from grpo_trainable.tools.environment_check import (
    DIFFERS,
    FAILS,
    HANGS,
    PROCESSES,
    PROMPT,
    REMEMBERS,
    RETOKENISED,
    SHARES,
    UNSENDABLE,
    EnvironmentCheck,
    Report,
    Specification,
)
from launch import check_env

pytestmark = pytest.mark.slow  # each test starts processes

SOUND = """
import random, subprocess, sys, time
from grpo_trainable.environments import Turn

class Sound:
    def reset(self, spec):
        self.left, self.random = spec["left"], random.Random(spec["left"])
        return "begin\\n"
    def step(self, action):
        self.left -= 1
        done = self.left == 0
        info = {"n": 1, "state": object()}  # numbers are compared, other values are ignored
        return Turn(f"{self.random.random()}\\n", reward=float(done), done=done, info=info)
    def close(self):
        pass
"""
# Class name -> the fault, and the code that causes it in `Sound`.
PLANTED: dict[str, tuple[str, str]] = {
    "Raises": (FAILS, "def step(self, action): raise KeyError('no such room')"),
    "PaysAnObject": (FAILS, "def step(self, action): return Turn(reward=object())"),
    "SaysNothing": (FAILS, "def step(self, action): return Turn(None)"),
    "Dies": (FAILS, "def step(self, action): import os; os._exit(3)"),
    "Hangs": (HANGS, "def step(self, action): time.sleep(60)"),
    "Draws": (DIFFERS, "def reset(self, spec): super().reset(spec); return str(random.random())"),
    "DrawsLater": (
        DIFFERS,
        "def step(self, action): return Turn(reward=random.random(), done=True)",
    ),
    "Counts": (
        REMEMBERS,
        "n = 0\n    def step(self, action): self.n += 1; return Turn(str(self.n), done=True)",
    ),
    "SeedsAll": (
        SHARES,
        "def reset(self, spec): random.seed(1); self.left = 3; self.random = random; return 'go'",
    ),
    "LeavesAProcess": (
        PROCESSES,
        "def reset(self, spec):\n        subprocess.Popen([sys.executable, '-c', "
        "'import time; time.sleep(60)'], start_new_session=True)\n"
        "        return super().reset(spec)",
    ),
}


def written(tmp_path: Path) -> Path:
    planted = [f"class {name}(Sound):\n    {body}\n" for name, (_, body) in PLANTED.items()]
    path = tmp_path / "planted.py"
    path.write_text("\n\n".join([SOUND, *planted]))
    return path


def checked(path: Path, name: str, *specifications: Any, **options: Any) -> Report:
    settings = EnvSettings(name=f"{path}:{name}", step_deadline_s=2.0)
    played = specifications or ({"left": 3}, {"left": 2})
    given = [s if isinstance(s, Specification) else Specification(spec=s) for s in played]
    return EnvironmentCheck(settings, **options).run(given)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found_and_no_other(name: str, tmp_path: Path):
    report = checked(written(tmp_path), name)
    assert {finding.name for finding in report.findings} == {PLANTED[name][0]}
    assert all("\n" not in finding.what for finding in report.findings)


def test_a_sound_environment_is_played_six_times_for_each_specification(tmp_path: Path):
    """Play once, play again, play in another process, and play three environments in turn."""
    report = checked(written(tmp_path), "Sound")
    assert report.findings == []
    assert report.notes == []
    assert report.episodes == 2 * (1 + 1 + 1 + 3)
    assert len(report.seconds) == 6 * (1 + 3) + 6 * (1 + 2)
    assert report.first == "begin\n"
    assert [turn.done for _, turn in report.example] == [False, False, True]


def test_what_is_said_first_is_compared_with_the_prompt(tmp_path: Path):
    other = Specification(spec={"left": 1}, prompt="another\n")
    (found,) = checked(written(tmp_path), "Sound", other).findings
    assert found.name == PROMPT
    assert found.what == 'reset returned "begin\\n", but the task\'s prompt is "another\\n"'


@pytest.mark.parametrize(
    ("spec", "what"),
    [
        ({"left": 2, 3: "a"}, "JSON changes"),
        ({"left": {1}}, "is not JSON"),
        (float("nan"), "is not JSON"),
    ],
)
def test_a_specification_that_json_does_not_carry_is_found(tmp_path: Path, spec: Any, what: str):
    (found,) = checked(written(tmp_path), "Sound", spec).findings
    assert found.name == UNSENDABLE
    assert what in found.what


def test_a_text_that_its_tokens_do_not_give_back_is_found(tmp_path: Path):
    report = checked(written(tmp_path), "Sound", {"left": 1}, retold=str.upper)
    (found,) = report.findings
    assert (found.name, found.what) == (
        RETOKENISED,
        'the policy reads "BEGIN\\n" instead of "begin\\n"',
    )


def test_what_need_not_be_a_fault_is_noted(tmp_path: Path):
    report = checked(written(tmp_path), "Sound", {"left": 99}, most_tokens=5, tokens=lambda _: 7)
    assert report.findings == []
    assert report.notes == [
        "no episode ended within env.max_turns=8",
        "every action earned 0; give meaningful actions (--action)",
        "an answer has 7 tokens, but rollout.max_new_tokens=5 limits actions and answers together",
    ]


def test_the_command_says_what_it_found_and_ends_with_1(tmp_path: Path, capsys: Any):
    path = written(tmp_path)
    play = [f"{path}:Counts", "--spec", '{"left": 2}', "--set", "env.step_deadline_s=5"]
    assert check_env.main(play) == 1
    said = capsys.readouterr().out
    assert "fault remembers: specification 1, turn 1: the same environment, played again," in said


def test_the_command_plays_the_examples_of_a_task(capsys: Any):
    assert check_env.main(["guess", "--specs", "2"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("guess: 2 specifications, 12 episodes, ")
    assert 'reads  "Guess 0-9\\n"' in said
    assert said.endswith("found nothing that would go wrong in training\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["my.py:Game"], "neither --task nor --spec is given"),
        (["guess", "--spec", "{"], "--spec"),
        (["guess", "--set", "env.max_turns"], "env.max_turns"),
        (["guess", "--set", "env.max_turns=0"], "env.max_turns=0"),
        (["nothing.py:Game", "--spec", "1"], "nothing.py"),
    ],
)
def test_bad_usage_is_one_line(arguments: list[str], said: str, capsys: Any):
    assert check_env.main(arguments) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
