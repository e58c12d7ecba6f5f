"""End an interrupted experiment: each running trial finishes its round and saves a checkpoint."""

from __future__ import annotations

import signal
import threading
from typing import Any

from ray.tune.result import SHOULD_CHECKPOINT

from callbacks.fail_safe import FailSafeCallback

# A global, because the signal handler cannot reach the callback object: Tune creates a new object
# when it resumes an experiment. A process never runs two experiments at the same time.
requested = threading.Event()


class CheckpointOnInterrupt(FailSafeCallback):
    """Saves every trial and ends Tune, once `requested` is set.

    Every running trial saves a checkpoint with its next row. When all running trials have saved,
    the callback sends SIGUSR1, which makes Tune end.
    """

    def __init__(self) -> None:
        self._saved: set[str] = set()
        self._ended = False

    def on_trial_result(
        self, iteration: int, trials: list, trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        """Request a checkpoint with this row."""
        if requested.is_set():
            result[SHOULD_CHECKPOINT] = True

    def on_checkpoint(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        """Record that a trial has saved."""
        # `on_trial_save` would also be called for a checkpoint that could not be written.
        if requested.is_set():
            self._saved.add(trial.trial_id)

    def on_step_end(self, iteration: int, trials: list, **info: Any) -> None:
        """End Tune if all running trials have saved."""
        if not requested.is_set() or self._ended:
            return
        # A trial that is still starting has nothing new to save.
        running = [t for t in trials if t.status == "RUNNING" and t.has_reported_at_least_once]
        if all(trial.trial_id in self._saved for trial in running):
            self._ended = True
            signal.raise_signal(signal.SIGUSR1)
