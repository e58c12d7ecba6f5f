"""The difference between two evaluations over the prompts that both answered."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from reports.evaluations.measures import TITLES, measures
from reports.evaluations.record import EvaluationRecord
from reports.intervals import alike, over_prompts

SIGN_TEST = 6  # prompts: so many of equal policies differ in one direction with 2 / 2^6 = 3 %


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A figure of one evaluation less that of another, over the same prompts, and its interval for
    other prompts. `low` and `high` are None with a single prompt, and where all differ by the
    same."""

    name: str  # the measure's name
    own: float  # means over the shared prompts
    other: float
    value: float
    low: float | None
    high: float | None
    prompts: int  # different ones that both answered

    @property
    def title(self) -> str:
        return TITLES.get(self.name, self.name)

    @property
    def identical(self) -> bool:
        """Whether there are several prompts and none in which the two differ."""
        return self.low is None and self.prompts > 1 and self.value == 0.0

    @property
    def told_apart(self) -> bool | None:
        """Whether the interval leaves out 0, a paired test at 5 %. Without an interval what differs
        in no prompt is not told apart, and what differs by the same in all of `SIGN_TEST` prompts
        is; else None."""
        if self.low is None or self.high is None:
            return False if self.identical else True if self.prompts >= SIGN_TEST else None
        return self.low > 0 or self.high < 0


def differences(own: EvaluationRecord, other: EvaluationRecord) -> list[Difference]:
    """`own` less `other`, for each measure that both have; empty where they share no prompt.

    Prompts are paired by their text. The difference is taken prompt by prompt, so what makes some
    prompts harder than others cancels out; its interval is Student's over the prompts.
    """
    ours, theirs = _by_text(own), _by_text(other)
    found = []
    for name in ours.keys() & theirs.keys():
        shared = sorted(ours[name].keys() & theirs[name].keys())
        if shared:
            pairs = np.array([(ours[name][text], theirs[name][text]) for text in shared])
            found.append(_difference(name, pairs))
    order = list(ours)
    return sorted(found, key=lambda difference: order.index(difference.name))


def _difference(name: str, pairs: np.ndarray) -> Difference:
    own, other = (float(mean) for mean in pairs.mean(axis=0))
    low = high = None
    between = pairs[:, 0] - pairs[:, 1]
    if not alike(between):
        estimate, _ = over_prompts(between[None])
        low, high = estimate.low, estimate.high
    return Difference(
        name=name,
        own=own,
        other=other,
        value=own - other,
        low=low,
        high=high,
        prompts=len(pairs),
    )


def _by_text(record: EvaluationRecord) -> dict[str, Mapping[str, float]]:
    """Name of a measure -> text of a prompt -> value, the mean where the prompt is asked twice."""
    texts = {index: own[0].prompt for index, own in record.by_prompt.items()}
    found: dict[str, Mapping[str, float]] = {}
    for name, measure in measures(record).items():
        values: dict[str, list[float]] = {}
        for index, value in measure.values.items():
            values.setdefault(texts[index], []).append(value)
        found[name] = {text: _mean(own) for text, own in values.items()}
    return found


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
