"""Advantages of a rollout batch, for each response or for each token.

Shapes: a group has G responses of R tokens, and a rollout batch has N responses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from grpo_trainable.algo import (
    Advantage,
    at_the_end,
    discounted_returns,
    explained_variance,
    gae,
    group_to_go,
    k1,
    kl_penalty,
    length_deviation,
    masked_row_mean,
    overlong_penalty,
    vine,
    weighted_parts,
    whitened_tokens,
)
from grpo_trainable.config import GRPOConfig
from grpo_trainable.learner.user_functions import advantage_function
from grpo_trainable.protocol.messages import CriticFigures
from grpo_trainable.protocol.rollout import RolloutGroup

Groups = Sequence[RolloutGroup]


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticTargets:
    """A critic's values and training targets on a rollout batch, (G, R) for each group."""

    values: list[Tensor]  # values of the states, computed before the round's first gradient step
    returns: list[Tensor]  # the targets that the values are trained towards: value + advantage
    # Discounted sum of the rewards after each state. It does not depend on the critic.
    earned: list[Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimated:
    """The advantages of one rollout batch."""

    # One tensor per group: (G,), or (G, R) if each token has its own advantage.
    advantages: list[Tensor]
    critic: CriticTargets | None = None  # None if there is no critic

    def of_responses(self, groups: Groups) -> Tensor:
        """Return the advantages of the responses, (N,).

        If each token has its own advantage, return the mean over each response's tokens.
        """
        rows = [
            advantages if advantages.ndim == 1 else masked_row_mean(advantages, group.response_mask)
            for group, advantages in zip(groups, self.advantages, strict=True)
        ]
        return torch.cat(rows)


# (groups of a rollout batch, weight of the KL in the reward) -> advantages of the groups
Estimator = Callable[[Groups, float], Estimated]
Values = Callable[[Groups], list[Tensor]]  # a critic's values of the states, (G, R) for each group


def advantage_estimator(config: GRPOConfig, values: Values) -> Estimator:
    """Return the estimator that `loss.advantage` names.

    Args:
        config: The trial's settings.
        values: Returns the critic's values. Called only by an estimator that needs a critic.

    Raises:
        PluginError: A user-defined function cannot be loaded or fails its test call.
    """
    match config.loss.advantage:
        case "gae":
            return partial(_by_critic, config, values)
        case "vine":
            return partial(_by_completions, config)
        case "group_to_go":
            return partial(_by_step, config)
    function = advantage_function(config.loss.advantage, config.rollout.group_size)
    return partial(_by_response, config, function)


def _by_response(
    config: GRPOConfig, function: Advantage, groups: Groups, kl_coefficient: float
) -> Estimated:
    rewards = [shaped_rewards(config, group, kl_coefficient) for group in groups]
    advantages = function(torch.stack(rewards), eps=config.loss.advantage_eps)
    return Estimated(advantages=list(advantages))


def _by_critic(
    config: GRPOConfig, values_of: Values, groups: Groups, kl_coefficient: float
) -> Estimated:
    masks, gamma = [group.response_mask for group in groups], config.loss.gamma
    rewards = [token_rewards(config, group, kl_coefficient) for group in groups]
    values = values_of(groups)
    advantages = [
        gae(r, v, mask, gamma=gamma, lam=config.loss.gae_lambda)
        for r, v, mask in zip(rewards, values, masks, strict=True)
    ]
    targets = CriticTargets(
        values=values,
        returns=[a + v for a, v in zip(advantages, values, strict=True)],
        earned=[
            discounted_returns(r, mask, gamma=gamma) for r, mask in zip(rewards, masks, strict=True)
        ],
    )
    return Estimated(advantages=_whitened(config, advantages, masks), critic=targets)


def _by_completions(config: GRPOConfig, groups: Groups, kl_coefficient: float) -> Estimated:
    masks, advantages = [group.response_mask for group in groups], []
    for group in groups:
        assert group.state_values is not None, "the generator did not estimate the values of states"
        advantages.append(vine(group.rewards, group.state_values, group.response_mask))
    return Estimated(advantages=_whitened(config, advantages, masks))


def _by_step(config: GRPOConfig, groups: Groups, kl_coefficient: float) -> Estimated:
    masks, gamma = [group.response_mask for group in groups], config.loss.gamma
    advantages = [
        group_to_go(token_rewards(config, group, kl_coefficient), mask, gamma=gamma)
        for group, mask in zip(groups, masks, strict=True)
    ]
    return Estimated(advantages=_whitened(config, advantages, masks))


def _whitened(
    config: GRPOConfig, advantages: list[Tensor], masks: Sequence[Tensor]
) -> list[Tensor]:
    if not config.loss.whiten:
        return advantages
    return whitened_tokens(advantages, masks, eps=config.loss.advantage_eps)


def critic_figures(
    batches: Sequence[Groups], estimates: Sequence[Estimated]
) -> CriticFigures | None:
    """Summarise the critic's predictions in a round. Return None if there is no critic."""
    values, returns = [], []
    for groups, estimated in zip(batches, estimates, strict=True):
        if estimated.critic is None:
            return None
        masks = [group.response_mask for group in groups]
        values += [v[mask] for v, mask in zip(estimated.critic.values, masks, strict=True)]
        returns += [v[mask] for v, mask in zip(estimated.critic.earned, masks, strict=True)]
    said, earned = torch.cat(values), torch.cat(returns)
    return CriticFigures(
        value_mean=float(said.mean()),
        return_mean=float(earned.mean()),
        explained_variance=explained_variance(said, earned),
    )


# ---- The rewards from which advantages are computed ----------------------------------------------


def shaped_rewards(config: GRPOConfig, group: RolloutGroup, kl_coefficient: float) -> Tensor:
    """Return the rewards (G,) of a group, minus penalties.

    With `task.reward_weights`, each reward is the weighted sum of its parts. The penalties are
    `kl_coefficient` times the KL to the reference, the penalty for overlong responses, and the
    penalty for deviating from the target length.
    """
    rewards, rollout, task = _rewards(config, group), config.rollout, config.task
    sampled = group.response_mask.sum(dim=1)
    if kl_coefficient > 0:
        assert group.reference_log_probs is not None, "the KL needs the reference's log-probs"
        rewards = rewards - kl_coefficient * kl_penalty(
            group.behaviour_log_probs, group.reference_log_probs, group.response_mask
        )
    if rollout.overlong == "penalty":
        rewards = rewards - rollout.overlong_penalty * overlong_penalty(
            group.extents, rollout.max_new_tokens, config.overlong_buffer
        )
    if task.length_penalty > 0:
        assert task.length_target is not None, "task.length_penalty needs task.length_target"
        rewards = rewards - task.length_penalty * length_deviation(sampled, task.length_target)
    return rewards


def _rewards(config: GRPOConfig, group: RolloutGroup) -> Tensor:
    weights = config.task.part_weights
    if not weights:
        return group.rewards
    assert group.reward_parts is not None, "the generator did not return the parts of the reward"
    return weighted_parts(
        group.reward_parts,
        torch.tensor(list(weights.values())),
        normalize=config.task.normalize_parts,
        eps=config.loss.advantage_eps,
    )


def _earned(config: GRPOConfig, group: RolloutGroup) -> Tensor:
    """Return each action's discounted reward at the action's last token, (G, R); 0 elsewhere.

    The result is 0 everywhere if the responses are not episodes, or if the reward is composed of
    parts.
    """
    if group.turn_rewards is None or config.task.part_weights:
        return torch.zeros(group.response_mask.shape)
    ended = ~group.turn_rewards.isnan()
    discount = 1.0 if config.model.env is not None else config.env.discount
    turn = ended.cumsum(dim=1) - 1
    return torch.where(ended, discount**turn * group.turn_rewards, 0.0)


def token_rewards(config: GRPOConfig, group: RolloutGroup, kl_coefficient: float) -> Tensor:
    """Distribute the shaped rewards over the tokens, (G, R).

    Each token gets its own KL penalty. The last token of an action also gets the action's reward.
    The last token of a response also gets what remains of the shaped reward.
    """
    rewards, mask = shaped_rewards(config, group, 0.0), group.response_mask
    earned = _earned(config, group)
    rewards = at_the_end(rewards - earned.sum(dim=1), mask) + earned
    if kl_coefficient > 0:
        assert group.reference_log_probs is not None, "the KL needs the reference's log-probs"
        rewards = rewards - kl_coefficient * k1(
            group.behaviour_log_probs, group.reference_log_probs, group.response_mask
        )
    return rewards
