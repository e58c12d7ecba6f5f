"""95% intervals over few seeds and over prompts, and the number of seeds that a comparison needs.

Two runs of one program differ by more than the noise of their rounds, because the machine changes
too. So a speed-up is estimated once per seed, from runs close in time. The interval is Student's,
computed on the logarithms of the seeds' ratios. The spread of these ratios includes the noise of
rounds.

With three to five seeds, the coverage of a percentile bootstrap over seeds and rounds is far
below its nominal level. `tests/unit/reports/test_intervals.py` simulates both methods. With one
seed, the interval covers only the noise of consecutive rounds, not the differences between runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from grpo_trainable.telemetry.machine_load import LEAST_ROUNDS
from grpo_trainable.text import plural

LEVEL, POWER = 0.95, 0.80
NORMAL_POWER = 0.8416  # quantile of the standard normal at POWER
NORMAL = 1.959964  # quantile of the standard normal at 0.5 + LEVEL / 2
MOST_SEEDS = 50  # advice to run more seeds than this would be useless
# Number of batches that a run is cut into: few enough that each has many rounds, and enough to
# compute a variance.
BATCHES = 5


@dataclass(frozen=True, slots=True)
class Estimate:
    """Value with its 95% interval."""

    value: float
    low: float
    high: float

    def apart_from(self, value: float) -> bool:
        """Return True if the interval excludes `value`."""
        return not self.low <= value <= self.high

    def times(self, factor: float) -> Estimate:
        """Return the estimate multiplied by a positive factor."""
        return Estimate(factor * self.value, factor * self.low, factor * self.high)

    def exp(self) -> Estimate:
        """Return the exponential of the estimate."""
        return Estimate(_exp(self.value), _exp(self.low), _exp(self.high))


def _exp(value: float) -> float:
    return math.exp(min(value, 600.0))  # the interval of two seeds can exceed the largest float


@dataclass(frozen=True, slots=True)
class Spread:
    """Two parts of an estimate's variance."""

    between: float  # variance with one seed; divide it by the number of seeds
    floor: float = 0.0  # variance that more seeds do not reduce

    def error(self, seeds: int) -> float:
        """Return the standard error of the estimate with this number of seeds."""
        return math.sqrt(self.between / seeds + self.floor)


def over_seeds(values: Sequence[float]) -> tuple[Estimate, Spread]:
    """Return the mean of the values of two or more seeds, with Student's interval."""
    own = np.asarray(values, dtype=float)
    spread = Spread(float(own.var(ddof=1)))
    half = student(0.5 + LEVEL / 2, len(own) - 1) * spread.error(len(own))
    mean = float(own.mean())
    return Estimate(mean, mean - half, mean + half), spread


