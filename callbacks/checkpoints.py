"""Starts each trial from its newest whole checkpoint."""

from __future__ import annotations

import math
from typing import Any

from ray.air.constants import EXPR_RESULT_FILE
from ray.train._internal.session import _TrainingResult

from callbacks.fail_safe import FailSafeCallback
from callbacks.trial_files import continued_file, is_local, label, read_rows, trial_place
from grpo_trainable.checkpointing import (
    CheckpointError,
    checkpoint_round,
    newest_whole,
    numbered_checkpoints,
)
from grpo_trainable.details import DETAILS
from grpo_trainable.storage import Place
from grpo_trainable.trial_storage import checkpoint_at, place


class CheckpointFallback(FailSafeCallback):
    """Replaces a torn or missing checkpoint before Tune restores it. It must come before the other
    callbacks, which cut their files to the checkpoint it chooses.

    Tune starts a trial from the newest checkpoint that it has noted. It copies checkpoints file by
    file, notes them in snapshots, which come late to a slow store, and has no other choice when the
    one it noted is torn or gone: the trial fails. Here the newest whole checkpoint in the trial's
    directory takes its place, and one line says so.

    In an object store the files of a round come after its checkpoint, so that after a kill there
    may be a checkpoint without them: an earlier one takes its place as well.
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
        manager = trial.run_metadata.checkpoint_manager
        noted = manager.latest_checkpoint_result
        last = math.inf if is_local(trial) else last_round(trial)
        noted_at = place_of(noted)
        problem = "no checkpoint was noted" if noted_at is None else damage(noted_at, last)
        if problem is None and not may_be_superseded(noted_at, trial_place(trial)):
            return
        whole = newest_whole(trial_place(trial), last)
        if problem is None:
            assert noted_at is not None
            if whole is None or whole[0].name == noted_at.name:
                return
            problem = f"{noted_at.name} is not the newest"
        if noted is None and whole is None:
            return  # a trial that starts for the first time
        instead = None if whole is None else training_result(trial, *whole)
        # Tune has no public way to say this.
        manager._latest_checkpoint_result = instead
        manager._checkpoint_results = [r for r in manager._checkpoint_results if r is not noted]
        forget_missing(manager)
        if instead is None:
            print(f"{label(trial)}: {problem}; no whole one is left, starting anew", flush=True)
            return
        assert whole is not None
        path, round_ = whole
        if path not in map(place_of, manager._checkpoint_results):
            manager._checkpoint_results.append(instead)
        print(f"{label(trial)}: {problem}; going on from {path.name} (round {round_})", flush=True)


def forget_missing(manager: Any) -> None:
    """Makes Tune forget checkpoints that the trial has removed."""
    manager._checkpoint_results = [
        result
        for result in manager._checkpoint_results
        if (path := place_of(result)) is not None and path.is_dir()
    ]


def place_of(result: Any) -> Place | None:
    """Where the checkpoint that Tune has noted is; None where it has none."""
    checkpoint = getattr(result, "checkpoint", None)
    return None if checkpoint is None else place(checkpoint.filesystem, checkpoint.path)


def last_round(trial: Any) -> int:
    """The last round that the trial's files have; 0 without any."""
    rows = read_rows(continued_file(trial, EXPR_RESULT_FILE))
    return max((row["training_iteration"] for row in rows), default=0)


def damage(path: Place, last: float = math.inf) -> str | None:
    """What is wrong with a checkpoint, in one line; None when it is whole, and of round `last` or
    an earlier one."""
    try:
        round_ = checkpoint_round(path)
    except CheckpointError as error:
        return str(error).removeprefix(str(path).removesuffix(path.name))
    if round_ > last:
        return f"{path.name} is of round {round_}, the files of the trial end with round {last:g}"
    return None


def may_be_superseded(noted_at: Place | None, directory: Place) -> bool:
    """Return True if a trial has a checkpoint that Tune's last snapshot did not know yet.

    One of another trial, as under PBT, is where Tune means to go on from.
    """
    if noted_at is None or str(directory / noted_at.name) != str(noted_at):
        return False
    return any(path.name > noted_at.name for path in numbered_checkpoints(directory))


def training_result(trial: Any, path: Place, round_: int) -> _TrainingResult:
    """A checkpoint with the row of its round, from which Tune goes on counting."""
    metrics: dict[str, Any] = {"training_iteration": round_}
    for row in read_rows(continued_file(trial, EXPR_RESULT_FILE)):
        if row["training_iteration"] == round_:
            metrics = row
    return _TrainingResult(checkpoint=checkpoint_at(path), metrics=metrics)
