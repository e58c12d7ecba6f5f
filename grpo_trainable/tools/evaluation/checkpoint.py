"""What an evaluation takes of a trial's checkpoint, which is verified as on a resume."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from grpo_trainable.config import ConfigError, GRPOConfig
from grpo_trainable.storage.checkpointing import CheckpointError, checkpoints_named, read_checkpoint

if TYPE_CHECKING:
    from grpo_trainable.storage.object_store import AnyPath


@dataclass(frozen=True, kw_only=True)
class TrainedPolicy:
    """The policy of a trial as it stood at a checkpoint, and how the trial was set."""

    directory: AnyPath
    config: GRPOConfig  # the trial's
    inputs: Mapping[str, str]  # SHA-256 by config key of the files that the trial read
    tensors: Mapping[str, Tensor]
    version: int  # gradient steps taken
    round: int  # rounds trained


def read_trained_policy(directory: AnyPath) -> TrainedPolicy:
    """The policy of the checkpoint in `directory`; of the last one where it is a trial's directory.

    The last one is not skipped where it is damaged: an older policy would be evaluated unasked.

    Raises:
        CheckpointError: there is none, or it is damaged, foreign or of another format; one line.
    """
    directory = checkpoints_named(directory)[-1]
    trial = read_checkpoint(directory)
    try:
        return TrainedPolicy(
            directory=directory,
            config=GRPOConfig.from_dict(trial.state["config"]),
            inputs=trial.state["inputs"],
            tensors=trial.policy,
            version=trial.state["learner"]["version"],
            round=trial.state["learner"]["round"],
        )
    except (LookupError, TypeError, ConfigError) as error:
        raise CheckpointError(
            f"{directory}: not a grpo_trainable checkpoint ({type(error).__name__}: {error})"
        ) from None
