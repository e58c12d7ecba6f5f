"""The figure that a column shows of one trial."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

from reports.parquet_reader import TrialFiles
from reports.records import TrialRecord
from reports.summary import median
from search_spaces.columns import Column

EARLY = 0.25  # share of the rounds


def figure(column: Column, trial: TrialRecord, files: TrialFiles) -> float | None:
    """None where the trial's rows or files do not tell, or other work disturbed a speed."""
    if column.is_speed and trial.pace is not None and not trial.pace.comparable:
        return None
    if column.metric in DERIVED:
        value = DERIVED[column.metric](trial, files)
    else:
        value = OVER[column.over](trial, column.metric)
    return None if value is None else 0.0 + column.factor * value  # no negative zero


def early_reward(trial: TrialRecord) -> float | None:
    """Held-out reward where it was measured nearest to `EARLY` of the rounds."""
    place = EARLY * trial.config.rounds
    measured = [(abs(round_ - place), reward) for round_, reward, _ in trial.evaluated() if round_]
    return min(measured)[1] if measured else None


def _mean(trial: TrialRecord, metric: str) -> float | None:
    values = trial.column(metric)
    return statistics.fmean(values) if values else None


# How the rounds' values become one: the keys of search_spaces.columns.OVER.
OVER: Mapping[str, Callable[[TrialRecord, str], float | None]] = {
    "last": TrialRecord.last,
    "mean": _mean,
    "median": lambda trial, metric: median(trial.column(metric)),
    "max": lambda trial, metric: max(trial.column(metric), default=None),
    "late": TrialRecord.late_mean,
}


def _lag_of_bound(trial: TrialRecord, files: TrialFiles) -> float | None:
    mean = _mean(trial, "lag/mean")
    return None if mean is None or trial.config.lag == 0 else mean / trial.config.lag


def _never_trained(trial: TrialRecord, files: TrialFiles) -> float | None:
    trained, requested = trial.last("count/trained"), trial.last("count/requested")
    return None if trained is None or not requested else 1 - trained / requested


# Figures that are no metric of a round: the keys of search_spaces.columns.DERIVED.
DERIVED: Mapping[str, Callable[[TrialRecord, TrialFiles], float | None]] = {
    "samples_per_s": lambda trial, files: trial.samples_per_s,
    "lag_of_bound": _lag_of_bound,
    "uses_per_group": lambda trial, files: files.uses,
    "never_trained": _never_trained,
}
