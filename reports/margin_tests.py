"""Tests of paired differences against a margin: bounds, verdicts, power, and seeds still needed.

An arm and the baseline share seeds, so each seed gives one difference in reward. All bounds are
one-sided Student bounds, with Holm's correction (1979) over the arms. There are two designs:

- A fixed design tests once, when all planned seeds are complete.
- An anytime design tests after every seed from `FIRST_LOOK` to the maximum. It is a
  group-sequential t-test with a constant nominal level, as Pocock (1977) proposed for known
  variance. The nominal levels are simulated: see `NOMINAL`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from grpo_trainable.text import plural
from reports.intervals import MOST_SEEDS, POWER, alike, student, student_above

ALPHA = 0.05  # probability of a false claim about any arm, in each direction
FIRST_LOOK = 3  # number of seeds at the first anytime test; with two seeds, bounds are too wide

NO_WORSE, WORSE, BETTER, UNDECIDED = "no worse", "worse", "better", "undecided"


class LooksEarly(ValueError):
    """A fixed design has fewer complete seeds than planned. The message is one line."""


@dataclass(frozen=True, kw_only=True)
class Design:
    """Times at which differences are tested: once, or after every seed up to a maximum."""

    seeds: int  # planned number of seeds; with `anytime`, the maximum
    anytime: bool = False
    # Number of arms besides the baseline. An arm without results counts too. Otherwise, the levels
    # would change from one test to the next.
    arms: int = 1

    @property
    def may_grow(self) -> bool:
        """Return True if more seeds may be added.

        A fixed design allows only one test, so seeds cannot be added after it. One seed allows no
        test, so seeds may still be added.
        """
        return self.anytime or self.seeds < 2

    def nominal(self, alpha: float, seeds: int) -> float:
        """Return the one-sided level of a single test after `seeds` seeds; 0 if there is no test.

        Args:
            alpha: The probability of a false claim over all tests of the design.
            seeds: The number of complete seeds.
        """
        if not self.anytime:
            return alpha if seeds >= 2 else 0.0
        return nominal_level(alpha, self.seeds) if seeds >= FIRST_LOOK else 0.0


@dataclass(frozen=True)
class Pairs:
    """Differences in reward between an arm and the baseline, one per shared seed."""

    differences: np.ndarray  # (n,), arm minus baseline
    margins: np.ndarray  # (n,), all equal unless the margin is relative to the baseline
    copy: bool = False  # True if the arm repeats the baseline exactly, as a synchronous arm can
    # Standard deviation that the evaluation alone adds to a difference; 0 if unknown.
    evaluation_sd: float = 0.0

    @property
    def seeds(self) -> int:
        """Number of seeds."""
        return len(self.differences)

    @property
    def margin(self) -> float:
        """Mean margin in units of the reward."""
        return float(self.margins.mean())


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """Verdict about an arm, with the figures behind it."""

    verdict: str
    difference: float  # mean difference in reward, arm minus baseline
    margin: float
    # One-sided bounds of the difference, after Holm's correction. None if there is no test.
    low: float | None
    high: float | None
    seeds: int
    # Probability that this comparison finds “no worse” for an arm that equals the baseline.
    power: float | None
    # Number of seeds at which a decision is likely, or was made. None if there is only one seed,
    # or if the number is above the maximum of the design or above `MOST_SEEDS`.
    seeds_needed: int | None
    seeds_missing: int | None  # seeds still to run until a decision is likely; 0 after a decision
    copy: bool = False  # True if the arm repeats the baseline exactly


def judge(arms: Mapping[str, Pairs], design: Design) -> dict[str, Judgement]:
    """Return the verdict about each arm.

    An arm is *no worse* if the lower bound of its difference is above -margin, *better* if the
    lower bound is above 0, and *worse* if the upper bound is below -margin. The claims of one kind
    about all arms form a family of tests. The probability of a false claim in a family is at most
    `ALPHA`. With at least two seeds, a copy of the baseline is no worse.

    Args:
        arms: The differences of each arm, at least one difference per arm.
        design: The design of the experiment.

    Raises:
        LooksEarly: The design is fixed, and an arm has fewer seeds than planned.
    """
    if not design.anytime:
        _refuse_to_look_early(arms, design.seeds)
    shifted = {arm: _Sample(own.differences + own.margins) for arm, own in arms.items()}
    plain = {arm: _Sample(own.differences) for arm, own in arms.items()}
    copies = {arm for arm, own in arms.items() if own.copy}
    above = {arm: 0.0 if arm in copies else own.above_0() for arm, own in shifted.items()}
    no_worse = _holm(above, arms, design)
    better = _holm({arm: own.above_0() for arm, own in plain.items()}, arms, design)
    worse = _holm({arm: own.below_0() for arm, own in shifted.items()}, arms, design)
    found = {}
    for arm, own in arms.items():
        claims = {BETTER: better[arm], NO_WORSE: no_worse[arm], WORSE: worse[arm]}
        verdict = next((name for name, test in claims.items() if test.rejected), UNDECIDED)
        low = _lower_bound(own, claims, shifted[arm], plain[arm])
        high = shifted[arm].upper(worse[arm].nominal)
        high = None if high is None else high - own.margin
        if arm in copies and no_worse[arm].nominal:
            low = high = 0.0
        needed, missing = own.seeds, 0
        if verdict == UNDECIDED:
            likely = no_worse if shifted[arm].mean > 0 else worse
            if own.seeds == 1:  # one seed does not show how much seeds differ
                needed = None
            elif arm in copies:  # decided at the first test
                needed = FIRST_LOOK
            else:
                needed = _seeds_needed(own, shifted[arm], likely[arm].alpha, design)
            missing = _missing(needed, own.seeds, design)
        found[arm] = Judgement(
            verdict=verdict,
            difference=float(own.differences.mean()),
            margin=own.margin,
            low=low,
            high=high,
            seeds=own.seeds,
            power=_power_reached(own, shifted[arm], no_worse[arm].nominal),
            seeds_needed=needed,
            seeds_missing=missing,
            copy=own.copy,
        )
    return found


def _refuse_to_look_early(arms: Mapping[str, Pairs], planned: int) -> None:
    short = {arm: own.seeds for arm, own in arms.items() if own.seeds < planned}
    if short:
        arm, seeds = min(short.items(), key=lambda item: item[1])
        raise LooksEarly(
            f"{arm} has {seeds} of {plural(planned, 'planned seed')} in common with the baseline, "
            "and a verdict with a fixed number of seeds is valid only when all are complete; "
            "complete them, or use launch/verdict.py --max-seeds N, whose test is valid at any time"
        )


def _missing(needed: int | None, seeds: int, design: Design) -> int | None:
    """Return how many seeds have to be run until a decision is likely.

    A fixed design allows a single test. After this test, only a new experiment can decide, and it
    has to run all `needed` seeds.
    """
    if needed is None:
        return None
    return needed - seeds if design.may_grow else needed


# ---- Bounds ----------------------------------------------------------------------------------


class _Sample:
    """Sample mean with Student's one-sided bounds."""

    def __init__(self, values: np.ndarray) -> None:
        self.seeds = len(values)
        self.mean = float(values.mean())
        # Equal values say nothing about the scatter of further values.
        self.sd = 0.0 if len(values) < 2 or alike(values) else float(values.std(ddof=1))
        self.error = self.sd / math.sqrt(self.seeds)

    def above_0(self) -> float:
        """Return the p-value for the claim that the true mean is above 0."""
        return student_above(self.mean / self.error, self.seeds - 1) if self.error else 1.0

    def below_0(self) -> float:
        """Return the p-value for the claim that the true mean is below 0."""
        return student_above(-self.mean / self.error, self.seeds - 1) if self.error else 1.0

    def lower(self, level: float) -> float | None:
        """Return the lower bound at a one-sided level, or None if there is no test."""
        half = self._half(level)
        return None if half is None else self.mean - half

    def upper(self, level: float) -> float | None:
        """Return the upper bound at a one-sided level, or None if there is no test."""
        half = self._half(level)
        return None if half is None else self.mean + half

    def _half(self, level: float) -> float | None:
        if not (level and self.error):
            return None
        return student(1.0 - level, self.seeds - 1) * self.error


