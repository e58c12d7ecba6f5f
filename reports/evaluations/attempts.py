"""What k attempts at a prompt are worth, from n >= k that were sampled: pass@k and majority@k.

Both are means over all choices of k of the n responses, so nothing depends on their order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np


def ks(samples: int) -> list[int]:
    """1, 2, 4, … up to the number of samples, and that number."""
    powers = [2**i for i in range(samples.bit_length()) if 2**i <= samples]
    return sorted({*powers, samples})


def pass_at(samples: int, correct: int, k: int) -> float:
    """The share of choices of k samples with a correct one among them: 1 - C(n - c, k) / C(n, k).

    The unbiased estimator of Chen et al. (2021), arXiv 2107.03374, for the probability that one of
    k responses is correct.
    """
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def majority_at(correct: int, others: Sequence[int], silent: int, k: int) -> float:
    """The share of choices of k samples in which the correct answer wins the vote.

    Of several answers with the most votes each wins equally often. Majority voting is the
    self-consistency of Wang et al. (2023), arXiv 2203.11171.

    Args:
        correct: samples with the correct answer, however they spell it.
        others: samples for each of the other answers.
        silent: samples that give no answer. They have no vote.
    """
    return _majority_at(correct, tuple(sorted(others)), silent, k)


@lru_cache(maxsize=1 << 16)
def _majority_at(correct: int, others: tuple[int, ...], silent: int, k: int) -> float:
    samples = correct + sum(others) + silent
    most = max(others, default=0)
    if k == samples:
        return float(correct > most) if correct != most else _won_tie(correct, others)
    # Choosing k of n is the same as taking each by a toss of k / n, given that k were taken: so the
    # votes for the answers are independent but for their sum.
    toss = k / samples
    for_correct = _tosses(correct, toss)
    won = 0.0
    for votes in range(1, min(k, correct) + 1):
        won += for_correct[votes] * _not_outvoted(others, silent, votes, k - votes, toss)
    return won / float(_tosses(samples, toss)[k])


def _won_tie(correct: int, others: tuple[int, ...]) -> float:
    return 1 / (1 + others.count(correct)) if correct else 0.0


def _not_outvoted(
    others: tuple[int, ...], silent: int, votes: int, rest: int, toss: float
) -> float:
    """The probability that the other answers and the silent are taken `rest` times together and
    none has more than `votes`; shared with each answer that has as many."""
    # chance[taken, ties]
    chance = np.zeros((rest + 1, rest // votes + 1))
    chance[0, 0] = 1.0
    for count in others:
        of_answer = _tosses(count, toss)
        longer = np.zeros_like(chance)
        for taken in range(min(votes - 1, count, rest) + 1):
            longer[taken:] += of_answer[taken] * chance[: rest + 1 - taken]
        if votes <= min(count, rest):
            longer[votes:, 1:] += of_answer[votes] * chance[: rest + 1 - votes, :-1]
        chance = longer
    of_silent = _tosses(silent, toss)
    total = np.zeros(chance.shape[1])
    for taken in range(min(silent, rest) + 1):
        total += of_silent[taken] * chance[rest - taken]
    return float((total / (1 + np.arange(len(total)))).sum())


@lru_cache(maxsize=1 << 12)
def _tosses(count: int, toss: float) -> np.ndarray:
    """The probabilities of 0 … count successes in `count` tosses, (count + 1,)."""
    logs = [
        math.lgamma(count + 1) - math.lgamma(taken + 1) - math.lgamma(count - taken + 1)
        for taken in range(count + 1)
    ]
    taken = np.arange(count + 1)
    return np.exp(np.array(logs) + taken * math.log(toss) + (count - taken) * math.log1p(-toss))
