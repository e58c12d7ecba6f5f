"""Intervals, checked by hand, and their coverage on simulated experiments."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from reports.intervals import (
    Spread,
    over_prompts,
    over_rounds,
    over_seeds,
    seeds_needed,
    share_over_prompts,
    student,
    wilson,
)

# Measured on a shared machine: rounds scatter by 8 %, runs of one program by 4 %.
ROUNDS_CV, RUNS_SD = 0.08, 0.04


def run(rng: np.random.Generator, rounds: int = 64, slower: float = 1.0, sd: float = RUNS_SD):
    """Return (seconds, responses) of each round in a run of 4,096 responses."""
    drift = math.exp(rng.normal(0, sd))
    seconds = 64 / rounds * slower * drift * np.exp(rng.normal(0, ROUNDS_CV, rounds))
    return seconds, np.full(rounds, 4096 / rounds)


def log_ratios(rng: np.random.Generator, seeds: int, slower: float = 1.0) -> list[float]:
    pairs = [(run(rng, slower=slower)[0].sum(), run(rng)[0].sum()) for _ in range(seeds)]
    return [math.log(base / own) for own, base in pairs]


def share(repeats: int, holds: Callable[[np.random.Generator], bool]) -> float:
    rng = np.random.default_rng(16)
    return sum(holds(rng) for _ in range(repeats)) / repeats


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.7062), (2, 4.3027), (4, 2.7764), (9, 2.2622), (30, 2.0423), (1e6, 1.9600)],
)
def test_quantiles_of_student_are_those_of_the_tables(freedom, quantile):
    assert student(0.975, freedom) == pytest.approx(quantile, abs=1e-4)


def test_the_interval_over_three_seeds_by_hand():
    # Mean 2, variance 1, standard error 0.57735, times 4.3027.
    estimate, spread = over_seeds([1.0, 2.0, 3.0])

    assert (estimate.value, spread) == (2.0, Spread(1.0))
    assert estimate.low == pytest.approx(-0.4842, abs=1e-3)
    assert estimate.high == pytest.approx(4.4842, abs=1e-3)
    assert not estimate.apart_from(0.0)
    assert estimate.apart_from(-0.5)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_two_equal_arms_are_not_told_apart_in_19_of_20_experiments(seeds):
    def holds(rng: np.random.Generator) -> bool:
        return not over_seeds(log_ratios(rng, seeds))[0].apart_from(0.0)

    assert share(600, holds) == pytest.approx(0.95, abs=0.025)


def test_an_arm_slowed_by_15_percent_is_told_apart_with_five_seeds():
    def told(rng: np.random.Generator) -> bool:
        estimate = over_seeds(log_ratios(rng, 5, slower=1.15))[0]
        return estimate.high < 0.0

    assert share(300, told) > 0.93


@pytest.mark.slow
def test_a_percentile_bootstrap_would_tell_equal_arms_apart_too_often():
    """Show why the interval over seeds is a Student interval."""

    def holds(rng: np.random.Generator) -> bool:
        values = np.array(log_ratios(rng, 5))
        means = values[rng.integers(5, size=(500, 5))].mean(1)
        low, high = np.quantile(means, [0.025, 0.975])
        return bool(low <= 0 <= high)

    assert share(300, holds) < 0.90


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [8, 64])
def test_the_interval_within_two_runs_holds_for_few_and_large_rounds_too(rounds):
    def holds(rng: np.random.Generator) -> bool:
        estimate = over_rounds(run(rng, rounds, sd=0.0), run(rng, 64, sd=0.0))
        assert estimate is not None
        return not estimate.apart_from(0.0)

    assert share(80, holds) > 0.88


def test_rounds_are_weighted_by_their_responses_and_repeats_are_equal():
    arm = ([1.0, 3.0, 1.0, 3.0], [64.0, 192.0, 64.0, 192.0])  # 64 responses/s in every round
    base = ([2.0] * 8, [64.0] * 8)  # 32 responses per second
    estimate = over_rounds(arm, base)

    assert estimate == over_rounds(arm, base)
    assert estimate is not None
    assert estimate.value == estimate.low == estimate.high == pytest.approx(math.log(2))


def test_fewer_than_four_rounds_have_no_interval():
    assert over_rounds(([1.0] * 3, [64.0] * 3), ([1.0] * 8, [64.0] * 8)) is None
    skipped = ([1.0] * 8, [64.0] * 3 + [0.0] * 5)
    assert over_rounds(skipped, ([1.0] * 8, [64.0] * 8)) is None
    assert over_rounds(([1.0] * 8, [64.0] * 8), skipped) is None


def test_the_interval_within_two_runs_by_hand():
    # The arm's ten rounds of 64 responses form five batches of 1.8, 1.9, 2, 2.1 and 2.2 s. The
    # baseline has ten rounds of 0.5 s.
    # The batches' shares of the 10 s minus their shares of the responses are -0.02, -0.01, 0, 0.01
    # and 0.02. The variance is the sum of the squares, 0.001, times 5/4. All of it comes from the
    # arm, so there are 4 degrees of freedom, and t is 2.7764.
    arm = ([0.9, 0.9, 0.95, 0.95, 1.0, 1.0, 1.05, 1.05, 1.1, 1.1], [64.0] * 10)
    estimate = over_rounds(arm, ([0.5] * 10, [64.0] * 10))

    assert estimate is not None
    half = 2.7764 * math.sqrt(0.00125)
    assert estimate.value == pytest.approx(math.log(0.5))
    assert estimate.low == pytest.approx(math.log(0.5) - half, abs=1e-5)
    assert estimate.high == pytest.approx(math.log(0.5) + half, abs=1e-5)


def test_rounds_without_responses_count_with_their_seconds():
    arm = ([1.0] * 16, [64.0] * 4 + [0.0] * 12)
    estimate = over_rounds(arm, ([1.0] * 16, [64.0] * 16))

    assert estimate is not None
    assert estimate.value == pytest.approx(math.log(1 / 4))
    assert math.isfinite(estimate.low)
    assert estimate.low < estimate.value < estimate.high < math.inf


def following(rng: np.random.Generator, autocorrelation: float, sd: float = 0.1):
    """Return (seconds, responses) of 96 rounds that follow an AR(1) process."""
    new = rng.normal(0, sd * math.sqrt(1 - autocorrelation**2), 96)
    deviations = [rng.normal(0, sd)]
    for own in new[1:]:
        deviations.append(autocorrelation * deviations[-1] + own)
    return [math.exp(own) for own in deviations], [64.0] * 96


@pytest.mark.slow
@pytest.mark.parametrize("autocorrelation", [0.0, 0.3, 0.6, 0.8])
def test_equal_arms_whose_rounds_follow_each_other_are_seldom_told_apart(autocorrelation):
    def told(rng: np.random.Generator) -> bool:
        estimate = over_rounds(following(rng, autocorrelation), following(rng, autocorrelation))
        assert estimate is not None
        return estimate.apart_from(0.0)

    assert share(2000, told) <= 0.08


@pytest.mark.slow
@pytest.mark.parametrize(("sd", "found"), [(0.1, 0.85), (0.05, 0.95)])
def test_an_arm_slowed_by_15_percent_is_told_apart_in_one_run(sd, found):
    def told(rng: np.random.Generator) -> bool:
        seconds, responses = following(rng, 0.8, sd)
        slowed = [1.15 * own for own in seconds]
        estimate = over_rounds((slowed, responses), following(rng, 0.8, sd))
        assert estimate is not None
        return estimate.high < 0.0

    assert share(2000, told) >= found


# ---- Prompts ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seeds", "prompts", "of_seeds", "of_prompts"),
    [(5, 128, 0.02, 0.0), (3, 128, 0.02, 0.1), (2, 64, 0.03, 0.1), (1, 128, 0.0, 0.2)],
)
def test_the_interval_of_a_reward_difference_holds_for_other_seeds_and_prompts(
    seeds, prompts, of_seeds, of_prompts
):
    def holds(rng: np.random.Generator) -> bool:
        differences = (
            rng.normal(0, of_seeds, (seeds, 1))
            + rng.normal(0, of_prompts, prompts)
            + rng.normal(0, 0.4, (seeds, prompts))
        )
        return not over_prompts(differences)[0].apart_from(0.0)

    assert share(300, holds) > 0.925


def test_a_difference_of_rewards_that_all_seeds_and_prompts_share_is_told_apart():
    rng = np.random.default_rng(0)
    differences = 0.1 + rng.normal(0, 0.02, (3, 1)) + rng.normal(0, 0.3, (3, 128))
    estimate, spread = over_prompts(differences)

    assert estimate.low > 0.0
    assert spread is not None
    # The means of the seeds have a standard deviation of 0.02 from the seeds, and another one of
    # 0.3 / sqrt(128) = 0.027 from the noise of the prompts.
    assert 0.01 < math.sqrt(spread.between) < 0.08


def test_seeds_that_agree_by_chance_promise_no_more_precision_than_their_prompts_allow():
    # The seeds' means are 0.21 and 0.19, so MS_seeds = 4 x 2 x 0.0001 = 0.0008. The prompts'
    # means are all 0.2. The residuals are +-0.1, so MS_rest = 8 x 0.01 / 3 = 0.08 / 3.
    differences = np.array([[0.31, 0.11, 0.31, 0.11], [0.09, 0.29, 0.09, 0.29]])
    estimate, spread = over_prompts(differences)

    assert spread is not None
    assert spread.between == pytest.approx(0.08 / 3 / 4)
    assert spread.floor == 0.0
    # The interval and the number of seeds needed rest on the same variance, 0.00333 with two seeds.
    # Satterthwaite's degrees of freedom: 0.02667^2 / (0.0008^2 / 1 + 0.02667^2 / 3) = 2.992.
    half = student(0.975, 2.992) * math.sqrt(0.08 / 3 / 8)
    assert estimate.high - estimate.value == pytest.approx(half, rel=1e-3)
    # With the scatter of the two means alone, three seeds would seem to be enough.
    assert seeds_needed(0.1, Spread(0.0008 / 4)) == 3
    assert seeds_needed(0.1, spread) == 8


def test_arms_with_the_same_answers_differ_by_nothing():
    estimate, _ = over_prompts(np.zeros((3, 16)))

    assert (estimate.low, estimate.value, estimate.high) == (0.0, 0.0, 0.0)
    assert not estimate.apart_from(0.0)


# ---- Power -----------------------------------------------------------------------------------


def test_seeds_needed_are_those_of_the_tables_for_a_paired_test():
    # For an effect of one standard deviation, 10 pairs have 80 % power (Cohen). For an effect of
    # half a standard deviation, 34 pairs do.
    assert seeds_needed(1.0, Spread(1.0)) == 10
    assert seeds_needed(-0.5, Spread(1.0)) == pytest.approx(34, abs=1)


def test_no_number_of_seeds_tells_what_is_not_there_or_too_small():
    assert seeds_needed(0.0, Spread(1.0)) is None
    assert seeds_needed(0.1, Spread(1.0)) is None  # about 800 seeds
    # more prompts would help, but more seeds cannot
    assert seeds_needed(0.1, Spread(0.0, floor=0.01)) is None


# ---- Figures over prompts --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rate", "trials", "low", "high"),
    [
        (0.5, 10, 0.2366, 0.7634),  # from tables of the score interval
        (0.1, 20, 0.0279, 0.3010),
        (0.0, 10, 0.0, 0.2775),  # high = z² / (n + z²)
        (1.0, 10, 0.7225, 1.0),
    ],
)
def test_wilson_by_hand(rate, trials, low, high):
    estimate = wilson(rate, trials)
    assert estimate.value == rate
    assert (estimate.low, estimate.high) == pytest.approx((low, high), abs=5e-5)


def test_one_response_a_prompt_is_wilson_over_the_prompts():
    assert share_over_prompts(np.array([1.0, 0.0, 1.0, 1.0, 0.0]), draws=1) == wilson(0.6, 5)


def test_equal_prompts_count_each_response():
    # Half of the responses to every prompt are correct. So the prompts do not differ, and each
    # response counts as a trial.
    assert share_over_prompts(np.full(10, 0.5), draws=8) == wilson(0.5, 80)


def test_prompts_that_are_all_right_or_wrong_count_once():
    by_prompt = np.array([1.0] * 12 + [0.0] * 8)
    assert share_over_prompts(by_prompt, draws=8) == wilson(0.6, 20)


def test_prompts_in_between_count_as_they_scatter():
    # The variance of the mean is 1/12 / 4 = 1/48, and the variance of one trial is 1/4. So the
    # effective number of trials is twelve.
    values = np.array([0.25, 0.75, 0.25, 0.75])
    assert share_over_prompts(values, draws=8).low == pytest.approx(wilson(0.5, 12).low)


def test_a_certain_share_still_has_an_interval():
    estimate = share_over_prompts(np.ones(50), draws=4)
    assert estimate == wilson(1.0, 50)
    assert estimate.low == pytest.approx(0.9287, abs=1e-4)


@pytest.mark.parametrize("rate", [0.05, 0.5, 0.9])
def test_the_interval_of_shares_holds_for_prompts_of_different_difficulty(rate):
    # Each prompt draws its rate from a beta distribution, and has four responses.
    def holds(rng: np.random.Generator) -> bool:
        rates = rng.beta(2 * rate, 2 * (1 - rate), size=40)
        estimate = share_over_prompts(rng.binomial(4, rates) / 4, draws=4)
        return estimate.low <= rate <= estimate.high

    assert 0.92 <= share(600, holds) <= 0.985
