"""A complete checkpoint written by one process, in the form that a trial and its learners write."""

from __future__ import annotations

from pathlib import Path

from grpo_trainable.storage.checkpointing import (
    TrialState,
    begun,
    finish_checkpoint,
    write_learner_files,
)


def write_checkpoint(directory: str | Path, trial: TrialState) -> None:
    """Write a checkpoint; raise OSError when the directory is not writable."""
    tensors = {"policy": trial.policy, "optimizer": trial.optimizer}
    with begun(directory) as proof:
        files = write_learner_files(str(directory), proof, tensors, {})
    finish_checkpoint(directory, [files], trial.state, trial.groups)
