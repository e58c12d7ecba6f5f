"""The teacher of a distillation: a frozen policy that computes log-probs of sampled tokens."""

from __future__ import annotations

import torch

from grpo_trainable.config import GRPOConfig
from grpo_trainable.learner.log_probs import Reference
from grpo_trainable.learner.ranks import ALONE, Ranks
from grpo_trainable.models.directory import check_policy, policy_tokenizer
from grpo_trainable.models.store import build_policy
from grpo_trainable.models.tokenizer import Tokenizer


def build_teacher(
    config: GRPOConfig, tokenizer: Tokenizer, device: torch.device, ranks: Ranks = ALONE
) -> Reference | None:
    """Build the configured teacher, or return None if the config names no teacher.

    The teacher's log-probs belong to the distribution from which the teacher itself would sample
    responses, at the temperature of the rollouts. The policy's log-probs are computed in the same
    way.

    Args:
        config: The trial's settings.
        tokenizer: The policy's tokenizer.
        device: The teacher's device.
        ranks: The ranks that hold the teacher and share the work of its passes.

    Raises:
        ValueError: The teacher cannot be used, or its tokens differ from the policy's. The message
            is one line.
    """
    if config.teacher is None:
        return None
    policy, own = build_policy(config.teacher, config.seed)
    _refuse_other_tokens(config, tokenizer, own)
    return Reference(config, tokenizer, device, policy.to(device), ranks)


def check_teacher(config: GRPOConfig) -> int | None:
    """Check the teacher, and return its context length in tokens, or None without a teacher.

    The checks cover everything that can be known before the trial starts.

    Raises:
        ValueError: As in `build_teacher`.
    """
    if config.teacher is None:
        return None
    try:
        shape, own = check_policy(config.teacher)
    except ValueError as error:
        raise ValueError(f"loss.teacher={error}") from None
    _refuse_other_tokens(config, policy_tokenizer(config.model), own)
    return shape.context_length


def _refuse_other_tokens(config: GRPOConfig, tokenizer: Tokenizer, teachers: Tokenizer) -> None:
    if not tokenizer.is_part_of(teachers):
        raise ValueError(
            f"loss.teacher={config.loss.teacher}: its tokenizer differs from the policy's, but the "
            "teacher must read the policy's tokens; use a teacher with the same tokenizer"
        )
