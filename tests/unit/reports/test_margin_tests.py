"""Verdicts with a margin, checked by hand and by simulation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from reports.intervals import student, student_above
from reports.margin_tests import (
    ALPHA,
    BETTER,
    FIRST_LOOK,
    MAXIMA,
    NO_WORSE,
    NOMINAL,
    UNDECIDED,
    WORSE,
    Design,
    Judgement,
    LooksEarly,
    Pairs,
    judge,
    nominal_level,
    power,
    seeds_for_power,
)

# Five paired differences between async age caps, in points: marin-community/marin issue 8955.
MARIN = (-2.34, 12.50, -17.58, 10.16, -1.17)


def pairs(differences: Sequence[float], margin: float) -> Pairs:
    return Pairs(np.array(differences), np.full(len(differences), margin))


def judge_one(differences: Sequence[float], margin: float, **design: int) -> Judgement:
    most = design.get("most")
    plan = Design(seeds=most, anytime=True) if most else Design(seeds=len(differences))
    return judge({"arm": pairs(differences, margin)}, plan)["arm"]


def test_the_five_differences_of_marin_are_no_worse_with_a_fixed_number_of_seeds():
    # Mean 0.314, standard error 5.352, quantile 2.1318 of Student's t with 4 degrees of freedom.
    found = judge_one(MARIN, 15.0)

    assert found.verdict == NO_WORSE
    assert found.difference == pytest.approx(0.314, abs=1e-9)
    assert found.low == pytest.approx(-11.1, abs=0.05)
    assert found.high == pytest.approx(11.7, abs=0.05)
    assert (found.seeds, found.seeds_missing) == (5, 0)


@pytest.mark.parametrize("most", [10, 20, 50])
def test_the_five_differences_of_marin_are_undecided_at_any_time(most):
    found = judge_one(MARIN, 15.0, most=most)

    assert found.verdict == UNDECIDED
    assert found.low is not None
    assert found.low < -15.0
    assert found.seeds_needed is not None
    assert found.seeds_missing == found.seeds_needed - 5 > 0


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ((0.01, -0.01, 0.0, 0.01), NO_WORSE),  # lower bound -0.0088
        ((0.03, 0.04, 0.05, 0.04), BETTER),
        ((-0.08, -0.09, -0.10, -0.09), WORSE),
        ((-0.08, 0.02, -0.05, 0.03), UNDECIDED),
        ((0.08, -0.06, 0.01, 0.02), UNDECIDED),  # a positive mean is not enough
    ],
)
def test_verdicts_follow_from_the_bounds(differences, verdict):
    found = judge_one(differences, 0.03)

    assert found.verdict == verdict
    assert found.low is not None
    assert found.high is not None
    assert (found.low > -0.03) == (verdict in (NO_WORSE, BETTER))
    assert (found.low > 0) == (verdict == BETTER)
    assert (found.high < -0.03) == (verdict == WORSE)
    assert (found.seeds_missing == 0) == (verdict != UNDECIDED)


def test_one_seed_is_undecided_and_no_number_of_seeds_is_forecast():
    found = judge_one([0.5], 0.03)

    assert (found.verdict, found.low, found.high, found.power) == (UNDECIDED, None, None, None)
    assert (found.seeds_needed, found.seeds_missing) == (None, None)


def test_a_fixed_design_refuses_to_look_early():
    with pytest.raises(LooksEarly, match=r"arm has 3 of 5 planned seeds .* --max-seeds"):
        judge({"arm": pairs([0.0, 0.1, 0.2], 0.03)}, Design(seeds=5))


def test_equal_differences_have_no_bounds():
    found = judge_one([0.01, 0.01, 0.01], 0.03)

    assert (found.verdict, found.low, found.high) == (UNDECIDED, None, None)


def test_a_copy_of_the_baseline_is_no_worse_from_two_seeds_on():
    def verdict_of_copy(seeds: int, design: Design) -> Judgement:
        copy = Pairs(np.zeros(seeds), np.full(seeds, 0.03), copy=True)
        return judge({"arm": copy}, design)["arm"]

    found = verdict_of_copy(2, Design(seeds=2))
    assert (found.verdict, found.low, found.high) == (NO_WORSE, 0.0, 0.0)
    assert verdict_of_copy(1, Design(seeds=1)).verdict == UNDECIDED
    early = verdict_of_copy(2, Design(seeds=20, anytime=True))
    assert early.verdict == UNDECIDED
    assert (early.seeds_needed, early.seeds_missing) == (FIRST_LOOK, 1)
    found = verdict_of_copy(FIRST_LOOK, Design(seeds=20, anytime=True))
    assert (found.verdict, found.seeds_missing) == (NO_WORSE, 0)


def test_arms_that_merely_end_with_equal_rewards_are_undecided():
    found = judge_one([0.0, 0.0], 0.03)

    assert (found.verdict, found.low, found.high) == (UNDECIDED, None, None)


def test_an_undecided_fixed_design_needs_a_new_experiment():
    found = judge_one([-0.08, 0.02, -0.05, 0.03], 0.10)

    assert found.verdict == NO_WORSE
    found = judge_one([-0.08, 0.02, -0.05, 0.03], 0.06)
    assert found.verdict == UNDECIDED
    assert found.seeds_missing == found.seeds_needed


def test_a_relative_margin_varies_with_the_baseline():
    # The arm has 95 % of the reward of the baseline in every seed, up to 0.001.
    base = np.array([0.5, 0.8, 0.3, 0.9])
    differences = -0.05 * base + np.array([0.001, -0.001, 0.001, -0.001])
    of_arm = Pairs(differences, 0.08 * base)
    found = judge({"arm": of_arm}, Design(seeds=4))["arm"]
    fixed = judge_one(differences.tolist(), float((0.08 * base).mean()))

    assert found.margin == pytest.approx(fixed.margin) == pytest.approx(0.05)
    assert found.low is not None
    assert fixed.low is not None
    assert found.verdict == NO_WORSE
    # The difference varies with the margin, so the bound is closer than with a fixed margin.
    assert found.low > fixed.low


# ---- Several arms ----------------------------------------------------------------------------


def test_holm_tests_the_clearest_arm_at_half_the_level_and_the_other_at_the_whole():
    clear, close = [0.01, -0.01, 0.0, 0.01], [0.01, -0.015, 0.005, -0.01]
    both = judge({"a": pairs(clear, 0.03), "b": pairs(close, 0.03)}, Design(seeds=4))
    error = np.std(clear, ddof=1) / 2
    alone = judge_one(close, 0.03)

    assert both["a"].low == pytest.approx(np.mean(clear) - student(0.975, 3) * error)
    assert both["a"].verdict == both["b"].verdict == NO_WORSE
    assert both["b"].low == alone.low


def test_after_an_undecided_arm_no_other_claim_is_made_and_the_level_stays():
    wide = [0.05, -0.06, 0.04, -0.05]
    arms = {name: pairs([value + shift for value in wide], 0.03) for name, shift in SHIFTS.items()}
    found = judge(arms, Design(seeds=4))

    assert {own.verdict for own in found.values()} == {UNDECIDED}
    error = np.std(wide, ddof=1) / 2
    for name, own in found.items():
        assert own.low is not None
        mean = arms[name].differences.mean()
        assert own.low == pytest.approx(min(0.0, mean - student(1 - ALPHA / 3, 3) * error))


SHIFTS = {"a": 0.0, "b": 0.005, "c": -0.005}


def test_an_arm_without_results_counts_for_holm():
    of_arm = {"arm": pairs([0.01, -0.01, 0.0, 0.01], 0.03)}
    alone = judge(of_arm, Design(seeds=20, anytime=True))["arm"]
    one_of_two = judge(of_arm, Design(seeds=20, anytime=True, arms=2))["arm"]

    assert one_of_two.low is not None
    assert alone.low is not None
    assert one_of_two.low < alone.low


def test_an_arm_with_too_few_seeds_for_a_test_holds_up_no_other_arm():
    # The p-value of the second arm is far lower, but two seeds allow no test.
    tested, few = [0.01, -0.01, 0.0, 0.01, 0.0, -0.01], [0.05, 0.0500001]
    design = Design(seeds=20, anytime=True, arms=2)
    both = judge({"a": pairs(tested, 0.05), "b": pairs(few, 0.05)}, design)

    assert (both["a"].verdict, both["b"].verdict) == (NO_WORSE, UNDECIDED)
    copy = Pairs(np.zeros(2), np.full(2, 0.05), copy=True)
    both = judge({"a": pairs(tested, 0.05), "b": copy}, design)
    assert (both["a"].verdict, both["b"].verdict) == (NO_WORSE, UNDECIDED)


def test_an_arm_that_is_probably_worse_needs_the_seeds_of_its_own_family():
    # Once the first arm has its verdict, the second arm is tested at 5 % for being worse.
    arms = {
        "a": pairs([-0.3, -0.31, -0.29, -0.3], 0.03),
        "b": pairs([-0.08, 0.02, -0.09, -0.06], 0.03),
    }
    both = judge(arms, Design(seeds=4))

    assert (both["a"].verdict, both["b"].verdict) == (WORSE, UNDECIDED)
    alone = judge_one(arms["b"].differences.tolist(), 0.03)
    assert both["b"].seeds_needed == alone.seeds_needed
    assert (both["a"].seeds_needed, both["a"].seeds_missing) == (4, 0)


def test_an_arm_that_is_better_only_without_holm_has_a_lower_bound_of_at_most_0():
    # Tested alone, the second arm is better: its p-value for a difference above 0 is 0.04.
    good = [0.03, 0.0, 0.035, 0.015]
    assert judge_one(good, 0.03).verdict == BETTER
    arms = {"a": pairs([0.001, -0.001, 0.002, -0.001], 0.03), "b": pairs(good, 0.03)}
    found = judge(arms, Design(seeds=4))

    assert found["b"].verdict == NO_WORSE
    assert found["b"].low is not None
    assert -0.03 < found["b"].low <= 0.0


# ---- Power -----------------------------------------------------------------------------------


def test_eight_seeds_show_equality_if_the_scatter_is_as_large_as_the_margin():
    # A noncentral t with 7 degrees of freedom and noncentrality sqrt(8) exceeds 1.895 with a
    # probability of 81.5 %.
    assert power(8, 1.0, ALPHA) == pytest.approx(0.815, abs=0.002)
    assert power(7, 1.0, ALPHA) == pytest.approx(0.756, abs=0.003)
    assert power(5, 0.0, 0.03) == pytest.approx(0.03, abs=1e-4)
    assert seeds_for_power(1.0, ALPHA, Design(seeds=1)) == 8
    assert seeds_for_power(0.0, ALPHA, Design(seeds=1)) is None


def test_seeds_that_agree_by_chance_are_not_expected_to_scatter_less_than_the_evaluation():
    # The differences scatter by 0.0014, but the evaluation alone adds 0.03 to each, the margin.
    differences, margin = np.array([-0.001, 0.001]), np.full(2, 0.03)
    plan = Design(seeds=20, anytime=True)
    seen = judge({"arm": Pairs(differences, margin)}, plan)["arm"]
    known = judge({"arm": Pairs(differences, margin, evaluation_sd=0.03)}, plan)["arm"]
    assert seen.seeds_needed == 3
    assert known.seeds_needed == 14  # as in test_a_maximum_that_is_too_low_has_no_price

    differences, margin = np.array([-0.001, 0.001] * 4), np.full(8, 0.03)
    found = judge({"arm": Pairs(differences, margin, evaluation_sd=0.03)}, Design(seeds=8))["arm"]
    assert found.verdict == NO_WORSE  # a verdict rests on the differences alone
    assert found.power == pytest.approx(0.815, abs=0.002)  # as with eight seeds above
    # Equal differences say nothing about the scatter, but the evaluation does.
    equal = judge({"arm": Pairs(np.zeros(4), margin[:4], evaluation_sd=0.03)}, Design(seeds=4))
    assert (equal["arm"].verdict, equal["arm"].seeds_needed) == (UNDECIDED, 8)


def test_a_maximum_that_is_too_low_has_no_price():
    assert seeds_for_power(1.0, ALPHA, Design(seeds=6, anytime=True)) is None
    assert seeds_for_power(1.0, ALPHA, Design(seeds=20, anytime=True)) == 14


# ---- Levels of an anytime design -------------------------------------------------------------


def test_levels_fall_with_the_number_of_looks_and_of_arms():
    rows = list(NOMINAL.values())
    assert all(len(row) == len(MAXIMA) and list(row) == sorted(row)[::-1] for row in rows)
    columns = list(zip(*rows, strict=True))
    assert all(list(column) == sorted(column)[::-1] for column in columns)
    assert all(
        ALPHA / arms / (most - FIRST_LOOK + 1) < level < ALPHA / arms
        for arms, row in NOMINAL.items()
        for most, level in zip(MAXIMA, row, strict=True)
    )


def test_a_level_between_two_entries_is_the_stricter_one():
    assert nominal_level(ALPHA, 3) == nominal_level(ALPHA, 4)
    assert nominal_level(ALPHA, 7) == nominal_level(ALPHA, 8)
    assert nominal_level(ALPHA / 5, 20) == nominal_level(ALPHA / 6, 20)
    assert nominal_level(ALPHA / 100, 12) == ALPHA / 100 / 10
    assert nominal_level(ALPHA / 100, 12) < nominal_level(ALPHA / 48, 12)


def test_two_seeds_are_no_look():
    assert FIRST_LOOK == 3
    assert judge_one([0.0, 1e-9], 0.03, most=20).verdict == UNDECIDED
    assert judge_one([0.0, 1e-9, 0.0], 0.03, most=20).verdict == NO_WORSE


@pytest.mark.slow
def test_a_look_after_every_seed_is_wrong_in_one_of_20_experiments_and_fixed_tests_in_more():
    """Simulate 150 experiments at the edge of the margin. benchmarks/verdicts.py runs 40,000."""
    rng = np.random.default_rng(42)
    wrong = {"anytime": 0, "fixed": 0}
    for differences in rng.normal(-1.0, 1.0, (150, 20)):
        looks = [pairs(differences[:seeds].tolist(), 1.0) for seeds in range(2, 21)]
        designs = {
            "anytime": [Design(seeds=20, anytime=True)] * 19,
            "fixed": [Design(seeds=seeds) for seeds in range(2, 21)],
        }
        for name, plans in designs.items():
            found = (
                judge({"arm": own}, plan)["arm"] for own, plan in zip(looks, plans, strict=True)
            )
            wrong[name] += any(own.verdict in (NO_WORSE, BETTER) for own in found)
    assert wrong["anytime"] <= 0.1 * 150  # almost three standard errors above 5 %
    assert wrong["fixed"] > 0.12 * 150


def test_the_upper_tail_of_student_is_that_of_the_tables():
    assert student_above(2.1318, 4) == pytest.approx(0.05, abs=1e-5)
    assert student_above(-2.1318, 4) == pytest.approx(0.95, abs=1e-5)
    assert student(1 - 1e-5, 2) == pytest.approx(223.6, rel=1e-3)
    assert student_above(student(1 - 1e-5, 2), 2) == pytest.approx(1e-5, rel=1e-3)