def over_rounds(
    arm: tuple[Sequence[float], Sequence[float]], base: tuple[Sequence[float], Sequence[float]]
) -> Estimate | None:
    """Estimate the log of the ratio between two arms' responses per second, from one run of each.

    Slow rounds tend to follow slow rounds. So the run is cut into `BATCHES` long batches of
    consecutive rounds, and the spread is computed from the means of the batches (Schmeiser 1982),
    with Welch's degrees of freedom.

    Args:
        arm: Seconds and responses of the arm's rounds, (R,) each.
        base: Seconds and responses of the baseline's rounds, (R,) each.

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
    """Return the log of responses per second, with its variance and degrees of freedom.

    The delta method gives the variance.

    Args:
        rounds: Seconds and responses, (2, R).
    """
    seconds, responses = rounds / rounds.sum(1, keepdims=True)
    influence = [part.sum() for part in np.array_split(responses - seconds, BATCHES)]
    batches = min(BATCHES, len(seconds))
    total_s, total = rounds.sum(1)
    variance = float(np.square(influence).sum()) * batches / (batches - 1)
    return math.log(total / total_s), variance, batches - 1


def over_prompts(differences: np.ndarray) -> tuple[Estimate, Spread | None]:
    """Return the mean difference, with an interval that allows for other seeds and other prompts.

    Seeds and prompts are both drawn at random. So the variance is computed from a two-way table,
    as (MS_seeds + MS_prompts - MS_rest) / (n P), with Satterthwaite's degrees of freedom. If
    MS_seeds or MS_prompts is smaller than MS_rest, MS_rest is used in its place.

    Args:
        differences: One value per seed and prompt, (n, P).

    Returns:
        The estimate and the spread that its interval is computed from. With one seed, the interval
        allows only for other prompts, and the spread is None.
    """
    seeds, prompts = differences.shape
    mean = float(differences.mean())
    if seeds == 1:
        estimate, _ = over_seeds(differences[0].tolist())
        return estimate, None
    of_seeds, of_prompts, rest = means = mean_squares(differences)
    degrees = (seeds - 1, prompts - 1, (seeds - 1) * (prompts - 1))
    # Even if all runs were alike, the mean square of seeds would be about the residual mean square,
    # `rest`. A few seeds can agree better than that only by chance, and further seeds would not
    # agree as well.
    spread = Spread(
        between=max(of_seeds, rest) / prompts,
        floor=max(0.0, of_prompts - rest) / (seeds * prompts),
    )
    total = seeds * prompts * spread.error(seeds) ** 2
    weight = sum(m**2 / d for m, d in zip(means, degrees, strict=True))
    half = 0.0
    if weight > 0:
        freedom = max(1.0, min(total**2 / weight, 1e6))
        half = student(0.5 + LEVEL / 2, freedom) * spread.error(seeds)
    return Estimate(mean, mean - half, mean + half), spread


def mean_squares(differences: np.ndarray) -> list[float]:
    """Return the mean squares of a two-way table: of seeds, of prompts, and of the residuals.

    Args:
        differences: One value per seed and prompt, (n, P), with n and P at least 2.
    """
    seeds, prompts = differences.shape
    mean = differences.mean()
    of_seeds, of_prompts = differences.mean(1) - mean, differences.mean(0) - mean
    rest = differences - mean - of_seeds[:, None] - of_prompts
    degrees = (seeds - 1, prompts - 1, (seeds - 1) * (prompts - 1))
    squares = [prompts * (of_seeds**2).sum(), seeds * (of_prompts**2).sum(), (rest**2).sum()]
    return [float(s) / d for s, d in zip(squares, degrees, strict=True)]


def alike(values: np.ndarray) -> bool:
    """Return True if all values are equal up to rounding.

    Equal values say nothing about the scatter of further values: Student's interval would have zero
    width.
    """
    return float(np.ptp(values)) <= 1e-12 * float(np.abs(values).max())


def identical(prompts: int) -> str:
    """Return the text that replaces an interval if no prompt shows a difference.

    Args:
        prompts: The number of prompts without a difference; with 0 the text is empty.
    """
    return f"no difference in any of {plural(prompts, 'prompt')}" if prompts else ""


def wilson(share: float, trials: float) -> Estimate:
    """Return the share of successes among `trials`, with Wilson's score interval (1927)."""
    square = NORMAL**2 / trials
    middle = (share + square / 2) / (1 + square)
    half = NORMAL / (1 + square) * math.sqrt(share * (1 - share) / trials + square / (4 * trials))
    # Rounding must not move the interval beyond 0 or 1.
    return Estimate(share, max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half)))


def share_over_prompts(values: np.ndarray, draws: int) -> Estimate:
    """Return the mean of the prompts' shares, with an interval that allows for other prompts.

    The interval is Wilson's. The interval's number of trials is the effective sample size of survey
    statistics (Kish 1965; Korn and Graubard 1998): share (1 - share) divided by the variance of the
    mean. The mean of that many independent trials would have the same variance as the mean over the
    prompts. The number of trials is at least the number of prompts, and at most `draws` times that
    number. So there is an interval even if every share is 0 or every share is 1. In these cases, a
    bootstrap gives no interval.

    Args:
        values: One share per prompt, (P,), in [0, 1].
        draws: The number of independent draws per prompt.
    """
    share, prompts = math.fsum(values) / len(values), len(values)
    variance = float(values.var(ddof=1)) / prompts if prompts > 1 else 0.0
    trials: float = prompts
    if 0 < share < 1:
        trials = share * (1 - share) / variance if variance else math.inf
    return wilson(share, min(max(trials, prompts), prompts * draws))


def seeds_needed(effect: float, spread: Spread) -> int | None:
    """Return the number of seeds needed to show an effect of this size with probability `POWER`.

    Return None if the number is above `MOST_SEEDS`, or if there is no effect.
    """
    for seeds in range(2, MOST_SEEDS + 1):
        quantiles = student(0.5 + LEVEL / 2, seeds - 1) + NORMAL_POWER
        if abs(effect) >= quantiles * spread.error(seeds):
            return seeds if effect else None
    return None


@cache
def student(probability: float, freedom: float) -> float:
    """Return the quantile of Student's t, by bisection.

    Args:
        probability: At least 0.5 and at most 1 - 1e-8, the precision of the integral.
        freedom: The degrees of freedom, at least 1.
    """
    low, high = 0.0, 64.0
    while _student_below(high, freedom) < probability:
        low, high = high, 2 * high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if _student_below(middle, freedom) < probability else (low, middle)
        )
    return (low + high) / 2


def student_above(t: float, freedom: float) -> float:
    """Return P(T > t) for Student's t."""
    below = _student_below(abs(t), freedom)
    return 1.0 - below if t >= 0 else below


def _student_below(t: float, freedom: float) -> float:
    """Return P(T < t) for t >= 0.

    With t = sqrt(freedom) tan(angle), the density is proportional to cos(angle)^(freedom - 1).
    Simpson's rule integrates the density.
    """
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
