"""Write the report of an experiment: the page, its figures as JSON, and its plots."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from reports import experiment_files
from reports.answers import answer
from reports.audit import audit_arms
from reports.document import NO_MATPLOTLIB
from reports.every_pair import every_pair
from reports.experiment import ExperimentError, read_experiment
from reports.menu import recorded_baseline
from reports.menu_text import menu_or_reason
from reports.page import render_page
from reports.parquet_reader import TrialFiles, read_all
from reports.records import ExperimentRecord, TrialRecord
from reports.report_data import report_data
from reports.summary import Comparison, compare
from reports.verdicts import before_and_after, quantities, short_answer, verdicts

if TYPE_CHECKING:
    from reports.canvas import Plot, Section


logger = logging.getLogger(__name__)


class ReportError(ValueError):
    """No report can be written; the message gives the reason in one line."""


def write_report(directory: Path, warn: Callable[[str], object] = logger.warning) -> Path:
    """Write the page, its plots and report.json.

    Args:
        directory: The directory of the experiment.
        warn: Called with one line for each damaged file. By default, the line is logged.

    Returns:
        The path of the page.

    Raises:
        ReportError: There is no experiment, no trial has a row yet, matplotlib is missing, or the
            page cannot be written.
    """
    try:
        # The path "." has no name to show.
        experiment = read_experiment(Path(os.path.abspath(directory)))
    except ExperimentError as error:
        raise ReportError(str(error)) from None
    baseline = recorded_baseline(experiment.description)
    comparison = compare(experiment.trials, experiment.not_begun, baseline)
    return write_report_of(experiment, comparison, read_all(experiment.trials), warn)


def write_report_of(
    experiment: ExperimentRecord,
    comparison: Comparison,
    files: Mapping[str, TrialFiles],
    warn: Callable[[str], object] = logger.warning,
) -> Path:
    """Write the report of an experiment that has been read and compared. See `write_report`."""
    directory = experiment.directory
    damaged = [*experiment.problems, *(p for t in experiment.trials for p in t.problems)]
    if not experiment.arms:
        raise ReportError(f"{directory}: {_why_no_row(experiment.trials, damaged)}")
    try:
        from reports.plots import menu_section, sections
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise ReportError(NO_MATPLOTLIB) from None
    damaged += [text for trial in experiment.trials for text in files[trial.name].damaged]
    for text in damaged:
        warn(text)
    menu, no_verdict = menu_or_reason(experiment, comparison, files, directory)
    audits = audit_arms(experiment, files, comparison.baseline) if menu is None else menu.audits
    of_menu = [] if menu is None else [menu_section(menu, list(comparison.arms))]
    shown = sections(experiment, comparison, files)
    images = _images([*of_menu, *shown], list(comparison.arms))
    asked = answer(experiment, comparison, files)
    found = quantities(experiment, comparison, files)
    short = short_answer(found, comparison) or before_and_after(experiment, files)
    told = verdicts(found, comparison, has_menu=menu is not None)
    pairs = every_pair(experiment, comparison, files)
    data = report_data(
        *(experiment, comparison, asked, found, pairs, short, told, damaged, audits),
        menu=menu,
        no_verdict=no_verdict,
    )
    page = render_page(
        *(experiment, comparison, asked, files, shown, images, damaged, short, told, pairs, audits),
        menu=menu,
        menu_plots=of_menu,
        no_verdict=no_verdict,
    )
    try:
        _write_plots(directory, [*of_menu, *shown], images)
        _write_text(directory, "report.json", json.dumps(data, indent=1, allow_nan=False) + "\n")
        _write_text(directory, "report.html", page)
    except OSError as error:
        raise ReportError(f"{directory}: cannot write the report ({error.strerror})") from None
    return directory / "report.html"


def _why_no_row(trials: Sequence[TrialRecord], damaged: Sequence[str]) -> str:
    """Return the reason why no trial of an experiment has a row."""
    if trials and all(trial.failed for trial in trials):
        first = trials[0]
        return f"every trial failed before its first round ended; {first.label}: {first.error}"
    why = f" ({damaged[0]})" if damaged else ""
    return f"no trial has finished a round yet{why}"


def _drawn(sections: Iterable[Section]) -> list[Plot]:
    return [plot for section in sections for plot in section.plots if plot.missing is None]


def _images(sections: Iterable[Section], arms: Sequence[str]) -> dict[str, bytes]:
    """Return the pictures from `render_all`, plus a legend for use outside the page."""
    from reports.canvas import LIGHT, render_all, render_legend

    images = render_all(_drawn(sections), files=True)
    return {**images, "legend-file": render_legend(arms, LIGHT)}


def _write_plots(directory: Path, sections: Sequence[Section], images: Mapping[str, bytes]) -> None:
    """Write the pictures, and remove old pictures that this report does not draw.

    Raises:
        OSError: The experiment's directory is not writable, or a path in it is a link.
    """
    experiment_files.make_directory(directory, "plots")
    for name in (*(plot.name for plot in _drawn(sections)), "legend"):
        content = images[f"{name}-file"]
        experiment_files.write(directory, "plots", f"{name}.png", content=content)
    missing = {f"{plot.name}.png" for section in sections for plot in section.plots if plot.missing}
    for name in missing & experiment_files.entries(directory, "plots").keys():
        experiment_files.remove(directory, "plots", name)


def _write_text(directory: Path, name: str, text: str) -> None:
    experiment_files.write(directory, name, content=text.encode("utf-8", errors="replace"))
