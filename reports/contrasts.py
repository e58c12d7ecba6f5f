"""Differences in speed and reward between an arm and the baseline, with their noise.

Runs are paired by seed. Speeds leave out rounds in which other processes took too much of the
machine (`grpo_trainable.telemetry.machine_load`), as long as enough rounds remain
(`reports.pace`). With `callbacks.leave_out_disturbed=false`, disturbed rounds count.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from grpo_trainable.text import written
from reports.intervals import (
    Estimate,
    Spread,
    alike,
    over_prompts,
    over_rounds,
    over_seeds,
    seeds_needed,
)
from reports.pace import Pace, counted_disturbed
from reports.records import TrialRecord


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """Comparison of an arm with the baseline in one quantity."""

    value: float
    neutral: float  # the value if both arms are equal: 1 for a ratio, 0 for a difference
    seeds: Sequence[int]  # seeds that the value is computed from
    interval: Estimate | None = None
    spread: Spread | None = None  # variance over the seeds; for a ratio, the variance of its log
    identical: int = 0  # number of prompts if the arms have equal rewards on every prompt, else 0
    # If a speed includes disturbed rounds: a text that counts these rounds by arm. Otherwise empty.
    counted_disturbed: str = ""

    @property
    def told_apart(self) -> bool | None:
        """Return True if the interval excludes equality, or None if there is no interval.

        If both arms have the same reward on every prompt, there is no interval, and the answer is
        False.
        """
        if self.interval is None:
            return False if self.identical else None
        return self.interval.apart_from(self.neutral)

    @property
    def more(self) -> bool:
        """Return True if the arm's figure is above the baseline's."""
        return self.value > self.neutral

    def clearly(self, *, more: bool) -> bool:
        """Return True if the interval lies above equality (with more=False, below equality)."""
        return bool(self.told_apart) and self.more is more

    @property
    def seeds_needed(self) -> int | None:
        """Number of seeds with which four of five experiments would show a difference of this size.

        None if the number is above `intervals.MOST_SEEDS` or unknown.
        """
        if self.spread is None:
            return None
        effect = math.log(self.value) if self.neutral else self.value
        return seeds_needed(effect, self.spread)

    def shown_interval(self, form: str) -> str:
        """Return the interval as text; empty if there is none.

        Args:
            form: The format of both ends. If the interval excludes equality, but a rounded end
                would be equality, both ends get more digits.
        """
        if self.interval is None:
            return ""
        ends = (self.interval.low, self.interval.high)
        while self.told_apart and any(
            written(end, form) == written(self.neutral, form) for end in ends
        ):
            form = re.sub(r"\d(?=f)", lambda digits: str(int(digits[0]) + 1), form)
        # The interval of a ratio over two seeds can be absurdly wide.
        most = 100.0 if self.neutral else math.inf
        low, high = (written(end, form) if end < most else f"more than {most:g}" for end in ends)
        return f"{low} to {high}"

    def times(self, factor: float) -> Contrast:
        """Return the ratio and its interval in a different unit."""
        interval = self.interval and self.interval.times(factor)
        return replace(self, value=factor * self.value, interval=interval)


@dataclass(frozen=True, kw_only=True)
class NotComparable:
    """Result without a value, because the value cannot be trusted."""

    why: str


def speed_up(
    arm: Sequence[TrialRecord], base: Sequence[TrialRecord]
) -> Contrast | NotComparable | None:
    """Return the speed of an arm relative to the baseline: the geometric mean over shared seeds.

    A seed in which the arm or the baseline has hardly begun is left out if there are other seeds. A
    seed in which the arm or the baseline was disturbed is left out too. If fewer than half of the
    seeds remain, the two arms are not comparable.

    Args:
        arm: The trials of the arm.
        base: The trials of the baseline.

    Returns:
        The ratio of responses per second, the reason why there is no ratio, or None if the two arms
        share no seed.
    """
    own, other = _paces(arm), _paces(base)
    begun = [seed for seed in own if seed in other]
    if not begun:
        return None
    enough = [seed for seed in begun if own[seed].enough and other[seed].enough]
    shared = enough or begun
    sound = [seed for seed in shared if own[seed].comparable and other[seed].comparable]
    if 2 * len(sound) < len(shared):
        return NotComparable(why="; ".join(doubts([*arm, *base])))
    logs = [math.log(own[seed].samples_per_s / other[seed].samples_per_s) for seed in sound]
    log = spread = None
    if len(sound) == 1:
        log = over_rounds(_rounds(own[sound[0]]), _rounds(other[sound[0]]))
    elif enough:
        log, spread = over_seeds(logs)
    return Contrast(
        value=math.exp(sum(logs) / len(logs)),
        neutral=1.0,
        seeds=sound,
        interval=log and log.exp(),
        spread=spread,
        counted_disturbed=counted_disturbed(
            (trial.arm, trial.pace) for trial in (*base, *arm) if trial.config.seed in sound
        ),
    )


def doubts(trials: Sequence[TrialRecord]) -> list[str]:
    """Name each trial whose speed cannot be trusted, with the reason."""
    return [
        f"{trial.arm}, seed {trial.config.seed}: {trial.pace.doubt}"
        for trial in trials
        if trial.pace is not None and not trial.pace.comparable
    ]


def _paces(trials: Sequence[TrialRecord]) -> dict[int, Pace]:
    return {trial.config.seed: trial.pace for trial in trials if trial.pace is not None}


def _rounds(found: Pace) -> tuple[Sequence[float], Sequence[float]]:
    return found.seconds, found.responses


def reward_difference(
    arm: Mapping[int, Mapping[str, float]], base: Mapping[int, Mapping[str, float]]
) -> Contrast | None:
    """Return the difference between the held-out rewards of an arm and the baseline.

    Seeds are paired, and so are prompts. A prompt counts only if both arms have a reward for it in
    every shared seed.

    Args:
        arm: seed -> prompt -> mean reward of the prompt's responses in the last evaluation.
        base: seed -> prompt -> mean reward, for the baseline.

    Returns:
        The mean difference, or None if the two arms share no seed or no prompt.
    """
    shared, differences = paired_prompts(arm, base)
    if not differences.size:
        return None
    prompts = differences.shape[1]
    mean = float(differences.mean())
    if prompts == 1 or alike(differences):
        identical = prompts if prompts > 1 and not differences.any() else 0
        return Contrast(value=mean, neutral=0.0, seeds=shared, identical=identical)
    interval, spread = over_prompts(differences)
    return Contrast(
        value=interval.value, neutral=0.0, seeds=shared, interval=interval, spread=spread
    )


def paired_prompts(
    arm: Mapping[int, Mapping[str, float]], base: Mapping[int, Mapping[str, float]]
) -> tuple[list[int], np.ndarray]:
    """Return the shared seeds, and the difference for each seed and prompt, (n, P).

    A seed counts only if the two arms share a prompt in it. A prompt counts only if both arms have
    a reward for it in every shared seed.

    Args:
        arm: seed -> prompt -> mean reward of the prompt's responses in the last evaluation.
        base: seed -> prompt -> mean reward, for the baseline.
    """
    shared = [seed for seed in arm if seed in base and arm[seed].keys() & base[seed].keys()]
    every = [set(side[seed]) for side in (arm, base) for seed in shared]
    prompts = sorted(set.intersection(*every)) if every else []
    differences = [[arm[s][p] - base[s][p] for p in prompts] for s in shared]
    return shared, np.array(differences).reshape(len(shared), len(prompts))
