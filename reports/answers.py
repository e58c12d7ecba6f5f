"""What a space asks, answered arm by arm: the figures that its question is about, side by side.

Every cell is the median over the seeds, with the least and the most; a difference is between
trials of the same seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reports.figures import early_reward, figure
from reports.parts import TrialFiles
from reports.records import ExperimentRecord, TrialRecord
from reports.summary import Comparison, show
from search_spaces.columns import SHARES, Column

REWARD = Column(name="reward", title="held-out reward", metric="reward/eval_mean", form="{:.3f}")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A table, what else is to be said, and how to read it."""

    arms: Mapping[str, Mapping[str, Sequence[float | None]]]  # arm -> column -> one a seed
    columns: Sequence[Column]
    said: Sequence[str]
    note: str

    @property
    def header(self) -> tuple[str, ...]:
        return ("arm", *(column.title for column in self.columns))

    def rows(self) -> list[tuple[str, ...]]:
        return [
            (arm, *(show(values[column.name], column.form) for column in self.columns))
            for arm, values in self.arms.items()
        ]


def answer(
    experiment: ExperimentRecord, comparison: Comparison, files: Mapping[str, TrialFiles]
) -> Answer | None:
    """None where the experiment asks no question, or has one arm alone."""
    arms = experiment.complete_arms  # what was stopped early compares with nothing
    if experiment.question is None or len(arms) < 2:
        return None
    # The arm that everything is compared with, as in the table of costs; else the first.
    base = comparison.baseline or next(iter(arms))
    rewards = {trial.config.seed: trial.last(REWARD.metric) for trial in arms[base]}

    def against(trial: TrialRecord) -> float | None:
        own, other = trial.last(REWARD.metric), rewards.get(trial.config.seed)
        return None if own is None or other is None else own - other

    difference = replace(REWARD, name="against", title=f"against {base}", form="{:+.3f}")
    early = replace(REWARD, name="early_reward", title="after a quarter")
    asked = (*experiment.question.columns, *SHARES)
    values = {
        arm: {
            REWARD.name: [trial.last(REWARD.metric) for trial in trials],
            difference.name: [against(trial) for trial in trials],
            early.name: [early_reward(trial) for trial in trials],
            **{c.name: [figure(c, trial, files[trial.name]) for trial in trials] for c in asked},
        }
        for arm, trials in arms.items()
    }
    return Answer(
        arms=values,
        columns=(REWARD, difference, early, *asked),
        said=_not_available(experiment.description),
        note="Trials that have run all their rounds; medians over the seeds, least and most "
        "below; differences are between trials of one seed. The quarter is of the rounds, as near "
        f"as it was evaluated. {_how_measured(asked)}",
    )


def _how_measured(columns: Sequence[Column]) -> str:
    """How each column's figure of a trial comes about, columns of one kind together."""
    kinds: dict[str, list[str]] = {}
    for column in columns:
        kinds.setdefault(column.how, []).append(column.title)
    return " ".join(f"{', '.join(titles)}: {how}." for how, titles in kinds.items())


def _not_available(description: Mapping[str, Any]) -> list[str]:
    missing = description.get("not_available") or {}
    return [f"Not available here: {arm} ({reason})." for arm, reason in missing.items()]
