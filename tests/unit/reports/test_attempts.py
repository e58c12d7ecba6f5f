"""pass@k and majority@k, checked by hand and against every choice of k responses."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from fractions import Fraction

import pytest

from reports.evaluations.measures import ks, majority_at, pass_at


@pytest.mark.parametrize(
    ("samples", "expected"),
    [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (12, [1, 2, 4, 8, 12])],
)
def test_k_doubles_up_to_the_number_of_samples(samples, expected):
    assert ks(samples) == expected


@pytest.mark.parametrize(
    ("samples", "correct", "k", "expected"),
    [
        (5, 2, 1, 2 / 5),
        (5, 2, 2, 7 / 10),  # 1 - 3/10: three of the ten pairs contain no correct response
        (5, 2, 4, 1.0),  # only three responses are wrong
        (5, 0, 3, 0.0),
        (5, 5, 1, 1.0),
        (200, 1, 100, 0.5),
    ],
)
def test_pass_at_k_by_hand(samples, correct, k, expected):
    assert pass_at(samples, correct, k) == pytest.approx(expected, abs=1e-15)


def test_pass_at_k_is_exact_for_thousands_of_samples():
    assert pass_at(4000, 1, 2000) == 0.5


@pytest.mark.parametrize(
    ("correct", "others", "silent", "k", "expected"),
    [
        (2, [1], 0, 3, 1.0),
        (1, [2], 0, 3, 0.0),
        (1, [1], 0, 2, 0.5),  # a tie of two
        (2, [2, 2], 1, 7, 1 / 3),  # a tie of three; silent responses have no vote
        (0, [], 3, 3, 0.0),  # no votes
        (0, [], 3, 1, 0.0),
        (1, [], 3, 4, 1.0),
        (3, [1, 1], 0, 1, 3 / 5),  # with k = 1, one vote decides
        # Two of three pairs contain the correct answer and a wrong one, which is a tie.
        (1, [1, 1], 0, 2, 2 / 3 * 1 / 2),
        # Of six pairs, one has two correct answers, four are ties, and one has two wrong answers.
        (2, [2], 0, 2, 1 / 6 + 4 / 6 * 1 / 2),
    ],
)
def test_majority_by_hand(correct, others, silent, k, expected):
    assert majority_at(correct, others, silent, k) == pytest.approx(expected, abs=1e-12)


def by_counting(correct: int, others: list[int], silent: int, k: int) -> Fraction:
    """Return majority@k by counting the votes in every choice of k responses."""
    votes = ["right"] * correct + [None] * silent
    votes += [f"wrong {i}" for i, count in enumerate(others) for _ in range(count)]
    won, choices = Fraction(0), 0
    for chosen in itertools.combinations(votes, k):
        choices += 1
        counts = Counter(answer for answer in chosen if answer is not None)
        best = max(counts.values(), default=0)
        winners = [answer for answer, count in counts.items() if count == best]
        won += Fraction("right" in winners, max(1, len(winners)))
    return won / choices


@pytest.mark.slow
def test_both_are_means_over_all_choices_of_k():
    draw = random.Random(18)
    for _ in range(60):
        others = [draw.randint(1, 3) for _ in range(draw.randint(0, 3))]
        correct, silent = draw.randint(0, 4), draw.randint(0, 2)
        samples = correct + sum(others) + silent
        for k in range(1, samples + 1):
            counted = by_counting(correct, others, silent, k)
            assert majority_at(correct, others, silent, k) == pytest.approx(
                float(counted), abs=1e-12
            )
            without = by_counting(correct, [], samples - correct, k)
            assert pass_at(samples, correct, k) == pytest.approx(float(without), abs=1e-12)


def test_the_order_of_answers_does_not_matter():
    assert majority_at(3, [1, 2, 4], 1, 4) == majority_at(3, [4, 2, 1], 1, 4)
