"""Ends an interrupted experiment in order: each running trial finishes its round and saves."""

from __future__ import annotations

import signal
import threading
from typing import Any

from ray.tune.result import SHOULD_CHECKPOINT

from callbacks.fail_safe import FailSafeCallback

# A process has one experiment at a time, and its signal handler cannot reach a callback object:
# Tune makes a new one of it when the experiment is resumed.
requested = threading.Event()


class CheckpointOnInterrupt(FailSafeCallback):
    """Once `requested` is set, every trial saves a checkpoint with its next row; when all that run
    have saved, Tune is told to end (SIGUSR1 is its own signal for that)."""

    def __init__(self) -> None:
        self._saved: set[str] = set()
        self._ended = False

    def on_trial_result(
        self, iteration: int, trials: list, trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        if requested.is_set():
            result[SHOULD_CHECKPOINT] = True

    def on_checkpoint(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        # `on_trial_save` is also called for a checkpoint that could not be written.
        if requested.is_set():
            self._saved.add(trial.trial_id)

    def on_step_end(self, iteration: int, trials: list, **info: Any) -> None:
        if not requested.is_set() or self._ended:
            return
        # A trial that is still starting has nothing new to save.
        running = [t for t in trials if t.status == "RUNNING" and t.has_reported_at_least_once]
        if all(trial.trial_id in self._saved for trial in running):
            self._ended = True
            signal.raise_signal(signal.SIGUSR1)
