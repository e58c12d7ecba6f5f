"""The run of a trial in a tracker, and the names of the trackers."""

from __future__ import annotations

import hashlib
import importlib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from callbacks.trial_files import metrics_in
from grpo_trainable.plugins import missing_library, one_line

PROJECT = "grpo-trainable"  # default name of the project
LONGEST_NAME = 128  # the limit of W&B

# Each tracker has the name of its library and of the extra that installs the library.
TRACKERS = ("wandb", "mlflow", "trackio")

State: TypeAlias = Literal["finished", "failed", "interrupted"]


def clean(name: str) -> str:
    """Return a name that every tracker accepts: short, and without special characters."""
    text = re.sub(r"[^\w.-]", "-", name, flags=re.ASCII)
    if len(text) <= LONGEST_NAME:
        return text
    return f"{text[: LONGEST_NAME - 33]}-{hashlib.sha256(name.encode()).hexdigest()[:32]}"


class TrackerError(ValueError):
    """A tracker cannot be used; the message gives the reason in one line."""


@dataclass(frozen=True, kw_only=True)
class TrackedTrial:
    """The trial data that identify and describe its run in a tracker."""

    experiment: str
    directory: str  # name of the trial's directory
    name: str  # name of the trial in messages
    settings: Mapping[str, Any]  # all settings of the trial, nested

    @property
    def id(self) -> str:
        """Return the id of the trial's run, which stays the same after a resume."""
        return clean(f"{self.experiment}-{self.directory}")


class TrackedRun(Protocol):
    """The run of a trial in a tracker.

    A tracker may lose the last rounds if the process is killed, but no round before them. So
    `next_round` alone shows which rounds the tracker has.
    """

    next_round: int  # the first round that the tracker lacks

    def __init__(self, trial: TrackedTrial) -> None:
        """Open the trial's run, or create the run if the tracker does not have it yet."""
        ...

    def log(self, round_: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a round, which must not be before `next_round`."""
        ...

    def attach(self, report: Mapping[str, Path]) -> None:
        """Attach a report, which replaces an earlier report or becomes its newer version.

        Args:
            report: Path in the tracker -> file on this machine, which has the same name.
        """
        ...

    def close(self, state: State) -> None:
        """Wait until everything has been sent, and record how the trial ended."""
        ...


def refuse_unusable(tracker: str) -> None:
    """Check that a tracker can be used on this machine.

    Raises:
        TrackerError: There is no such tracker, its library is missing, or it needs a login.
    """
    if tracker not in TRACKERS:
        raise TrackerError(f"{tracker}: no such tracker; valid: {', '.join(TRACKERS)}")
    if missing := missing_library(tracker, f"pip install -e '.[{tracker}]'"):
        raise TrackerError(f"{tracker}: {missing}")
    if tracker == "wandb":  # the other trackers need no login
        _module(tracker).check_login()


def open_run(tracker: str, trial: TrackedTrial) -> TrackedRun:
    """Open the run of a trial in a tracker."""
    return _module(tracker).Run(trial)


def _module(tracker: str) -> Any:
    return importlib.import_module(f"callbacks.trackers.{tracker}_run")


def send_rows(run: TrackedRun, rows: Iterable[Mapping[str, Any]]) -> None:
    """Send the rows that the tracker lacks, in order."""
    for row in rows:
        if row["training_iteration"] >= run.next_round:
            run.log(row["training_iteration"], metrics_of(row))


def metrics_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite metrics of a row by name."""
    return {name: value for name, value in metrics_in(row).items() if math.isfinite(value)}


def without_secrets(error: Exception) -> str:
    """Return an error as one line, without the passwords and tokens in its URLs."""
    return re.sub(r"(?<=://)[^/@\s]+@|(?<=token=)[^&\s'\")]+", "…", one_line(error))
