"""Send each round of every trial to a tracker, exactly once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

from callbacks.fail_safe import FailSafeCallback
from callbacks.result_files import full_row
from callbacks.trackers.tracked_run import (
    State,
    TrackedRun,
    TrackedTrial,
    open_run,
    send_rows,
    without_secrets,
)
from callbacks.trial_files import continued_file, label, read_rows
from grpo_trainable.storage.ray_private import EXPR_RESULT_FILE

SHARE = 0.1  # training waits for a tracker during at most this share of the time
LONGEST_S = 1.0  # after sending for this long, the callback waits for the next row


class TrackerCallback(FailSafeCallback):
    """Sends each round of a trial to a tracker, exactly once.

    A trial has one run in the tracker, even if the trial is resumed. The tracker may lack earlier
    rounds, because the command was killed before they were sent, or because the tracker was slow or
    failed. The callback reads such rounds from `result.json`, so it comes after the callback that
    writes that file. A repeated round that the tracker already has is not sent, because no tracker
    can replace a round.

    Training waits while the callback calls the tracker. The longer a call takes, the longer the
    callback pauses before the next one.
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
        self._tracker, self._experiment = tracker, experiment
        self._open_run, self._clock = open_run, clock
        self._runs: dict[str, TrackedRun] = {}  # trial id -> its run, while the run is open
        self._failing: set[str] = set()  # ids of trials whose last call to the tracker failed
        self._pause_until = 0.0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_runs": {}, "_failing": set(), "_pause_until": 0.0}

    def on_trial_result(
        self, iteration: int, trials: list, trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        """Send the tracker all missing rounds up to this one, except during a pause."""
        began = self._clock()
        if began < self._pause_until:
            return
        row = full_row(result)
        with self._errors_printed(trial):
            run = self._run(trial, row)
            # A successful opening does not lengthen the pause, because the run stays open.
            began = self._clock()
            lacks_more = row["training_iteration"] > run.next_round
            rows = [*_rows(trial), row] if lacks_more else [row]
            send_rows(run, takewhile(lambda _: self._clock() < began + LONGEST_S, rows))
        now = self._clock()
        self._pause_until = now + (now - began) / SHARE

    def on_trial_complete(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        """Send all rounds that the tracker lacks, and close the run."""
        self._finish(trial, "finished")

    def on_trial_error(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        """Send all rounds that the tracker lacks, and close the run."""
        self._finish(trial, "failed")

    def on_experiment_end(self, trials: list, **info: Any) -> None:
        """Send all rounds of trials that have not ended, and close their runs."""
        for trial in trials:
            if trial.trial_id in self._runs:
                self._finish(trial, "interrupted")

    def _finish(self, trial: Any, state: State) -> None:
        with self._errors_printed(trial):
            rows = list(_rows(trial))
            if not rows:
                return
            run = self._run(trial, rows[-1])
            del self._runs[trial.trial_id]
            try:
                send_rows(run, rows)
            finally:
                run.close(state)

    def _run(self, trial: Any, row: Mapping[str, Any]) -> TrackedRun:
        if trial.trial_id not in self._runs:
            self._runs[trial.trial_id] = self._open_run(
                self._tracker,
                TrackedTrial(
                    experiment=self._experiment or Path(trial.path).parent.name,
                    directory=Path(trial.path).name,
                    name=label(trial),
                    settings=row["config"],
                ),
            )
        return self._runs[trial.trial_id]

    @contextmanager
    def _errors_printed(self, trial: Any) -> Iterator[None]:
        """Print the first error of a trial's tracker, and a line once the tracker works again."""
        try:
            yield
        except Exception as error:  # a tracker never ends a trial
            # Open the run again, because the tracker may have stored the round despite the error.
            self._runs.pop(trial.trial_id, None)
            if trial.trial_id not in self._failing:
                self._failing.add(trial.trial_id)
                said = f"{self._tracker} fails ({without_secrets(error)})"
                print(f"{label(trial)}: {said}; rounds will be sent later", flush=True)
        else:
            if trial.trial_id in self._failing:
                self._failing.remove(trial.trial_id)
                print(f"{label(trial)}: {self._tracker} works again", flush=True)


def _rows(trial: Any) -> Iterable[Mapping[str, Any]]:
    return read_rows(continued_file(trial, EXPR_RESULT_FILE))
