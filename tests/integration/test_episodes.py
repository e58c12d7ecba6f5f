"""Episodes in real processes. A failing environment loses only its group, and leaves no process."""

from __future__ import annotations

import os
import re
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_trainable.config import EnvSettings, GRPOConfig
from grpo_trainable.generator.env_processes import EpisodeError, check_environment
from grpo_trainable.generator.episodes import EpisodePlayer
from grpo_trainable.generator.generator import Generator
from grpo_trainable.generator.worker_process import MARK
from grpo_trainable.models.model_config import ModelConfig
from grpo_trainable.models.store import save_policy
from grpo_trainable.models.tokenizer import Tokenizer
from grpo_trainable.models.transformer import TransformerLM
from grpo_trainable.protocol.messages import Scored
from grpo_trainable.tasks.prompts import Prompts, build_task
from grpo_trainable.transports.in_process import InProcess
from launch import tune

# An episode's specification names what goes wrong in the episode.
FILE = """
import os, subprocess, sys, time
from grpo_trainable.environments import Turn
from grpo_trainable.tasks import Example

KINDS = [
    "good", "raise", "hang", "no text", "too much", "die", "fork", "daemon", "slow in all",
    "hang in reset", "other prompt", "no turn", "nan", "exit", "print", "good",
]


class Kinds:
    stop = ("\\n",)

    def __init__(self, seed):
        pass

    def train_example(self, prompt_index):
        return Example("go\\n", KINDS[prompt_index % len(KINDS)])

    def eval_examples(self, count):
        return [Example("go\\n", "good")] * count


class Env:
    def reset(self, spec):
        self.kind, self.turns = spec, 0
        if spec == "hang in reset":
            time.sleep(60)
        return "stop\\n" if spec == "other prompt" else "go\\n"

    def step(self, action):
        self.turns += 1
        kind = self.kind
        if kind == "raise":
            raise KeyError("two\\nlines")
        if kind == "hang":
            time.sleep(60)
        if kind == "slow in all":
            time.sleep(1.8)
        if kind == "no text":
            return Turn(None)
        if kind == "too much":
            return Turn("x" * 10_000_000)
        if kind == "die":
            os.kill(os.getpid(), 9)
        if kind == "exit":
            sys.exit(3)
        if kind == "fork":
            os.fork()  # the copy comes back from here as well
        if kind == "daemon":
            subprocess.Popen(["setsid", "sleep", "1000"])
            time.sleep(60)
        if kind == "no turn":
            return "text"
        if kind == "nan":
            return Turn("", float("nan"))
        if kind == "print":
            print("noise on the protocol?", flush=True)
            os.system("echo and more")
        return Turn("ok\\n", 0.5, self.turns == 3, {"turns": 1})

    def close(self):
        pass


class Lacking:
    def reset(self, spec):
        return ""
"""
FINE = {"good", "fork", "print"}
WHY = {
    "raise": r"KeyError: 'two\\nlines' \(kinds\.py, line \d+\)",
    "hang": "no answer within 3 s",
    "no text": "TypeError: an observation must be text, got NoneType",
    "too much": "an observation has 10,000,000 characters",
    "die": r"its process died \(signal Killed\)",
    "daemon": "no answer within 3 s",
    "slow in all": r"took more than 4\.5 s in total|no answer within 3 s",
    "hang in reset": "no answer within 3 s",
    "other prompt": r'reset returned "stop.n", but the task.s prompt is "go.n"',
    "no turn": "step must return a Turn, got str",
    "nan": "reward must be a finite float32",
    "exit": r"SystemExit: 3 \(kinds\.py, line \d+\)",
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kinds.py"
    path.write_text(textwrap.dedent(FILE))
    tokenizer = Tokenizer.train(["go\n", "ok\n"], 258)
    model = TransformerLM(
        ModelConfig(
            vocab_size=258, context_length=64, d_model=16, num_layers=1, num_heads=1, d_ff=16
        )
    )
    with torch.no_grad():  # so that the policy ends each action after one or two tokens
        model.embedding.weight[tokenizer.encode("\n")[0]].mul_(60)
    save_policy(tmp_path / "policy", model, tokenizer, torch.float32)
    return path


def config_of(file: Path, **env: Any) -> GRPOConfig:
    given = {"step_deadline_s": 3.0, "episode_deadline_s": 4.5, "patience_s": 60.0, **env}
    return GRPOConfig.from_dict(
        {
            "model": {"path": str(file.parent / "policy")},
            "task": {"name": f"{file}:Kinds"},
            "env": {"name": f"{file}:Env", **given},
            "rollout": {"prompts": 16, "group_size": 2, "max_new_tokens": 40, "temperature": 1.0},
            "eval": {"prompts": 2, "samples": 2},
            "resources": {"generator_cpus": 1.0},
        }
    )


def wait_for(condition: Any, timeout_s: float = 60.0) -> bool:
    until = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < until:
        time.sleep(0.05)
    return condition()


def test_an_environment_that_fails_costs_its_own_group_and_leaves_no_process(file: Path) -> None:
    config = config_of(file)
    before = set(_processes_with_mark())
    generator = Generator(config, InProcess())
    prompts = generator._prompts
    try:
        kinds = [prompts.ground_truth("train", index) for index in range(16)]
        unit = generator.generate([prompts.request("train", index) for index in range(16)])
        assert isinstance(unit, Scored)
        again = generator.generate([prompts.request("train", index) for index in range(16)])
    finally:
        generator.close()
    assert wait_for(lambda: set(_processes_with_mark()) <= before)
    assert {kinds[group.prompt_index] for group in unit.groups} == FINE
    assert len(unit.groups) == 4
    for group in unit.groups:
        assert group.turn_rewards is not None
        earned = ~group.turn_rewards.isnan()
        assert group.rewards.tolist() == (0.5 * earned.sum(dim=1)).tolist()
        assert earned.sum(dim=1).max() <= 3
        assert group.info == {"turns": float(earned.sum(dim=1).double().mean())}
        assert (earned & ~group.response_mask).sum() == 0
    reasons = {kinds[prompt.prompt_index]: prompt.reason for prompt in unit.failed}
    assert set(reasons) == set(WHY)
    for kind, why in WHY.items():
        assert re.search(why, reasons[kind]), (kind, reasons[kind])
    assert unit.reward_errors >= len(WHY)
    # The failures had no lasting effect: the next call gives the same bits for the good groups.
    assert isinstance(again, Scored)
    for one, other in zip(unit.groups, again.groups, strict=True):
        assert torch.equal(one.response_ids, other.response_ids)
        assert torch.equal(one.behaviour_log_probs, other.behaviour_log_probs)


def _processes_with_mark() -> list[int]:
    """Return the pids of all other processes whose environment contains the `MARK` of workers."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            if MARK.encode() in environment.read_bytes():
                found.append(int(environment.parent.name))
        except OSError:
            continue
    return [pid for pid in found if pid != os.getpid()]


def test_a_slow_answer_does_not_hold_the_others(file: Path) -> None:
    """While one episode waits, the others keep sampling. The slow episode's group still arrives."""
    config = config_of(file, step_deadline_s=20.0, episode_deadline_s=20.0, patience_s=0.0)
    task = build_task(config)
    tokenizer = Tokenizer.load(file.parent / "policy" / "tokenizer.json")
    prompts = Prompts(config, task, tokenizer)
    generator = Generator(config, InProcess())
    requests = [prompts.request("train", index) for index in (0, 8)]  # "good", "slow in all"
    try:
        unit = generator.generate(requests)
    finally:
        generator.close()
    assert isinstance(unit, Scored)
    assert [group.prompt_index for group in unit.groups] == [0, 8]


def test_what_an_environment_lacks_is_told_before_anything_starts(file: Path) -> None:
    with pytest.raises(ValueError, match=r"env\.name=.*:Lacking: has no method step"):
        check_environment(EnvSettings(name=f"{file}:Lacking"), {}, "")
    with pytest.raises(ValueError, match=r"env\.name=.*:Nothing: cannot be imported"):
        check_environment(EnvSettings(name=f"{file}:Nothing"), {}, "")
    check_environment(EnvSettings(name="guess"), {"secret": "3"}, "Guess 0-9\n")
    with pytest.raises(EpisodeError, match=r'reset returned "Guess 0-9\\n", but the task.s prompt'):
        check_environment(EnvSettings(name="guess"), {"secret": "3"}, "Guess!")


@pytest.mark.parametrize(("task", "truth"), [("keyword", r'\["\w+"\]'), ("math", r'"\d+"')])
def test_an_environment_that_cannot_begin_its_task_is_refused_before_anything_starts(
    task: str, truth: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """The setting `allow_unsafe` is for machines without bubblewrap. This test runs no code."""
    settings = [f"task.name={task}", "env.name=python", "env.allow_unsafe=true", "arm=sync"]
    assigned = [word for setting in settings for word in ("--set", setting)]
    command = ["--space", "async_vs_sync", "--storage", str(tmp_path), "--dry-run", *assigned]
    assert tune.main(command) == 2
    assert re.search(
        "env.name=python: ValueError: needs a ground truth with question and answer; the first "
        f"training example of task.name={task} has the specification {truth}\n",
        capsys.readouterr().err,
    )


def test_a_closed_player_ends_at_once(file: Path) -> None:
    config = config_of(file, step_deadline_s=100.0, episode_deadline_s=100.0)
    tokenizer = Tokenizer.load(file.parent / "policy" / "tokenizer.json")
    prompts = Prompts(config, build_task(config), tokenizer)
    before = set(_processes_with_mark())
    player = EpisodePlayer(config.env, prompts, tokenizer)
    player._begun([prompts.request("train", 9)])  # the specification "hang in reset"
    start = time.monotonic()
    player.close()
    assert time.monotonic() - start < 30
    assert wait_for(lambda: not set(_processes_with_mark()) - before)
