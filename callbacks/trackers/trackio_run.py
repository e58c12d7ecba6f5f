"""Send the metrics of a trial to Trackio, in a local database or on a server."""

from __future__ import annotations

import contextvars
import io
import warnings
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import trackio  # pyright: ignore[reportMissingImports]
import trackio.utils  # pyright: ignore[reportMissingImports]

from callbacks.trackers.tracked_run import PROJECT, State, TrackedTrial, clean


class Run:
    """The run of a trial in Trackio. A resumed trial finds its run by its name."""

    def __init__(self, trial: TrackedTrial) -> None:
        """Open the run.

        Raises:
            ConnectionError: Trackio cannot say which rounds the run has. Trackio itself would only
                warn, and then begin a second run with the same name.
        """
        with redirect_stdout(io.StringIO()), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            # Trackio finishes the current run when another one begins, but trials may run at the
            # same time. In an empty context, there is no current run.
            self._run: Any = contextvars.Context().run(
                trackio.init,
                PROJECT,
                name=trial.id,
                group=trial.experiment,
                config=dict(trial.settings),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        for warning in warned:
            if warning.filename == trackio.utils.__file__:
                self.close("failed")
                raise ConnectionError(str(warning.message))
        self._artifact = clean(f"report-{trial.id}")
        self.next_round: int = max(1, self._run._next_step)  # the step after the last stored one

    def log(self, round_: int, metrics: Mapping[str, float]) -> None:
        """Send a round as the step with the same number."""
        self._run.log(dict(metrics), step=round_)
        self.next_round = round_ + 1

    def attach(self, report: Mapping[str, Path]) -> None:
        """Log the report as an artifact."""
        artifact = trackio.Artifact(self._artifact, type="report")
        for name, path in report.items():
            artifact.add_file(path, name)
        self._run.log_artifact(artifact)

    def close(self, state: State) -> None:
        """Write all waiting rounds. Trackio does not record how a trial ended."""
        with redirect_stdout(io.StringIO()):
            self._run.finish()
