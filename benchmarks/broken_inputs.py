"""Rewards that fail, losses that are not finite, and command lines that are wrong."""

from __future__ import annotations

import math
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
from measure import ROOT
from survival import ROUNDS, Experiment, Fault, Lost, Outcome

from grpo_trainable.actors.generator import Generator
from grpo_trainable.actors.learner import Learner
from grpo_trainable.actors.scorer import ProcessScorer
from grpo_trainable.config import GRPOConfig
from grpo_trainable.messages import LearnerState
from grpo_trainable.prompts import Prompts, build_task
from grpo_trainable.tasks import RewardError, ScoreRequest
from grpo_trainable.transports.in_process import InProcess

EVERY = 40  # calls of the reward function, of which one fails
DEADLINE_S = 1.0
LONGEST_USAGE_S = 3.0

REWARDS = {
    "raises": "raise RuntimeError('the reward service is gone')",
    "hangs": "time.sleep(3600)",
    "returns NaN": "return float('nan')",
    "returns a list": "return [1.0, 2.0]",
}
REWARD = """
import time

calls = 0

def reward(response, ground_truth):
    global calls
    calls += 1
    if calls % {every} == 0:
        {failure}
    return float("." in response)
"""


def failing_reward(failure: str, repeat: int) -> Outcome:
    """One in forty calls fails; the run goes on and counts."""
    with tempfile.TemporaryDirectory() as storage:
        file = Path(storage) / "rewards.py"
        file.write_text(REWARD.format(every=EVERY, failure=REWARDS[failure]))
        settings = {"task.reward": f"{file}:reward", "task.reward_deadline_s": DEADLINE_S}
        experiment = Experiment(Path(storage), ("sync", "async_k1")[repeat % 2], **settings)
        with experiment.start() as running:
            running.ends_well()
        last = experiment.rows()[-1]
        errors, dropped = last["count/reward_errors"], last["count/dropped_reward"]
        closes = last["count/requested"] == last["count/trained"] + last["count/dropped"]
        return Outcome(
            survived=len(experiment.rows()) == ROUNDS and errors > 0 and closes,
            happened=f"{experiment.arm}: {errors:.0f} failures counted, {dropped:.0f} groups "
            f"dropped, {last['count/trained']:.0f} trained on",
        )


