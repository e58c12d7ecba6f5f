"""Keep Tune's record of a trial up to date: its checkpoints and, after a kill, its last row."""

from __future__ import annotations

from typing import Any

from ray.tune.result import DONE

from callbacks.fail_safe import FailSafeCallback
from callbacks.trial_files import label, trial_path
from grpo_trainable.storage.checkpointing import newest_checkpoint, unverified_round
from grpo_trainable.storage.object_store import AnyPath, StoredPath
from grpo_trainable.storage.ray_private import (
    EXPR_RESULT_FILE,
    TRAINING_ITERATION,
    _TrainingResult,
)
from grpo_trainable.storage.trial_storage import (
    checkpoint_at,
    follows_known_copy,
    last_row,
    path_on,
)


class CheckpointCallback(FailSafeCallback):
    """Makes Tune forget removed checkpoints, and gives Tune the last rows that it lacks.

    At the end of the experiment, the callback prints which trials could not write their last
    checkpoint. The callback does not decide which checkpoint a trial continues from: the trial does
    (`TrialStorage.go_on`).
    """

    def __init__(self) -> None:
        self._written: set[str] = set()  # ids of trials whose current save wrote a checkpoint
        self._unwritten: dict[str, str] = {}  # trial id -> label, for trials whose last save failed

    def on_trial_start(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        """Give Tune the last row and checkpoint of a trial that had ended before a kill.

        Tune's last snapshot may lack this row and this checkpoint, and no later row follows.
        Without the row, Tune would judge the trial by an earlier row, or would end the experiment
        because the metric of the search is missing. Tune restores a trial from the newest
        checkpoint that it knows, and takes over the row that belongs to this checkpoint.
        """
        directory = StoredPath(trial.storage.storage_filesystem, trial.path)
        row = last_row(directory / EXPR_RESULT_FILE)
        if row is None or not row.get(DONE):
            return
        checkpoint = newest_checkpoint(trial_path(trial))
        noted = path_of(trial.latest_checkpoint_result)
        if checkpoint is None or unverified_round(checkpoint) != row[TRAINING_ITERATION]:
            return
        # If the checkpoint follows a copy that Tune does not know, `TrialStorage.go_on` handles it.
        if checkpoint == noted or not follows_known_copy(checkpoint, noted):
            return
        row["config"] = trial.config  # as in Tune's rows; rows in the file have all settings
        trial.update_last_result(row)
        trial.on_checkpoint(_TrainingResult(checkpoint=checkpoint_at(checkpoint), metrics=row))
        forget_missing(trial.run_metadata.checkpoint_manager)

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
