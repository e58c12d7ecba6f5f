"""Keeps what Tune notes of checkpoints in agreement with those that a trial has."""

from __future__ import annotations

from typing import Any

from callbacks.fail_safe import FailSafeCallback
from callbacks.trial_files import label
from grpo_trainable.protocol.round_records import DETAILS
from grpo_trainable.storage.object_store import AnyPath
from grpo_trainable.storage.trial_storage import path_on


class CheckpointCallback(FailSafeCallback):
    """Makes Tune forget removed checkpoints, and says at the end which could not be written.

    Which checkpoint a trial goes on from is for the trial to say (`TrialStorage.go_on`).
    """

    def __init__(self) -> None:
        self._written: set[str] = set()  # trials whose present save wrote a checkpoint, by id
        self._unwritten: dict[str, str] = {}  # trials whose last save did not, by id

    def on_checkpoint(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        self._written.add(trial.trial_id)
        forget_missing(trial.run_metadata.checkpoint_manager)

    def on_trial_save(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        # Tune calls `on_checkpoint` first, and only for a checkpoint that was written.
        if trial.trial_id in self._written:
            self._written.remove(trial.trial_id)
            self._unwritten.pop(trial.trial_id, None)
        else:
            self._unwritten[trial.trial_id] = label(trial)

    def on_experiment_end(self, trials: list, **info: Any) -> None:
        # A failure between two rows is reported with the next row; this is the last chance.
        for name in self._unwritten.values():
            print(f"{name}: its last checkpoint could not be written; the one before stays")

    def on_trial_start(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        restored = trial.latest_checkpoint_result
        if restored is not None:
            # PBT keeps a row as the Trainable gave it, and gives it to the clone.
            restored.metrics.pop(DETAILS, None)


def forget_missing(manager: Any) -> None:
    """Makes Tune forget checkpoints that the trial has removed."""
    manager._checkpoint_results = [
        result
        for result in manager._checkpoint_results
        if (path := path_of(result)) is not None and path.is_dir()
    ]


def path_of(result: Any) -> AnyPath | None:
    """Where the checkpoint that Tune has noted is; None where it has none."""
    checkpoint = getattr(result, "checkpoint", None)
    return None if checkpoint is None else path_on(checkpoint.filesystem, checkpoint.path)