def cost_of_a_hang(rng: random.Random, repeat: int) -> Outcome:
    """Seconds that one hang takes until the spare has answered the next request."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "rewards.py"
        file.write_text(REWARD.format(every=2, failure=REWARDS["hangs"]))
        scorer = ProcessScorer(f"{file}:reward", deadline_s=DEADLINE_S)
        seconds = []
        try:
            request = ScoreRequest("a response.", None)
            scorer.score([request])
            for _ in range(5):
                start = time.monotonic()
                hung, answer = scorer.score([request, request])
                seconds.append(time.monotonic() - start)
                if not isinstance(hung, RewardError) or isinstance(answer, RewardError):
                    raise Lost(f"got {hung} and {answer}")
        finally:
            scorer.close()
    return Outcome(
        survived=max(seconds) <= DEADLINE_S + 1,
        happened=f"deadline {DEADLINE_S:g} s: {len(seconds)} hangs took at most "
        f"{max(seconds):.2f} s each, the next answer included",
    )


def always(failure: str) -> Outcome:
    """Every call fails: the trial ends with a line that says why."""
    with tempfile.TemporaryDirectory() as storage:
        file = Path(storage) / "rewards.py"
        file.write_text(REWARD.format(every=1, failure=REWARDS[failure]))
        settings = {"task.reward": f"{file}:reward", "task.reward_deadline_s": DEADLINE_S}
        return fails_and_names("task.max_error_rate", Path(storage), **settings)


def fails_and_names(cause: str, storage: Path, **settings: Any) -> Outcome:
    """Survived is here: status 1, and the line of the failed trial names the cause."""
    experiment = Experiment(storage, "sync", **settings)
    start = time.monotonic()
    with experiment.start() as running:
        text = running.output()
        status = running.process.returncode
    line = next((line for line in text.splitlines() if line.startswith("failed: ")), "")
    return Outcome(
        survived=status == 1 and cause in line,
        happened=f"status {status} after {time.monotonic() - start:.0f} s: {line[:160]}",
    )


def nan_loss(rng: random.Random, repeat: int) -> Outcome:
    """Rewards that are NaN reach the learner: nothing of it changes, and it ends after N steps."""
    config = GRPOConfig.from_dict({"seed": repeat, "rollout": {"prompts": 2}})
    transport = InProcess()
    learner, generator = Learner(config, transport), Generator(config, transport)
    generator.load(learner.publish().handle)
    prompts = Prompts(config, build_task(config), generator._tokenizer)
    groups = generator.generate([prompts.request("train", i) for i in range(2)]).groups
    learner.update([groups])
    before = learner.state()
    spoilt = [replace(group, rewards=torch.full((4,), math.nan)) for group in groups]
    limit = config.optim.max_skipped_steps
    for step in range(limit):
        if not learner.update([spoilt]).steps[0].skipped:
            raise Lost(f"step {step} was taken")
    same = bit_equal(before, learner.state())
    try:
        learner.update([spoilt])
    except RuntimeError as error:
        message = str(error)
    else:
        raise Lost("it went on")
    return Outcome(
        survived=same and bit_equal(before, learner.state()),
        happened=f"{limit + 1} steps: policy and optimizer bit-equal; then: {message[:90]}",
    )


def bit_equal(a: LearnerState, b: LearnerState) -> bool:
    pairs = ((a.policy, b.policy), (a.optimizer, b.optimizer))
    return all(x.keys() == y.keys() and all(x[name].equal(y[name]) for name in x) for x, y in pairs)


def exploding_run(rng: random.Random, repeat: int) -> Outcome:
    """A learning rate that makes the loss overflow: the trial ends with a line that says so."""
    with tempfile.TemporaryDirectory() as storage:
        return fails_and_names("optim.max_skipped_steps=3", Path(storage), **{"optim.lr": 1e6})


SPACE = ("--space", "async_vs_sync")
BAD_SETTINGS = (
    *("optim.lrr=1", "optim.lr=fast", "optim.lr", "optim.lr=-1", "optim.betas=[0.9,1.5]"),
    *("k=0", "k=two", "lag=-1", "lag=1", "k_mode=sometimes", "placement=everywhere"),
    *("rollout.group_size=1", "rollout.temperature=0", "rollout.prompts=0"),
    *("rollout.max_new_tokens=128", "rollout.unit_prompts=17", "rollout.min_new_tokens=61"),
    *("buffer_capacity=4", "transport=nixl", "transport=pigeon", "loss.type=guess", "loss.clip=1"),
    *("eval.every=0", "checkpoint.every=0", "checkpoint.keep=-1", "arm=asynck1", "rollout=3"),
    *("resources.worker_cpus=4096", "resources.num_learners=0", "resources.deadline_s=0"),
    *("model.path=nowhere", "model.preset=huge", "task.keywords_file=nowhere"),
    *("task.train_file=nowhere", "task.reward=nowhere:f", "task.max_error_rate=2"),
)
BAD_ARGUMENTS: tuple[Sequence[str], ...] = (
    *([*SPACE, "--set", setting] for setting in BAD_SETTINGS),
    [],
    ["--space", "async_vs_snc"],
    [*SPACE, "--bogus"],
    [*SPACE, "--iterations", "0"],
    [*SPACE, "--iterations", "3", "--set", "rounds=4"],
    [*SPACE, "--num-samples", "none"],
    [*SPACE, "--max-failures", "-3"],
    [*SPACE, "--name", "../elsewhere"],
    [*SPACE, "--scheduler", "hyperband"],
    [*SPACE, "--storage", "/proc/nowhere"],
    ["--resume"],
    [*SPACE, "--resume", "--name", "never_started"],
)


def bad_arguments(rng: random.Random, repeat: int) -> Outcome:
    seconds = []
    with tempfile.TemporaryDirectory() as storage:
        for arguments in BAD_ARGUMENTS:
            script = str(ROOT / "launch" / "tune.py")
            start = time.monotonic()
            process = subprocess.Popen(
                [sys.executable, script, "--storage", storage, *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=storage,
            )
            while process.poll() is None:
                if any("raylet" in child.name() for child in children_of(process.pid)):
                    raise Lost(f"{' '.join(arguments)}: Ray was started")
                time.sleep(0.01)
            seconds.append(time.monotonic() - start)
            out, error = process.communicate()
            if process.returncode != 2 or out or error.count("\n") != 1:
                raise Lost(f"{' '.join(arguments)}: status {process.returncode}: {out}{error}")
    return Outcome(
        survived=max(seconds) < LONGEST_USAGE_S,
        happened=f"{len(seconds)} command lines: status 2 and one line each, median "
        f"{sorted(seconds)[len(seconds) // 2]:.2f} s, at most {max(seconds):.2f} s; no Ray",
    )


def children_of(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


FAULTS = (
    *(
        Fault(
            name=f"reward {failure}",
            repeats=2,
            strike=lambda rng, repeat, failure=failure: failing_reward(failure, repeat),
        )
        for failure in REWARDS
    ),
    Fault(name="cost of a hang", repeats=1, strike=cost_of_a_hang),
    Fault(name="reward always raises", repeats=1, strike=lambda rng, _: always("raises")),
    Fault(name="reward always hangs", repeats=1, strike=lambda rng, _: always("hangs")),
    Fault(name="NaN loss", repeats=3, strike=nan_loss),
    Fault(name="loss overflows", repeats=1, strike=exploding_run),
    Fault(name="bad command lines", repeats=1, strike=bad_arguments),
)
