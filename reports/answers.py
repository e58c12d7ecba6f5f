"""Table that answers a search space's question: a row for each arm, a column for each figure.

A cell shows the median over the seeds, with the minimum and the maximum. A difference is computed
between trials with the same seed, and its cell shows the mean.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from grpo_trainable.telemetry.metrics import SE
from grpo_trainable.telemetry.stages import shares_of_work
from grpo_trainable.text import joined, rate
from reports.parquet_reader import TrialFiles
from reports.records import ExperimentRecord, TrialRecord, error_of_mean
from reports.summary import (
    COUNTED,
    MARK,
    OLDER_RESPONSES,
    Comparison,
    comparable_by_kl,
    median,
    show,
)
from search_spaces.columns import SHARES, SHOWN_STAGES, Column

REWARD = Column(name="reward", title="held-out reward", metric="reward/eval_mean", form="{:.3f}")
EARLY_REWARD = Column(
    name="early_reward", title="early held-out reward", metric="early_reward", form="{:.3f}"
)
AGAINST = "against"  # name of the column of differences from the baseline
# The early reward comes from the evaluation nearest to this share of the rounds.
EARLY = 0.25


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Table with one row per arm, remarks above it, and notes on how to read it."""

    arms: Mapping[str, Mapping[str, Sequence[float | None]]]  # arm -> column -> one value per seed
    columns: Sequence[Column]
    left_out: Collection[
        str
    ]  # names of columns that the table leaves out, because they say nothing
    # Column -> arm -> standard error of the figure, if it is measured on a sample of responses and
    # the arm has a single trial.
    errors: Mapping[str, Mapping[str, float]]
    not_comparable: Collection[str]  # arms with `MARK` in place of their speeds
    counted: Collection[str]  # arms whose speeds include rounds that other processes disturbed
    said: Sequence[str]  # remarks above the table
    note: str
    measured: Sequence[str]  # how the figures of each column are computed
    caveats: Sequence[str]  # reasons not to compare figures of different arms

    @property
    def header(self) -> tuple[str, ...]:
        """Titles of the table's columns."""
        return ("arm", *(column.title for column in self.shown))

    @property
    def shown(self) -> list[Column]:
        """The columns of the table."""
        return [column for column in self.columns if column.name not in self.left_out]

    def rows(self) -> list[tuple[str, ...]]:
        """Return the rows of the table as text."""
        return [(arm, *(self._cell(arm, column) for column in self.shown)) for arm in self.arms]

    def _cell(self, arm: str, column: Column) -> str:
        if column.is_speed and arm in self.not_comparable:
            return MARK
        mark = f" {COUNTED}" if column.is_speed and arm in self.counted else ""
        # A whole number would show the speed of a slow model as 0.
        form = rate if column.is_speed and column.form == "{:.0f}" else column.form
        middle = statistics.fmean if column.name == AGAINST else statistics.median
        # The range over the seeds must not look like the interval of this difference.
        label = "seeds: " if column.name == AGAINST else ""
        error = self.errors.get(column.name, {}).get(arm)
        beside = "" if error is None else f" ± {rate(error)}"
        return show(self.arms[arm][column.name], form, middle, label) + beside + mark


def answer(
    experiment: ExperimentRecord, comparison: Comparison, files: Mapping[str, TrialFiles]
) -> Answer | None:
    """Return the table that answers the search space's question, or None.

    There is no table if the space asks no question, or if fewer than two arms have finished a
    round.
    """
    arms = experiment.complete_arms  # trials that stopped early are not comparable
    if experiment.question is None or len(arms) < 2:
        return None
    # If the comparison has no baseline, use the first arm.
    base = comparison.baseline or next(iter(arms))
    rewards = {trial.config.seed: trial.reward_after for trial in arms[base]}

    def against(trial: TrialRecord) -> float | None:
        own, other = trial.reward_after, rewards.get(trial.config.seed)
        return None if own is None or other is None else own - other

    difference = replace(REWARD, name=AGAINST, title=f"against {base}", form="{:+.3f}")
    asked = (*experiment.question.columns, *SHARES)
    not_comparable = {arm for arm in arms if not comparison.comparable(arm)}

    def figures(column: Column, arm: str) -> list[float | None]:
        if column.is_speed and arm in not_comparable:
            return [None] * len(arms[arm])
        return [figure(column, trial, files[trial.name]) for trial in arms[arm]]

    values = {
        arm: {
            REWARD.name: [trial.reward_after for trial in trials],
            difference.name: [against(trial) for trial in trials],
            **{column.name: figures(column, arm) for column in (EARLY_REWARD, *asked)},
        }
        for arm, trials in arms.items()
    }
    every = [trial for trials in arms.values() for trial in trials]
    has_early = any(_is_early(trial) for trial in every)
    left_out = set() if has_early else {EARLY_REWARD.name}
    # Keep a column of speeds without figures if its cells show `MARK`.
    left_out |= {
        column.name
        for column in asked
        if not (column.is_speed and not_comparable)
        and all(value is None for arm in arms for value in values[arm][column.name])
    }
    explained = [column for column in asked if column.name not in left_out]
    has_speed = any(column.is_speed for column in explained)
    return Answer(
        arms=values,
        columns=(REWARD, difference, EARLY_REWARD, *asked),
        left_out=left_out,
        errors={
            column.name: {
                arm: error
                for arm, trials in arms.items()
                if len(trials) == 1 and (error := _standard_error(column, trials[0]))
            }
            for column in asked
        },
        not_comparable=not_comparable,
        counted={arm for arm in arms if comparison.counts(arm)},
        said=_not_available(experiment.description),
        note="Only trials that ran all their rounds count. With several seeds, the first line of a "
        "cell shows the median, and the second line shows the minimum and the maximum. A "
        "difference is computed between trials with the same seed, and its cell shows the mean "
        f"instead of the median. {_how_early(every) if has_early else ''}"
        f"{'The list below explains the other columns.' if explained else ''}"
        f"{_marked(not_comparable) if has_speed else ''}"
        f"{_marked_as_counted(comparison) if has_speed else ''}{_unknown(values, explained)}",
        measured=_how_measured(explained),
        caveats=[
            *_about_kl(explained, arms),
            *_how_precise(explained, every),
        ],
    )


