"""Attach the report of an experiment to the runs of its trials in the trackers."""

from __future__ import annotations

import csv
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from callbacks.trackers.tracked_run import (
    State,
    TrackedTrial,
    open_run,
    refuse_unusable,
    send_rows,
    without_secrets,
)
from callbacks.trial_files import read_rows
from grpo_trainable.storage.ray_private import EXPR_RESULT_FILE
from grpo_trainable.text import plural
from reports.experiment import read_experiment
from reports.menu import recorded_baseline
from reports.records import ExperimentRecord, TrialRecord
from reports.summary import Comparison, compare


def attach_report(directory: Path, trackers: Sequence[str]) -> list[str]:
    """Attach the report in an experiment's directory to the runs of the trials.

    The runs also get rounds that they lack.

    Returns:
        A line for each tracker, which says what was attached or why nothing was.

    Raises:
        ExperimentError: The experiment cannot be read.
    """
    experiment = read_experiment(directory.absolute())
    baseline = recorded_baseline(experiment.description)
    comparison = compare(experiment.trials, experiment.not_begun, baseline)
    return attach(experiment, comparison, trackers, directory.absolute().name)


def attach(
    experiment: ExperimentRecord, comparison: Comparison, trackers: Sequence[str], name: str
) -> list[str]:
    """Attach the report of an experiment that has been read and compared. See `attach_report`.

    Args:
        experiment: The experiment.
        comparison: The comparison of its arms.
        trackers: Names of the trackers.
        name: Name under which the trackers group the runs.
    """
    directory = experiment.directory
    plots = sorted((directory / "plots").glob("*.png"))
    files = [directory / "report.html", directory / "report.json", *plots]
    report = {path.relative_to(directory).as_posix(): path for path in files if path.is_file()}
    trials = [trial for trial in experiment.trials if trial.rows]
    with tempfile.TemporaryDirectory() as temporary:
        table = report["table.csv"] = Path(temporary, "table.csv")
        with table.open("w", newline="") as file:
            csv.writer(file).writerows([comparison.header, *comparison.rows()])
        return [_attach(tracker, report, trials, name) for tracker in trackers]


def _attach(
    tracker: str, report: Mapping[str, Path], trials: Sequence[TrialRecord], name: str
) -> str:
    try:
        refuse_unusable(tracker)
        for trial in trials:
            _attach_to(tracker, report, trial, name)
    except Exception as error:  # a failed tracker does not change how the trials ended
        return f"{tracker}: the report could not be attached ({without_secrets(error)})"
    return f"{tracker}: the report is attached to {plural(len(trials), 'run')}"


def _attach_to(tracker: str, report: Mapping[str, Path], trial: TrialRecord, name: str) -> None:
    rows = list(read_rows(trial.directory / EXPR_RESULT_FILE))
    described = TrackedTrial(
        experiment=name,
        directory=trial.name,
        name=trial.label,
        settings=rows[-1]["config"],
    )
    run = open_run(tracker, described)
    try:
        send_rows(run, rows)
        run.attach(report)
    finally:
        run.close(_state(trial))


def _state(trial: TrialRecord) -> State:
    if trial.done:
        return "finished"
    return "failed" if trial.failed else "interrupted"
