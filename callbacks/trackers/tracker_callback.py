"""Send each round of every trial to a tracker, exactly once."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from callbacks.round_writer import RoundWriter
from callbacks.trackers.tracked_run import (
    State,
    TrackedRun,
    TrackedTrial,
    open_run,
    send_rows,
)
from callbacks.trial_files import continued_file, label, read_rows
from grpo_trainable.protocol.round_records import details_of
from grpo_trainable.storage.ray_private import EXPR_RESULT_FILE

PAUSE_S = 60.0  # pause after a failure, because training waits for each call of a tracker


class TrackerCallback(RoundWriter):
    """Sends each round of a trial to a tracker, exactly once.

    A trial has one run in the tracker, even if the trial is resumed. The tracker may lack earlier
    rounds, for example because the command was killed before they were sent. The callback reads
    such rounds from `result.json`. A repeated round that the tracker already has is not sent,
    because no tracker can replace a round.

    After a failure, rounds wait in memory, and the callback pauses before it tries again.
    """

    def __init__(
        self,
        tracker: str,
        experiment: str | None = None,
        *,
        open_run: Callable[[str, TrackedTrial], TrackedRun] = open_run,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare to send rounds.

        Args:
            tracker: Name of the tracker.
            experiment: Name under which the tracker groups the runs. By default, the name of the
                directory that contains the directories of the trials.
            open_run: Opens the run of a trial in a tracker.
            clock: Returns the time in seconds.
        """
        super().__init__()
        self._tracker, self._experiment = tracker, experiment
        self._open_run, self._clock = open_run, clock
        self._runs: dict[str, TrackedRun] = {}  # trial id -> its run, while the run is open
        self._pause_until = 0.0

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_runs": {}, "_pause_until": 0.0}

    def content(self, result: dict[str, Any]) -> Any:
        """Return the row with all settings of the trial, as in `result.json`."""
        details = details_of(result)
        return dict(result) if details is None else {**result, "config": details.config}

    def cut(self, trial: Any, last: int) -> None:
        """Open the trial's run. The rounds after `last` remain in the tracker."""
        if trial.trial_id in self._runs:
            return
        _, row = self._waiting[trial.trial_id][0]
        self._runs[trial.trial_id] = self._open_run(
            self._tracker,
            TrackedTrial(
                experiment=self._experiment or Path(trial.path).parent.name,
                directory=Path(trial.path).name,
                name=label(trial),
                settings=row["config"],
            ),
        )

    def write(self, trial: Any, iteration: int, content: Any) -> None:
        """Send the rounds up to this one that the tracker lacks."""
        run = self._runs[trial.trial_id]
        if iteration > run.next_round:
            rows = read_rows(continued_file(trial, EXPR_RESULT_FILE))
            send_rows(run, (row for row in rows if row["training_iteration"] < iteration))
        send_rows(run, [content])

    def _write_waiting(self, trial: Any) -> None:
        if self._clock() < self._pause_until:
            return
        try:
            super()._write_waiting(trial)
        except Exception:
            self._pause_until = self._clock() + PAUSE_S
            raise

    def on_trial_complete(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        """Send waiting rounds, and close the run."""
        self._finish(trial, "finished")

    def on_trial_error(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        """Send waiting rounds, and close the run."""
        self._finish(trial, "failed")

    def on_experiment_end(self, trials: list, **info: Any) -> None:
        """Send waiting rounds, and close the runs of trials that have not ended."""
        with ExitStack() as stack:  # a failure must not keep the other runs open
            for trial in trials:
                stack.callback(self._finish, trial, "interrupted")

    def _finish(self, trial: Any, state: State) -> None:
        self._pause_until = 0.0
        try:
            self._try_again(trial)
        finally:
            run = self._runs.pop(trial.trial_id, None)
            if run is not None:
                run.close(state)