def _how_early(trials: Sequence[TrialRecord]) -> str:
    """Say when the early held-out reward was measured, or return "" if no trial has one."""
    found = [(trial, early_evaluation(trial)) for trial in trials]
    shares = [early[0] / trial.config.rounds for trial, early in found if early is not None]
    if not shares:
        return ""
    first, last = f"{min(shares):.0%}", f"{max(shares):.0%}"
    when = first if first == last else f"{first} to {last}"
    return (
        f"The early held-out reward comes from the evaluation nearest to {EARLY:.0%} of the rounds "
        f"(here, after {when} of the rounds). "
    )


def _how_measured(columns: Sequence[Column]) -> list[str]:
    """Say how each column's figures are computed. Columns with the same method share a sentence."""
    kinds: dict[str, list[str]] = {}
    for column in columns:
        kinds.setdefault(f"{_unit(column)}{column.how}", []).append(_with_metric(column))
    return [f"{', '.join(titles)}: {how}." for how, titles in kinds.items()]


def _unit(column: Column) -> str:
    """Return the unit of a KL, an entropy or an NLL, and an empty string for other columns."""
    if not column.metric.endswith("_nats") or abs(column.factor) != 1:
        return ""
    return f"in nats per {'response' if column.metric.startswith('kl/') else 'token'}, "


def _about_kl(columns: Sequence[Column], arms: Mapping[str, Sequence[TrialRecord]]) -> list[str]:
    """Say to what extent values of the KL to the reference can be compared."""
    of_reference = [c.title for c in columns if c.metric == "kl/reference_nats"]
    return [f"{title}: {OLDER_RESPONSES}{comparable_by_kl(arms)}" for title in of_reference]


def _how_precise(columns: Sequence[Column], trials: Sequence[TrialRecord]) -> list[str]:
    """Say how precise the figures are for metrics that rounds measure on a sample of responses."""
    found, arms = [], {}
    for column in columns:
        errors = []
        for trial in trials:
            if error := _standard_error(column, trial):
                errors.append(error)
                arms[trial.arm] = None
        if errors:
            least, most = f"{min(errors):.2g}", f"{max(errors):.2g}"
            found.append(f"{column.title} {least if least == most else f'{least} to {most}'}")
    if not found:
        return []
    every = len(arms) == len({trial.arm for trial in trials})
    errors = f"Their standard errors: {', '.join(found)}."
    arms_of = [trial.arm for trial in trials]
    if any(arms_of.count(arm) == 1 for arm in arms):
        errors += " If an arm has a single trial, ± and the standard error follow the figure."
    covers = (
        "These errors cover the choice of the sample, but not the choice of the round's prompts "
        "and responses, so even larger differences can be noise."
    )
    return [
        f"{'Trials measure' if every else f'Only {joined(list(arms))} measured'} some figures on a "
        f"sample of each round's responses. {errors} {covers}"
    ]


# Standard error of a reduction, divided by the standard error of a mean over the same rounds. The
# errors of the rounds are assumed to be Gaussian. Keys as in `OVER`.
RELATIVE_ERROR = {"mean": 1.0, "late": 1.0, "median": math.sqrt(math.pi / 2)}


def _standard_error(column: Column, trial: TrialRecord) -> float | None:
    """Return the standard error of a figure; None if it is not measured on a sample."""
    name = f"{column.metric}{SE}"
    errors = trial.late(name) if column.over == "late" else trial.column(name)
    if column.over not in RELATIVE_ERROR or not any(errors):
        return None
    return RELATIVE_ERROR[column.over] * error_of_mean(errors) * abs(column.factor)