def _lower_bound(
    own: Pairs, claims: Mapping[str, _Test], shifted: _Sample, plain: _Sample
) -> float | None:
    """Return a lower bound of the difference that does not contradict the verdict.

    The claims that arms are *better* form a family of tests with its own levels. So if an arm is
    not found *better*, its lower bound is at most 0.
    """
    if claims[BETTER].rejected:
        return plain.lower(claims[BETTER].nominal)
    bound = shifted.lower(claims[NO_WORSE].nominal)
    return None if bound is None else min(bound - own.margin, 0.0)


@dataclass(frozen=True)
class _Test:
    """Result of one test in a family."""

    rejected: bool  # True if the null hypothesis is rejected, so that the claim is made
    alpha: float  # level of the arm in Holm's procedure
    # Level of a single test; the p-value must be below this level. 0 if there are too few seeds.
    nominal: float


def _holm(
    p_values: Mapping[str, float], arms: Mapping[str, Pairs], design: Design
) -> dict[str, _Test]:
    """Apply Holm's step-down procedure to the claims about the arms.

    In an anytime design, all arms have the same maximum, so the order of their p-values at one test
    is the order of their sequential p-values. An arm with too few seeds for a test comes last.
    """
    found: dict[str, _Test] = {}
    remaining = max(design.arms, len(arms))
    untested = {arm: not design.nominal(ALPHA, own.seeds) for arm, own in arms.items()}
    for arm in sorted(p_values, key=lambda arm: (untested[arm], p_values[arm])):
        alpha = ALPHA / remaining
        nominal = design.nominal(alpha, arms[arm].seeds)
        rejected = p_values[arm] < nominal
        # After the first claim that fails, no other claim is made, and the level does not change.
        rejected = rejected and all(test.rejected for test in found.values())
        found[arm] = _Test(rejected, alpha, nominal)
        remaining -= rejected
    return found


