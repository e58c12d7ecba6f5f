"""From the reward of a response to what advantages are made of."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_trainable.algo import (
    at_the_end,
    k1,
    kl_penalty,
    length_deviation,
    overlong_penalty,
    weighted_parts,
)
from grpo_trainable.config import GRPOConfig
from grpo_trainable.protocol.rollout import RolloutGroup


def shaped_rewards(config: GRPOConfig, group: RolloutGroup, kl_coefficient: float) -> Tensor:
    """The rewards of a group, (G,), or its weighted parts, less what its settings take off them:
    the KL to the reference, `kl_coefficient` times, and what is too long, or of another length than
    was wanted."""
    rewards, rollout, task = _rewards(config, group), config.rollout, config.task
    sampled = group.response_mask.sum(dim=1)
    if kl_coefficient > 0:
        assert group.reference_log_probs is not None, "the round begins with the reference's pass"
        rewards = rewards - kl_coefficient * kl_penalty(
            group.behaviour_log_probs, group.reference_log_probs, group.response_mask
        )
    if rollout.overlong == "penalty":
        rewards = rewards - rollout.overlong_penalty * overlong_penalty(
            group.extents, rollout.max_new_tokens, config.overlong_buffer
        )
    if task.length_penalty > 0:
        assert task.length_target is not None, "checked with the config"
        rewards = rewards - task.length_penalty * length_deviation(sampled, task.length_target)
    return rewards


def _rewards(config: GRPOConfig, group: RolloutGroup) -> Tensor:
    weights = config.task.part_weights
    if not weights:
        return group.rewards
    assert group.reward_parts is not None, "the generator keeps the parts that the config names"
    return weighted_parts(
        group.reward_parts,
        torch.tensor(list(weights.values())),
        normalize=config.task.normalize_parts,
        eps=config.loss.advantage_eps,
    )


def _earned(config: GRPOConfig, group: RolloutGroup) -> Tensor:
    """(G, R): what each action adds to the reward of its episode, at its last token; nothing where
    responses are not played, or the reward is made of parts."""
    if group.turn_rewards is None or config.task.part_weights:
        return torch.zeros(group.response_mask.shape)
    ended = ~group.turn_rewards.isnan()
    discount = 1.0 if config.model.env is not None else config.env.discount
    turn = ended.cumsum(dim=1) - 1
    return torch.where(ended, discount**turn * group.turn_rewards, 0.0)


def token_rewards(config: GRPOConfig, group: RolloutGroup, kl_coefficient: float) -> Tensor:
    """The same for each token, (G, R): each answers for its own KL, the last of an action for what
    that earned, and the last of a response for all else."""
    rewards, mask = shaped_rewards(config, group, 0.0), group.response_mask
    earned = _earned(config, group)
    rewards = at_the_end(rewards - earned.sum(dim=1), mask) + earned
    if kl_coefficient > 0:
        assert group.reference_log_probs is not None, "the round begins with the reference's pass"
        rewards = rewards - kl_coefficient * k1(
            group.behaviour_log_probs, group.reference_log_probs, group.response_mask
        )
    return rewards
