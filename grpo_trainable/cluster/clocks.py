"""Measure clock offsets between a trial's machines, to put their spans on one timeline."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from grpo_trainable.telemetry.timers import now

ASKED = 6  # readings of a remote clock; the first reading starts a process there


class Answer(NamedTuple):
    """One reading of a remote clock and the two local readings around it, in seconds since 1970."""

    asked: float
    there: float
    answered: float


def offset(answers: Iterable[Answer]) -> float:
    """Return the seconds by which the remote clock is ahead of the local clock.

    The result comes from the quickest answer. Its error is at most half the time that this answer
    took (Cristian 1989).
    """
    quickest = min(answers, key=lambda answer: answer.answered - answer.asked)
    return quickest.there - (quickest.asked + quickest.answered) / 2


def offset_of(node: str) -> float:
    """Return the seconds by which the clock of a machine is ahead of this machine's clock.

    Args:
        node: Ray's id of the machine.
    """
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    options: dict[str, Any] = {"num_cpus": 0, "scheduling_strategy": there}
    clock = ray.remote(**options)(_clock)
    return offset([Answer(now(), ray.get(clock.remote()), now()) for _ in range(ASKED)])


def _clock() -> float:
    """Return the seconds since 1970. `ray.remote` does not accept the built-in `time.time`."""
    return time.time()
