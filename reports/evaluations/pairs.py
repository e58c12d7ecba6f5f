"""Differences between two evaluations, over the prompts that both policies answered."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from reports.evaluations.measures import TITLES, measures
from reports.evaluations.record import EvaluationRecord
from reports.intervals import alike, over_prompts

# Minimum number of prompts at which the same difference on every prompt is significant. The
# chance that equal policies differ in the same direction on all 6 prompts is 2 / 2^6 = 3 %.
SIGN_TEST = 6


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Difference in a figure between two evaluations, over the same prompts, with its interval."""

    name: str  # the measure's name
    own: float  # mean over the shared prompts
    other: float  # mean over the shared prompts, for the other evaluation
    value: float  # this evaluation minus the other
    low: float | None  # None with one prompt, or if the difference is the same for all prompts
    high: float | None
    prompts: int  # number of different prompts that both policies answered

    @property
    def title(self) -> str:
        """Heading in tables."""
        return TITLES.get(self.name, self.name)

    @property
    def identical(self) -> bool:
        """Return True if there are several prompts and the evaluations differ on none of them."""
        return self.low is None and self.prompts > 1 and self.value == 0.0

    @property
    def told_apart(self) -> bool | None:
        """Return True if the difference is significant at 5 %, or None if that is unknown.

        If there is an interval, the test is a paired t-test: the interval must exclude 0. There is
        no interval if all prompts have the same difference. In that case, a difference of 0 over
        several prompts is not significant. Any other difference is significant if there are at
        least `SIGN_TEST` prompts. With fewer prompts, the significance is unknown.
        """
        if self.low is None or self.high is None:
            return False if self.identical else True if self.prompts >= SIGN_TEST else None
        return self.low > 0 or self.high < 0


def differences(own: EvaluationRecord, other: EvaluationRecord) -> list[Difference]:
    """Return `own` minus `other` for each measure that both have; empty if they share no prompt.

    Prompts are paired by their text. The difference is taken prompt by prompt, so the difficulty of
    a prompt cancels out. The interval is Student's over the prompts.
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
    """Return measure -> prompt text -> value. The values of a repeated prompt are averaged."""
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
