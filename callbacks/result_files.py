"""Write Tune's `result.json` and `progress.csv` so that they contain each round once.

Tune's own loggers write to Ray's session directory, and Tune copies the files from that directory
once per second. After a kill, the copies may be behind the checkpoints or cut short. In addition, a
trial that starts again from a checkpoint would write the rounds after the checkpoint a second time.
"""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

from ray.tune.logger import CSVLoggerCallback, JsonLoggerCallback
from ray.tune.utils import flatten_dict

from callbacks.round_writer import RoundWriter
from callbacks.trial_files import (
    continued_file,
    cut_lines,
    metrics_in,
    names_of,
    trial_directory,
)
from grpo_trainable.protocol.round_records import Row, details_of
from grpo_trainable.storage.atomic import append, replacing
from grpo_trainable.storage.ray_private import (
    EXPR_PROGRESS_FILE,
    EXPR_RESULT_FILE,
    SafeFallbackEncoder,
)


def full_row(result: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a row, with all settings that the trial uses.

    A report reads the settings from the row, because defaults may depend on a model that the
    report's machine does not have.
    """
    details = details_of(result)
    return dict(result) if details is None else {**result, "config": details.config}


class ResultJsonCallback(RoundWriter, JsonLoggerCallback):
    """Writes `result.json`.

    Tune keeps the last row of each trial. After a step of Tune, no callback needs the details of a
    row any more, so this callback removes the details from memory.
    """

    def __init__(self) -> None:
        RoundWriter.__init__(self)
        JsonLoggerCallback.__init__(self)

    def on_trial_start(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        """Write the trial's config to params.json."""
        super().on_trial_start(iteration=iteration, trials=trials, trial=trial, **info)
        trial.init_local_path()
        self.update_config(trial, trial.config)

    def content(self, result: dict[str, Any]) -> Any:
        """Return a copy of the row, with all settings that the trial uses."""
        return full_row(result)

    def on_step_end(self, iteration: int, trials: list, **info: Any) -> None:
        """Remove the details from the rows that Tune keeps."""
        for trial in trials:
            if isinstance(trial.last_result, Row):
                trial.last_result.details = None

    def cut(self, trial: Any, last: int) -> None:
        """Remove the rows after round `last`."""
        path = continued_file(trial, EXPR_RESULT_FILE)
        cut_lines(path, last, lambda line: _iteration(json.loads(line)))

    def write(self, trial: Any, iteration: int, content: Any) -> None:
        """Append the row as one line of JSON."""
        line = json.dumps(content, cls=SafeFallbackEncoder) + "\n"
        append(trial_directory(trial) / EXPR_RESULT_FILE, line.encode())


class ProgressCsvCallback(RoundWriter, CSVLoggerCallback):
    """Writes `progress.csv` with a column for every metric, even for those not in the first row.

    If the first round trains on nothing, its row lacks most metrics. When an environment
    or the user's code reports a new number, the file gets another column at the end.
    """

    def __init__(self) -> None:
        RoundWriter.__init__(self)
        CSVLoggerCallback.__init__(self)
        self._headers: dict[str, list[str]] = {}  # trial id -> columns; empty if there is no header

    def content(self, result: dict[str, Any]) -> Any:
        """Return the row without the config."""
        return {k: v for k, v in result.items() if k != "config"}

    def cut(self, trial: Any, last: int) -> None:
        """Remove the rows after round `last`."""
        path = continued_file(trial, EXPR_PROGRESS_FILE)
        header = _header(path)

        def iteration(line: bytes) -> int | None:
            values = next(csv.reader([line.decode()]))
            return None if values == header else _iteration(dict(zip(header, values, strict=True)))

        cut_lines(path, last, iteration)
        # Read the header again, because `cut_lines` removes a truncated header.
        self._headers[trial.trial_id] = _header(path)

    def write(self, trial: Any, iteration: int, content: Any) -> None:
        """Append the row. If the file has no header yet, write one first."""
        row = flatten_dict({**dict.fromkeys(sorted(names_of(trial))), **content}, delimiter="/")
        path, header = trial_directory(trial) / EXPR_PROGRESS_FILE, self._headers[trial.trial_id]
        new = [name for name in metrics_in(content) if name not in header]
        if header and new:
            header = self._headers[trial.trial_id] = _add_columns(path, new)
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, header or list(row), extrasaction="ignore")
        if not header:
            writer.writeheader()
        writer.writerow(row)
        append(path, text.getvalue().encode())
        self._headers[trial.trial_id] = list(writer.fieldnames)


def _header(path: Path) -> list[str]:
    """Return the columns of a CSV file. A missing or empty file has no columns."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return next(csv.reader(file), [])


def _add_columns(path: Path, names: list[str]) -> list[str]:
    """Append empty columns to a CSV file, and return the names of all columns."""
    text = io.StringIO(newline="")
    with path.open(newline="") as file:
        header, *rows = csv.reader(file)
    csv.writer(text).writerows([[*header, *names], *([*row, *([""] * len(names))] for row in rows)])
    with replacing(path) as file:
        file.write(text.getvalue().encode())
    return [*header, *names]


def _iteration(row: dict[str, Any]) -> int:
    return int(row["training_iteration"])
