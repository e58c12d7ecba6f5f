"""Differences between two evaluations, over the prompts that both policies answered."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from grpo_trainable.config import shown
from grpo_trainable.tools.evaluation.settings import is_read
from reports.evaluations.measures import TITLES, measures
from reports.evaluations.record import EvaluationRecord
from reports.intervals import alike, over_prompts
from reports.markup import visible

# Minimum number of prompts at which the same difference on every prompt is significant. The
# chance that equal policies differ in the same direction on all 6 prompts is 2 / 2^6 = 3 %.
SIGN_TEST = 6
# Sections of a config that say how a policy's responses are sampled and scored, and those of their
# keys that change neither a response to a prompt nor its reward.
SECTIONS = ("task", "env", "rollout", "eval")
NO_EFFECT = {
    *("task.train_file", "task.eval_file", "task.keywords_file", "task.keywords_per_prompt"),
    *("task.size", "task.max_error_rate", "task.strict", "task.reward_deadline_s"),
    *("env.allow_unsafe", "env.step_deadline_s", "env.episode_deadline_s", "env.patience_s"),
    *("eval.prompts", "eval.samples"),
}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Difference in a figure between two evaluations, over the same prompts, with its interval."""

    name: str  # the measure's name
    own: float  # mean over the shared prompts
    other: float  # mean over the shared prompts, for the other evaluation
    value: float  # this evaluation minus the other
    low: float | None  # None with one prompt, or if the difference is the same in all prompts
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
    """Return `own` minus `other` for each measure of both; empty if the two share no prompt.

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


def changed_settings(own: EvaluationRecord, other: EvaluationRecord) -> list[str]:
    """Return the settings for sampling and scoring that differ, as `KEY=VALUE (the other: VALUE)`.

    If they differ, so do rewards or responses, even of the same policy. A file of code that has
    changed since the other evaluation counts as a different value.
    """
    ours, theirs = _settings(own), _settings(other)
    changed = [key for key, value in ours.items() if key in theirs and theirs[key] != value]
    found = [f"{key}={_text(ours[key])} (the other: {_text(theirs[key])})" for key in changed]
    code, before = (record.origin.get("code", {}) for record in (own, other))
    edited = [key for key in code.keys() & before.keys() if code[key] != before[key]]
    found += [f"{key} (its file has changed)" for key in sorted(set(edited) - set(changed))]
    return found


def _text(value: Any) -> str:
    """Return a setting's value as text. Some values are text already, such as JSON."""
    return visible(value) if isinstance(value, str) else shown(value)


def _settings(record: EvaluationRecord) -> dict[str, Any]:
    """Return key -> value for the settings that change responses or rewards."""
    settings = {
        f"{section}.{name}": value
        for section in SECTIONS
        for name, value in record.config.get(section, {}).items()
    }
    return {k: v for k, v in settings.items() if is_read(k) and k not in NO_EFFECT}


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
