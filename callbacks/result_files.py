"""Writes Tune's `result.json` and `progress.csv` with each round in them once.

Tune's own loggers write to Ray's session directory, from which the files are copied whole every
second; after a kill they may be behind the checkpoints or cut short, and a trial that starts again
from a checkpoint writes the rounds after it twice.
"""

from __future__ import annotations

import csv
import json
from typing import Any

from ray.air.constants import EXPR_PROGRESS_FILE, EXPR_RESULT_FILE
from ray.tune.logger import CSVLoggerCallback, JsonLoggerCallback

from callbacks.fail_safe import FailSafeCallback
from callbacks.trial_files import (
    KEPT_BYTES,
    close,
    continued_file,
    cut_lines,
    names_of,
    restored_iteration,
)
from grpo_trainable.details import DETAILS


class ResultJsonCallback(FailSafeCallback, JsonLoggerCallback):
    """Writes `result.json`, and takes the details out of the row, so that neither this file nor
    Tune's snapshot of each trial's last row holds them. It comes after every callback that reads
    them."""

    def log_trial_start(self, trial: Any) -> None:
        close(self._trial_files.pop(trial, None))
        trial.init_local_path()
        self.update_config(trial, trial.config)
        path = continued_file(trial, EXPR_RESULT_FILE)
        cut_lines(path, restored_iteration(trial), lambda line: _iteration(json.loads(line)))
        self._trial_files[trial] = path.open("at", KEPT_BYTES)

    def log_trial_result(self, iteration: int, trial: Any, result: dict[str, Any]) -> None:
        result.pop(DETAILS, None)
        super().log_trial_result(iteration, trial, result)


class ProgressCsvCallback(FailSafeCallback, CSVLoggerCallback):
    """Writes `progress.csv` with a column for each metric besides those of its first row: a first
    round that trained on nothing lacks most metrics."""

    def _setup_trial(self, trial: Any) -> None:
        close(self._trial_files.pop(trial, None))
        path = continued_file(trial, EXPR_PROGRESS_FILE)
        header: list[str] = []
        if path.exists():
            with path.open(newline="") as file:
                header = next(csv.reader(file), [])

        def iteration(line: bytes) -> int | None:
            values = next(csv.reader([line.decode()]))
            return None if values == header else _iteration(dict(zip(header, values, strict=True)))

        cut_lines(path, restored_iteration(trial), iteration)
        if path.exists() and path.stat().st_size == 0:
            header = []  # the header was cut short
        self._trial_continue[trial] = bool(header)
        self._trial_files[trial] = path.open("at", KEPT_BYTES)
        writer = csv.DictWriter(self._trial_files[trial], header) if header else None
        self._trial_csv[trial] = writer  # pyright: ignore[reportArgumentType]  # None as Tune's own

    def log_trial_result(self, iteration: int, trial: Any, result: dict[str, Any]) -> None:
        super().log_trial_result(
            iteration, trial, {**dict.fromkeys(sorted(names_of(trial))), **result}
        )

    def log_trial_start(self, trial: Any) -> None:
        # Here and not with the first row: an old file has to be cut even if no row follows.
        self._setup_trial(trial)


def _iteration(row: dict[str, Any]) -> int:
    return int(row["training_iteration"])