def _with_metric(column: Column) -> str:
    """Return a column's title, followed by the metric that the column shows, if it shows one."""
    if column.metric in DERIVED:
        return column.title
    reversed_ = " with its sign reversed" if column.factor < 0 else ""
    return f"{column.title} ({column.metric}{reversed_})"


def _unknown(
    values: Mapping[str, Mapping[str, Sequence[float | None]]], columns: Sequence[Column]
) -> str:
    """Explain the sign for a missing figure, or return "" if no cell shows it."""
    unknown = any(
        not column.is_speed and all(value is None for value in own[column.name])
        for own in values.values()
        for column in columns
    )
    return " -: not known, or ruled out by the arm's settings." if unknown else ""


def _marked(not_comparable: Collection[str]) -> str:
    return (
        f" {MARK}: not comparable, because other processes used the machine."
        if not_comparable
        else ""
    )


def _marked_as_counted(comparison: Comparison) -> str:
    counted = comparison.counts_disturbed
    return f" {COUNTED}: {counted}" if counted else ""


def _not_available(description: Mapping[str, Any]) -> list[str]:
    missing = description.get("not_available") or {}
    return [
        f"The arm {arm} could not run on this experiment's machine ({reason})."
        for arm, reason in missing.items()
    ]


def figure(column: Column, trial: TrialRecord, files: TrialFiles) -> float | None:
    """Return a column's figure for one trial.

    Returns:
        The figure. None in three cases: the figure is missing from the trial's rows and files, the
        settings rule out what the figure counts, or it is a speed and other processes disturbed the
        trial too much.
    """
    if column.is_speed and trial.pace is not None and not trial.pace.comparable:
        return None
    if not trial.has(column.metric):
        return None
    if column.metric in DERIVED:
        value = DERIVED[column.metric](trial, files)
    else:
        value = OVER[column.over](trial, column.metric)
    return None if value is None else 0.0 + column.factor * value  # no negative zero


def early_evaluation(trial: TrialRecord) -> tuple[int, float] | None:
    """Return (round, held-out reward) of the evaluation nearest to round `EARLY` × `rounds`.

    Return None if the trial has not been evaluated after round 0.
    """
    place = EARLY * trial.config.rounds
    measured = [(round_, reward) for round_, reward, _ in trial.evaluated() if round_]
    return min(measured, key=lambda found: abs(found[0] - place), default=None)


def _is_early(trial: TrialRecord) -> bool:
    """Return True if another evaluation follows the evaluation from `early_evaluation`."""
    early = early_evaluation(trial)
    return early is not None and early[0] < max(round_ for round_, _, _ in trial.evaluated())


def _early_reward(trial: TrialRecord, files: TrialFiles) -> float | None:
    early = early_evaluation(trial)
    return None if early is None else early[1]


def _share_of(stage: str, trial: TrialRecord, files: TrialFiles) -> float | None:
    """Return a stage's share of all work except evaluation, as the median over the rounds."""
    return median(
        [
            shares_of_work(row, without="eval")[stage]
            for row in trial.rows
            if f"time/{stage}_s" in row
        ]
    )


def _mean(trial: TrialRecord, metric: str) -> float | None:
    values = trial.column(metric)
    return statistics.fmean(values) if values else None


# Functions that reduce the values of all rounds to one value. They have the same keys as
# search_spaces.columns.OVER.
OVER: Mapping[str, Callable[[TrialRecord, str], float | None]] = {
    "last": TrialRecord.last,
    "mean": _mean,
    "median": lambda trial, metric: median(trial.column(metric)),
    "max": lambda trial, metric: max(trial.column(metric), default=None),
    "late": TrialRecord.late_mean,
}


def _lag_of_bound(trial: TrialRecord, files: TrialFiles) -> float | None:
    mean = _mean(trial, "lag/mean")
    is_bound = trial.config.lag > 0 and trial.config.lag_mode == "bounded"
    return mean / trial.config.lag if mean is not None and is_bound else None


def _never_trained(trial: TrialRecord, files: TrialFiles) -> float | None:
    trained, requested = trial.last("count/trained"), trial.last("count/requested")
    return None if trained is None or not requested else 1 - trained / requested


# Figures that are not metrics of a round, with the same keys as search_spaces.columns.DERIVED.
DERIVED: Mapping[str, Callable[[TrialRecord, TrialFiles], float | None]] = {
    "early_reward": _early_reward,
    "samples_per_s": lambda trial, files: trial.samples_per_s,
    "lag_of_bound": _lag_of_bound,
    "uses_per_group": lambda trial, files: files.uses,
    "never_trained": _never_trained,
    **{f"{stage}_share": partial(_share_of, stage) for stage in SHOWN_STAGES},
}
