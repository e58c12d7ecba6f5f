"""Read a policy from a trial's checkpoint, with the checks that a resume makes."""

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
    """The policy in a trial's checkpoint, with the trial's config."""

    directory: AnyPath
    config: GRPOConfig  # config of the trial
    inputs: Mapping[str, str]  # config key -> SHA-256 of the file that the trial read
    tensors: Mapping[str, Tensor]
    version: int  # gradient steps taken
    round: int  # number of training rounds completed


def read_trained_policy(directory: AnyPath) -> TrainedPolicy:
    """Read the policy of a checkpoint, or of the last checkpoint in a trial's directory.

    A damaged last checkpoint is an error: an older policy must not be evaluated silently.

    Raises:
        CheckpointError: If there is no checkpoint, or if the checkpoint is damaged, comes from
            another program or has a different format. The message is one line.
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
