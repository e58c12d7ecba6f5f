"""Processes that are killed, and programs that are interrupted, at random moments."""

from __future__ import annotations

import random
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from survival import FIRST, LAST, Experiment, Fault, Lost, Outcome, interrupt, judge, none_left

from grpo_trainable.checkpointing import CheckpointError, checkpoint_round


def kill(role: str, arms: tuple[str, ...], rng: random.Random, repeat: int) -> Outcome:
    """SIGKILL to an actor or to the Trainable: Tune and the pipeline have to go on alone."""
    with tempfile.TemporaryDirectory() as storage:
        experiment = Experiment(Path(storage), arms[repeat % len(arms)])
        with experiment.start() as running:
            running.wait_for_rounds(rng.randint(FIRST, LAST))
            victim = running.process_of(role)
            time.sleep(rng.random() * 0.3)
            before, struck = len(experiment.rows()), time.time()
            victim.kill()
            running.ends_well()
        return judge(experiment, f"{experiment.arm}, round {before}", before, struck)


STUCK_AFTER_S = 15.0


def stop_generator(rng: random.Random, repeat: int) -> Outcome:
    """SIGSTOP: the process is there and answers nothing; `resources.deadline_s` finds it."""
    with tempfile.TemporaryDirectory() as storage:
        settings = {"resources.deadline_s": STUCK_AFTER_S}
        experiment = Experiment(Path(storage), ("sync", "async_k1")[repeat % 2], **settings)
        with experiment.start() as running:
            running.wait_for_rounds(rng.randint(FIRST, LAST))
            victim = running.process_of("Generator")
            before, struck = len(experiment.rows()), time.time()
            victim.suspend()
            running.wait_for(lambda: len(experiment.rows()) > before + 2)
            if victim.is_running():
                raise Lost("the stopped process was left")
            running.ends_well()
        return judge(experiment, f"{experiment.arm}, round {before}", before, struck)


def damage(checkpoint: Path) -> str | None:
    """Return what is wrong with a checkpoint, or None when it is whole."""
    try:
        checkpoint_round(checkpoint)
    except CheckpointError as error:
        return str(error)
    return None


def kill_while_copying(rng: random.Random, repeat: int) -> Outcome:
    """SIGKILL to the Trainable as a checkpoint's directory appears in the storage path."""
    with tempfile.TemporaryDirectory() as storage:
        experiment = Experiment(Path(storage), ("sync", "colocated_k1")[repeat % 2])
        with experiment.start() as running:
            running.wait_for_rounds(1)
            victim = running.process_of("DetailedGRPO")
            copy = experiment.trial / f"checkpoint_{rng.randint(1, 2):06d}"
            running.wait_for(copy.exists, step_s=0.0002)
            time.sleep(rng.random() * 0.004)
            struck = time.time()
            victim.kill()
            victim.wait()
            torn = damage(copy)
            before = len(experiment.rows())
            running.ends_well()
        left = f"torn: {torn}" if torn else "whole by then"
        return judge(experiment, f"{experiment.arm}, round {before}, {left}", before, struck)


def kill_driver(rng: random.Random, repeat: int) -> Outcome:
    arms = ("sync", "colocated_k1", "async_k1")
    with tempfile.TemporaryDirectory() as storage:
        experiment = Experiment(Path(storage), arms[repeat % len(arms)])
        with experiment.start() as running:
            running.wait_for_rounds(rng.randint(FIRST, LAST))
            time.sleep(rng.random() * 0.3)
            family, before = running.family(), len(experiment.rows())
            running.process.send_signal(signal.SIGKILL)
            running.output()
            left = none_left(family)
        struck = time.time()
        experiment.resume()
        return judge(experiment, f"{experiment.arm}, round {before}, {left}", before, struck)


REPLAY = {"buffer_capacity": 3, "buffer_sampling": "uniform", "buffer.sample_batches": 2}


def interrupt_and_resume(rng: random.Random, repeat: int, **settings: Any) -> Outcome:
    """Ctrl-C at a random round: nothing is repeated, and the end is bit for bit the same."""
    with tempfile.TemporaryDirectory() as storage:
        experiment = Experiment(Path(storage), ("sync", "colocated_k1")[repeat % 2], **settings)
        with experiment.start() as running:
            running.wait_for_rounds(rng.randint(FIRST, LAST))
            interrupt(running)
        before, struck = len(experiment.rows()), time.time()
        experiment.resume()
        return judge(experiment, f"{experiment.arm}, round {before}", before, struck)


def killed(role: str, *arms: str):
    return lambda rng, repeat: kill(role, arms, rng, repeat)


FAULTS = (
    Fault(name="generator SIGKILL", repeats=20, strike=killed("Generator", "sync", "async_k1")),
    Fault(name="generator SIGSTOP, deadline 15 s", repeats=4, strike=stop_generator),
    Fault(name="learner SIGKILL", repeats=10, strike=killed("Learner", "sync", "async_k1")),
    Fault(
        name="colocated worker SIGKILL",
        repeats=10,
        strike=killed("Colocated", "colocated_k1", "colocated_k4"),
    ),
    Fault(
        name="Trainable SIGKILL",
        repeats=10,
        strike=killed("DetailedGRPO", "sync", "colocated_k1", "async_k1"),
    ),
    Fault(name="driver SIGKILL, then --resume", repeats=10, strike=kill_driver),
    Fault(name="Ctrl-C, then --resume", repeats=10, strike=interrupt_and_resume),
    Fault(
        name="the same, with a replay buffer",
        repeats=10,
        strike=lambda rng, repeat: interrupt_and_resume(rng, repeat, **REPLAY),
    ),
    Fault(name="SIGKILL while Tune copies", repeats=6, strike=kill_while_copying),
)
