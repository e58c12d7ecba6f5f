"""Track checkpoints that trials have removed or could not write."""

from __future__ import annotations

from typing import Any

from callbacks.fail_safe import FailSafeCallback
from callbacks.trial_files import label
from grpo_trainable.storage.object_store import AnyPath
from grpo_trainable.storage.trial_storage import path_on


class CheckpointCallback(FailSafeCallback):
    """Makes Tune forget checkpoints that trials have removed.

    At the end of the experiment, the callback prints which trials could not write their last
    checkpoint. The callback does not decide which checkpoint a trial continues from: the trial does
    (`TrialStorage.go_on`).
    """

    def __init__(self) -> None:
        self._written: set[str] = set()  # ids of trials whose current save wrote a checkpoint
        self._unwritten: dict[str, str] = {}  # trial id -> label, for trials whose last save failed

    def on_checkpoint(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        """Record that the current save wrote a checkpoint. Make Tune forget removed checkpoints."""
        self._written.add(trial.trial_id)
        forget_missing(trial.run_metadata.checkpoint_manager)

    def on_trial_save(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        """Record whether the save that has just ended wrote a checkpoint."""
        # Tune calls `on_checkpoint` first, and only if a checkpoint was written.
        if trial.trial_id in self._written:
            self._written.remove(trial.trial_id)
            self._unwritten.pop(trial.trial_id, None)
        else:
            self._unwritten[trial.trial_id] = label(trial)

    def on_experiment_end(self, trials: list, **info: Any) -> None:
        """Print a line for each trial whose last checkpoint could not be written."""
        # A trial reports a failed save with its next row. After the last save, no row follows.
        for name in self._unwritten.values():
            print(f"{name}: its last checkpoint could not be written; the previous one remains")


def forget_missing(manager: Any) -> None:
    """Make Tune forget checkpoints that the trial has removed."""
    manager._checkpoint_results = [
        result
        for result in manager._checkpoint_results
        if (path := path_of(result)) is not None and path.is_dir()
    ]


def path_of(result: Any) -> AnyPath | None:
    """Return the directory of the checkpoint in Tune's `result`, or None if there is none."""
    checkpoint = getattr(result, "checkpoint", None)
    return None if checkpoint is None else path_on(checkpoint.filesystem, checkpoint.path)
