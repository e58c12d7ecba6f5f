"""Intervals at 95 %, for comparisons of two arms over few seeds and for figures over prompts, and
how many seeds would tell.

Two runs of one program differ by more than the noise of their rounds: the machine changes too. So
a speed-up is estimated once a seed, from runs that stood near each other in time, and the interval
is Student's over the logarithms of the seeds' ratios, whose spread includes the noise of rounds. A
percentile bootstrap over seeds and rounds covers far less than it says with three to five seeds;
`tests/unit/reports/test_intervals.py` simulates both. With one seed the interval covers the noise
of the rounds alone, which follow each other, and says nothing about other runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from grpo_trainable.text import plural

LEVEL, POWER = 0.95, 0.80
NORMAL_POWER = 0.8416  # the standard normal's quantile at POWER
NORMAL = 1.959964  # the same at 0.5 + LEVEL / 2
MOST_SEEDS = 50  # a larger number of seeds would be no useful advice
LEAST_ROUNDS = 4  # rounds needed to estimate a spread
BATCHES = 5  # of a run's rounds: each as long as possible, and enough to estimate a spread


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and its interval at 95 %."""

    value: float
    low: float
    high: float

    def apart_from(self, value: float) -> bool:
        return not self.low <= value <= self.high

    def times(self, factor: float) -> Estimate:
        return Estimate(factor * self.value, factor * self.low, factor * self.high)

    def exp(self) -> Estimate:
        return Estimate(_exp(self.value), _exp(self.low), _exp(self.high))


def _exp(value: float) -> float:
    return math.exp(min(value, 600.0))  # the interval of two seeds may exceed every float


@dataclass(frozen=True, slots=True)
class Spread:
    """The two parts of an estimate's variance: `between` falls with the number of seeds, `floor`
    does not."""

    between: float
    floor: float = 0.0


def over_seeds(values: Sequence[float]) -> tuple[Estimate, Spread]:
    """The mean of one value a seed, (n,) with n >= 2, and Student's interval."""
    own = np.asarray(values, dtype=float)
    between = float(own.var(ddof=1))
    half = student(0.5 + LEVEL / 2, len(own) - 1) * math.sqrt(between / len(own))
    mean = float(own.mean())
    return Estimate(mean, mean - half, mean + half), Spread(between)


def over_rounds(
    arm: tuple[Sequence[float], Sequence[float]], base: tuple[Sequence[float], Sequence[float]]
) -> Estimate | None:
    """Estimate the log of how many times as many responses a second `arm` has, in one run of each.

    Each is (seconds, responses) of its rounds, (R,). A slow round is followed by slow ones, so the
    spread is that of the means of `BATCHES` long batches of consecutive rounds (Schmeiser 1982),
    with Welch's degrees of freedom.

    Returns:
        The estimate, or None if an arm has fewer than `LEAST_ROUNDS` rounds with responses.
    """
    sides = [np.asarray(side, dtype=float) for side in (arm, base)]
    if min(np.count_nonzero(responses) for _, responses in sides) < LEAST_ROUNDS:
        return None
    rates, variances, degrees = zip(*map(_log_rate, sides), strict=True)
    value, variance = rates[0] - rates[1], sum(variances)
    half = 0.0
    if variance > 0:
        parts = [own**2 / freedom for own, freedom in zip(variances, degrees, strict=True)]
        half = student(0.5 + LEVEL / 2, variance**2 / sum(parts)) * math.sqrt(variance)
    return Estimate(value, value - half, value + half)


def _log_rate(rounds: np.ndarray) -> tuple[float, float, int]:
    """Return the log of responses a second of rounds (2, R), its variance by the delta method, and
    the degrees of freedom of that."""
    seconds, responses = rounds / rounds.sum(1, keepdims=True)
    influence = [part.sum() for part in np.array_split(responses - seconds, BATCHES)]
    batches = min(BATCHES, len(seconds))
    total_s, total = rounds.sum(1)
    variance = float(np.square(influence).sum()) * batches / (batches - 1)
    return math.log(total / total_s), variance, batches - 1