# ---- Power -----------------------------------------------------------------------------------


def power(seeds: int, distance: float, level: float) -> float:
    """Return the probability that a one-sided Student test rejects its null hypothesis.

    This is P(T > c). Here c is the quantile of Student's t at 1 - level, and T has the noncentral
    t distribution with noncentrality distance * sqrt(seeds).

    Args:
        seeds: The number of differences, at least 2.
        distance: The distance from the tested value to the true mean, in standard deviations.
        level: The one-sided level of the test.
    """
    freedom = seeds - 1
    critical = student(1.0 - level, freedom)
    # T > c if Z > c u - noncentrality. Here Z is standard normal, and u is the sample's standard
    # deviation divided by the true one.
    u = np.linspace(0.0, 1.0 + 6.0 / math.sqrt(freedom), 401)[1:]
    density = np.exp((freedom - 1) * np.log(u) - freedom * (u**2 - 1) / 2)
    shift = (critical * u - distance * math.sqrt(seeds)) / math.sqrt(2.0)
    above = np.array([math.erfc(value) / 2 for value in shift])
    return float((density * above).sum() / density.sum())


def _power_reached(own: Pairs, shifted: _Sample, nominal: float) -> float | None:
    scatter = _scatter(own, shifted)
    return power(own.seeds, own.margin / scatter, nominal) if nominal and scatter else None


def _seeds_needed(own: Pairs, shifted: _Sample, alpha: float, design: Design) -> int | None:
    """Return the number of seeds at which a test decides with probability `POWER`.

    The observed difference and its scatter are taken to be the true ones. If all differences are
    equal and the noise of the evaluation is unknown, the standard deviation is taken to be as large
    as the distance from the tested value.
    """
    scatter = _scatter(own, shifted)
    distance = abs(shifted.mean) / scatter if scatter else 1.0
    return seeds_for_power(distance, alpha, design, at_least=max(own.seeds + 1, 2))


def _scatter(own: Pairs, shifted: _Sample) -> float:
    """Return the standard deviation expected of further differences; 0 if nothing is known.

    A few seeds can agree by chance. So the standard deviation is at least that of the evaluation.
    """
    return max(shifted.sd, own.evaluation_sd)


