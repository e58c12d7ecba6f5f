"""From the reward of a response to what advantages are made of."""

from __future__ import annotations

from torch import Tensor

from grpo_trainable.algo import (
    at_the_end,
    k1,
    kl_penalty,
    length_deviation,
    overlong_penalty,
)
from grpo_trainable.config import GRPOConfig
from grpo_trainable.rollout import RolloutGroup


def shaped_rewards(config: GRPOConfig, group: RolloutGroup, kl_coefficient: float) -> Tensor:
    """The rewards of a group, (G,), less what its settings take off them: the KL to the reference,
    `kl_coefficient` times, and what is too long, or of another length than was wanted."""
    rewards, rollout, task = group.rewards, config.rollout, config.task
    lengths = group.response_mask.sum(dim=1)
    if kl_coefficient > 0:
        assert group.reference_log_probs is not None, "the round begins with the reference's pass"
        rewards = rewards - kl_coefficient * kl_penalty(
            group.behaviour_log_probs, group.reference_log_probs, group.response_mask
        )
    if rollout.overlong == "penalty":
        rewards = rewards - rollout.overlong_penalty * overlong_penalty(
            lengths, rollout.max_new_tokens, config.overlong_buffer
        )
    if task.length_penalty > 0:
        assert task.length_target is not None, "checked with the config"
        rewards = rewards - task.length_penalty * length_deviation(lengths, task.length_target)
    return rewards


def token_rewards(config: GRPOConfig, group: RolloutGroup, kl_coefficient: float) -> Tensor:
    """The same for each token, (G, R): each answers for its own KL, the last for all else."""
    rewards = at_the_end(shaped_rewards(config, group, 0.0), group.response_mask)
    if kl_coefficient > 0:
        assert group.reference_log_probs is not None, "the round begins with the reference's pass"
        rewards = rewards - kl_coefficient * k1(
            group.behaviour_log_probs, group.reference_log_probs, group.response_mask
        )
    return rewards
