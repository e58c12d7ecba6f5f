"""The figures of an evaluation: each is a mean over prompts, with its interval.

The interval says how much the mean would vary with other prompts of the same kind, answered by the
same policy. The interval is computed from one value per prompt, because responses to the same
prompt are alike.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from grpo_trainable.tools.evaluation.generation import Generation
from reports.evaluations.record import EvaluationRecord
from reports.intervals import Estimate, alike, over_prompts, share_over_prompts

TITLES = {
    "reward": "reward",
    "format_reward": "format reward",
    "answer_reward": "answer reward",
    "response_tokens": "tokens per response",
    "truncated": "cut off by length",
}


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Mean over prompts, with its interval."""

    value: float
    low: float | None  # None if there is no interval
    high: float | None
    method: str | None  # method of the interval: "wilson" or "student"


@dataclass(frozen=True, kw_only=True)
class Measure:
    """Quantity with one value per prompt."""

    name: str  # key in evaluation.json: "reward", "pass@4", "majority@4", …
    values: Mapping[int, float]  # prompt index -> value
    draws: int  # maximum number of independent values that a prompt's responses can give

    @property
    def title(self) -> str:
        """Heading in tables."""
        return TITLES.get(self.name, self.name)

    def figure(self) -> Figure:
        """Return the mean and its interval.

        The interval is Wilson's if all values are in [0, 1], else Student's. There is no Student
        interval for a single value or for values that are all equal.
        """
        values = np.array(list(self.values.values()))
        if ((values >= 0) & (values <= 1)).all():
            return _figure(share_over_prompts(values, self.draws), "wilson")
        if not alike(values):
            estimate, _ = over_prompts(values[None])
            return _figure(estimate, "student")
        return Figure(value=float(values[0]), low=None, high=None, method=None)


def _figure(estimate: Estimate, method: str) -> Figure:
    return Figure(value=estimate.value, low=estimate.low, high=estimate.high, method=method)


def measures(record: EvaluationRecord) -> dict[str, Measure]:
    """Return every measure of the evaluation, by name.

    Measures of rewards use only prompts whose responses were all scored. pass@k needs answer
    rewards of 0 or 1. majority@k also needs at least one response with an answer.
    """
    found = [*_of_rewards(record.scored), *_of_lengths(record.by_prompt)]
    return {measure.name: measure for measure in found}


def _of_rewards(prompts: Mapping[int, Sequence[Generation]]) -> Iterator[Measure]:
    if not prompts:
        return
    samples = max(map(len, prompts.values()))
    scored = [generation for own in prompts.values() for generation in own]
    for name in ("reward", "format_reward", "answer_reward"):
        if all(getattr(generation, name) is not None for generation in scored):
            yield _mean(name, prompts, samples, lambda own, name=name: getattr(own, name))
    if any(generation.answer_reward not in (0.0, 1.0) for generation in scored):
        return
    for k in ks(samples):
        values = {i: pass_at(len(own), _correct(own), k) for i, own in prompts.items()}
        yield Measure(name=f"pass@{k}", values=values, draws=samples // k)
    if all(generation.answer is None for generation in scored):
        return
    for k in ks(samples):
        values = {i: _majority(own, k) for i, own in prompts.items()}
        yield Measure(name=f"majority@{k}", values=values, draws=samples // k)


def _of_lengths(prompts: Mapping[int, Sequence[Generation]]) -> Iterator[Measure]:
    samples = max(map(len, prompts.values()))
    yield _mean("response_tokens", prompts, samples, lambda own: own.tokens)
    yield _mean("truncated", prompts, samples, lambda own: not own.finished)


def _mean(
    name: str,
    prompts: Mapping[int, Sequence[Generation]],
    samples: int,
    value: Callable[[Generation], float],
) -> Measure:
    values = {i: math.fsum(map(value, own)) / len(own) for i, own in prompts.items()}
    return Measure(name=name, values=values, draws=samples)


def _correct(responses: Sequence[Generation]) -> int:
    return sum(generation.answer_reward == 1.0 for generation in responses)


def _majority(responses: Sequence[Generation], k: int) -> float:
    wrong = [own.answer for own in responses if own.answer_reward != 1.0]
    others = Counter(answer for answer in wrong if answer is not None)
    return majority_at(_correct(responses), list(others.values()), wrong.count(None), k)


def ks(samples: int) -> list[int]:
    """Return the powers of two below the number of samples, and the number of samples itself."""
    powers = [2**i for i in range(samples.bit_length()) if 2**i <= samples]
    return sorted({*powers, samples})


def pass_at(samples: int, correct: int, k: int) -> float:
    """Return the share of choices of k samples that include at least one correct sample.

    This is 1 - C(n - c, k) / C(n, k), the unbiased estimator of Chen et al. (2021),
    arXiv 2107.03374, for the probability that at least one of k responses is correct.
    """
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def majority_at(correct: int, others: Sequence[int], silent: int, k: int) -> float:
    """Return the share of all choices of k samples in which the correct answer wins the vote.

    If several answers have the most votes, each wins equally often. Majority voting is the
    self-consistency of Wang et al. (2023), arXiv 2203.11171.

    Args:
        correct: Number of samples with the correct answer, in any spelling.
        others: Number of samples with each of the other answers.
        silent: Number of samples without an answer, which have no vote.
        k: Number of samples that are chosen.
    """
    return _majority_at(correct, tuple(sorted(others)), silent, k)


@lru_cache(maxsize=1 << 16)
def _majority_at(correct: int, others: tuple[int, ...], silent: int, k: int) -> float:
    samples = correct + sum(others) + silent
    most = max(others, default=0)
    if k == samples:
        return float(correct > most) if correct != most else _won_tie(correct, others)
    # To choose k of n, take each sample with probability k / n, on the condition that k are taken.
    # So the votes for the answers are independent, except that their sum is fixed.
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
    """Return the probability that `rest` other samples are taken and do not outvote `votes`.

    The other samples have a different answer or no answer. If several answers tie for the most
    votes, each wins equally often.

    Args:
        others: Number of samples with each of the other answers.
        silent: Number of samples without an answer.
        votes: Number of votes for the correct answer.
        rest: Number of other samples in the choice.
        toss: The probability of taking a sample.
    """
    # The indices are chance[taken, ties].
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
    """Return an array of the probabilities of 0 to `count` successes in `count` tosses."""
    logs = [
        math.lgamma(count + 1) - math.lgamma(taken + 1) - math.lgamma(count - taken + 1)
        for taken in range(count + 1)
    ]
    taken = np.arange(count + 1)
    return np.exp(np.array(logs) + taken * math.log(toss) + (count - taken) * math.log1p(-toss))