def seeds_for_power(
    distance: float, alpha: float, design: Design, *, at_least: int = 2
) -> int | None:
    """Return the smallest number of seeds at which one test has the power `POWER`.

    Args:
        distance: The distance from the tested value to the true mean, in standard deviations.
        alpha: The level over all tests of the design.
        design: The design. The number of seeds of a fixed design is not a limit here.
        at_least: The first number of seeds to consider.

    Returns:
        The number; None if it is above `MOST_SEEDS` or the maximum of an anytime design.
    """
    most = min(design.seeds, MOST_SEEDS) if design.anytime else MOST_SEEDS

    def suffice(seeds: int) -> bool:
        nominal = design.nominal(alpha, seeds)
        return nominal > 0 and power(seeds, distance, nominal) >= POWER

    numbers = range(at_least, most + 1)
    found = bisect_left(numbers, True, key=suffice)  # power rises with the number of seeds
    return numbers[found] if found < len(numbers) else None


# ---- Levels of an anytime design -------------------------------------------------------------


def nominal_level(alpha: float, most: int) -> float:
    """Return the level of each single test of an anytime design.

    A value between two entries of `NOMINAL` is rounded to the stricter entry. If `alpha` is below
    all entries, Bonferroni's correction over the tests applies.

    Args:
        alpha: The probability of a false claim over all tests.
        most: The maximum number of seeds, from `FIRST_LOOK` to `MOST_SEEDS`.
    """
    column = next(seeds for seeds in MAXIMA if seeds >= most)
    for divisor, levels in NOMINAL.items():
        if ALPHA / divisor <= alpha * (1 + 1e-9):
            return levels[MAXIMA.index(column)]
    return alpha / (most - FIRST_LOOK + 1)


MAXIMA: Sequence[int] = (4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 40, 50)
# Number of arms in Holm's procedure -> nominal level for each maximum in `MAXIMA`, for a test at
# the level `ALPHA` / number of arms. Simulated with 4,000,000 experiments and rounded down:
# python benchmarks/verdicts.py --part levels
NOMINAL: Mapping[int, Sequence[float]] = {
    1: (
        0.032,
        0.0246,
        0.0204,
        0.0159,
        0.0134,
        0.0119,
        0.0103,
        0.00878,
        0.00784,
        0.00719,
        0.00634,
        0.00579,
    ),
    2: (
        0.0151,
        0.0113,
        0.00935,
        0.00716,
        0.00599,
        0.00526,
        0.00455,
        0.00385,
        0.00342,
        0.00313,
        0.00275,
        0.00251,
    ),
    3: (
        0.00984,
        0.0073,
        0.00596,
        0.00453,
        0.00378,
        0.0033,
        0.00285,
        0.00241,
        0.00214,
        0.00196,
        0.00171,
        0.00156,
    ),
    4: (
        0.00726,
        0.00536,
        0.00434,
        0.00327,
        0.00273,
        0.0024,
        0.00206,
        0.00174,
        0.00155,
        0.00141,
        0.00123,
        0.00112,
    ),
    6: (
        0.00476,
        0.00344,
        0.00279,
        0.0021,
        0.00175,
        0.00152,
        0.0013,
        0.00109,
        0.000971,
        0.000886,
        0.000773,
        0.000703,
    ),
    8: (
        0.00351,
        0.00254,
        0.00205,
        0.00154,
        0.00127,
        0.0011,
        0.000943,
        0.000788,
        0.000698,
        0.000635,
        0.000559,
        0.000508,
    ),
    12: (
        0.00232,
        0.00166,
        0.00132,
        0.00099,
        0.000811,
        0.000703,
        0.0006,
        0.000503,
        0.000442,
        0.000403,
        0.000353,
        0.00032,
    ),
    16: (
        0.00173,
        0.00122,
        0.000976,
        0.000721,
        0.000593,
        0.000515,
        0.000437,
        0.000365,
        0.00032,
        0.000293,
        0.000255,
        0.000232,
    ),
    24: (
        0.00113,
        0.000797,
        0.000625,
        0.000468,
        0.000384,
        0.00033,
        0.000282,
        0.000233,
        0.000207,
        0.000188,
        0.000164,
        0.000149,
    ),
    32: (
        0.00084,
        0.000593,
        0.000465,
        0.000343,
        0.000282,
        0.000244,
        0.000207,
        0.000171,
        0.00015,
        0.000135,
        0.000118,
        0.000107,
    ),
    48: (
        0.000556,
        0.000387,
        0.000305,
        0.000223,
        0.000184,
        0.00016,
        0.000131,
        0.000108,
        9.56e-05,
        8.65e-05,
        7.48e-05,
        6.79e-05,
    ),
}