def over_prompts(differences: np.ndarray) -> tuple[Estimate, Spread | None]:
    """The mean difference of the same prompts with several seeds, (n, P), and its interval for
    other seeds and other prompts: both are drawn at random, so the variance is that of a two-way
    table, (MS_seeds + MS_prompts - MS_rest) / (n P), with Satterthwaite's degrees of freedom. With
    one seed the interval is for other prompts alone, and the spread between seeds is unknown.
    """
    seeds, prompts = differences.shape
    mean = float(differences.mean())
    if seeds == 1:
        estimate, _ = over_seeds(differences[0].tolist())
        return estimate, None
    of_seeds, of_prompts = differences.mean(1) - mean, differences.mean(0) - mean
    rest = differences - mean - of_seeds[:, None] - of_prompts
    degrees = (seeds - 1, prompts - 1, (seeds - 1) * (prompts - 1))
    squares = [prompts * (of_seeds**2).sum(), seeds * (of_prompts**2).sum(), (rest**2).sum()]
    means = [float(s) / d for s, d in zip(squares, degrees, strict=True)]
    # The variance is at least that of the seeds alone and that of the prompts alone.
    total = max(means[0] + means[1] - means[2], means[0], means[1])
    weight = sum(m**2 / d for m, d in zip(means, degrees, strict=True))
    half = 0.0
    if weight > 0:
        freedom = max(1.0, min(total**2 / weight, 1e6))
        half = student(0.5 + LEVEL / 2, freedom) * math.sqrt(total / (seeds * prompts))
    floor = max(0.0, means[1] - means[2]) / (seeds * prompts)
    return Estimate(mean, mean - half, mean + half), Spread(means[0] / prompts, floor)


def alike(values: np.ndarray) -> bool:
    """Whether all values are equal, but for rounding: they do not tell how far others scatter, and
    Student's interval around them would have no width."""
    return float(np.ptp(values)) <= 1e-12 * float(np.abs(values).max())


def identical(prompts: int) -> str:
    """What stands in place of the interval of two that differ in none of so many prompts; empty
    where there are none of those."""
    return f"no difference in any of {plural(prompts, 'prompt')}" if prompts else ""


def wilson(share: float, trials: float) -> Estimate:
    """A share of `trials` that came out one way, and Wilson's score interval (1927)."""
    square = NORMAL**2 / trials
    middle = (share + square / 2) / (1 + square)
    half = NORMAL / (1 + square) * math.sqrt(share * (1 - share) / trials + square / (4 * trials))
    # Rounding must not put a share of 0 or 1 outside.
    return Estimate(share, max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half)))


def share_over_prompts(values: np.ndarray, draws: int) -> Estimate:
    """The mean of one share a prompt, (P,) in [0, 1], and its interval for other prompts.

    Wilson's, for as many trials as would scatter as the prompts do: share (1 - share) over the
    variance of the mean, the effective sample size of survey statistics (Kish 1965; Korn and
    Graubard 1998). It is at least one a prompt, and at most one for each of a prompt's independent
    `draws`. So prompts that are all right or all wrong still have an interval, where a bootstrap
    over them has none.
    """
    share, prompts = math.fsum(values) / len(values), len(values)
    variance = float(values.var(ddof=1)) / prompts if prompts > 1 else 0.0
    trials: float = prompts
    if 0 < share < 1:
        trials = share * (1 - share) / variance if variance else math.inf
    return wilson(share, min(max(trials, prompts), prompts * draws))


def seeds_needed(effect: float, spread: Spread) -> int | None:
    """How many seeds it takes to tell an effect of this size from none in `POWER` of the
    experiments; None when it is more than `MOST_SEEDS`."""
    for seeds in range(2, MOST_SEEDS + 1):
        error = math.sqrt(spread.between / seeds + spread.floor)
        if abs(effect) >= (student(0.5 + LEVEL / 2, seeds - 1) + NORMAL_POWER) * error:
            return seeds if effect else None
    return None


@cache
def student(probability: float, freedom: float) -> float:
    """The quantile of Student's t, for a probability from 0.5 to 0.99 and at least one degree of
    freedom, by bisection."""
    low, high = 0.0, 64.0  # 31.8 for 0.99 and one degree
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if _student_below(middle, freedom) < probability else (low, middle)
        )
    return (low + high) / 2


def _student_below(t: float, freedom: float) -> float:
    """P(T < t) for t >= 0. With t = sqrt(freedom) tan(angle) the density is proportional to
    cos(angle)^(freedom - 1), which Simpson's rule integrates."""
    angles = np.linspace(0.0, math.atan(t / math.sqrt(freedom)), 401)
    heights = np.cos(angles) ** (freedom - 1)
    step = angles[1] - angles[0]
    area = (
        step
        / 3
        * (heights[0] + 4 * heights[1:-1:2].sum() + 2 * heights[2:-1:2].sum() + heights[-1])
    )
    log_scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(math.pi) / 2
    return 0.5 + math.exp(log_scale) * float(area)
