"""How far the clocks of a trial's machines are apart, so that their spans lie on one time line."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from grpo_trainable.telemetry.timers import now

ASKED = 6  # times; the first one starts a process there


class Answer(NamedTuple):
    """A clock elsewhere was read between two readings of ours; all in seconds since 1970."""

    asked: float
    there: float
    answered: float


def offset(answers: Iterable[Answer]) -> float:
    """Seconds that the clock elsewhere is ahead of ours, by the quickest answer: it is wrong by at
    most half the time which that took (Cristian 1989)."""
    quickest = min(answers, key=lambda answer: answer.answered - answer.asked)
    return quickest.there - (quickest.asked + quickest.answered) / 2


def offset_of(node: str) -> float:
    """Seconds that the clock of a machine, given by Ray's id, is ahead of this process's."""
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    options: dict[str, Any] = {"num_cpus": 0, "scheduling_strategy": there}
    clock = ray.remote(**options)(_clock)
    return offset([Answer(now(), ray.get(clock.remote()), now()) for _ in range(ASKED)])


def _clock() -> float:
    """Seconds since 1970; Ray takes no function that is built in."""
    return time.time()
