"""The figures of an evaluation: each is the mean of one value a prompt, with an interval over them.

The interval is for other prompts of the same kind, answered by the same policy: responses to one
prompt are more alike than those to two, so prompts are what counts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from grpo_trainable.tools.evaluation.generation import Generation
from reports.evaluations.attempts import ks, majority_at, pass_at
from reports.evaluations.record import EvaluationRecord
from reports.intervals import Estimate, alike, over_prompts, share_over_prompts

TITLES = {
    "reward": "reward",
    "format_reward": "format reward",
    "answer_reward": "answer reward",
    "response_tokens": "tokens a response",
    "truncated": "cut off by length",
}


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A mean over prompts. `method` says how its interval came about; None where it has none."""

    value: float
    low: float | None
    high: float | None
    method: str | None  # "wilson" or "student"


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One value a prompt."""

    name: str  # its key in files: "reward", "pass@4", "majority@4", …
    values: Mapping[int, float]  # one value a prompt index
    draws: int  # values of it that a prompt's responses could give, independently of each other

    @property
    def title(self) -> str:
        return TITLES.get(self.name, self.name)

    def figure(self) -> Figure:
        """The mean, with Wilson's interval where all values are in [0, 1], else Student's, which
        one value has not, nor have several that are equal."""
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
    """Every measure that the evaluation has, by name. Those of rewards rest on the prompts whose
    responses could all be scored; pass@k needs answers that are right or wrong, and majority@k
    responses that give one."""
    found = [*_of_rewards(record.scored), *_of_lengths(record.by_prompt)]
    return {measure.name: measure for measure in found}


def _of_rewards(prompts: Mapping[int, Sequence[Generation]]) -> Iterator[Measure]:
    if not prompts:
        return
    samples = max(map(len, prompts.values()))
    for name in ("reward", "format_reward", "answer_reward"):
        yield _mean(name, prompts, samples, lambda own, name=name: getattr(own, name))
    scored = [generation for own in prompts.values() for generation in own]
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
