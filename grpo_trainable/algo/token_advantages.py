"""Advantages per token, computed from state values, from returns or from a teacher.

Shapes: G responses of R tokens. All tensors are (G, R) unless stated otherwise. State t is the
prompt plus the first t tokens of the response, and token t is the action taken in state t.
`values[:, t]` is the expected return from state t. `mask` may have holes: tokens that the policy
did not sample. A position in a hole is not a state. Off the mask, tensors may hold anything and
results are 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_trainable.algo.advantages import whitened
from grpo_trainable.algo.kl import k1


def at_the_end(rewards: Tensor, mask: Tensor) -> Tensor:
    """Place the reward (G,) of each response at the response's last token, (G, R).

    An empty response has no last token, so its row is all 0.
    """
    position = torch.arange(mask.shape[1], device=mask.device)
    last = (mask * (position + 1)).amax(dim=1, keepdim=True) - 1  # −1 for an empty response
    return torch.where(position == last, rewards[:, None], 0.0)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> Tensor:
    """Compute Σ_l (γλ)^l δ_{t+l} for each token t, with δ = r + γ·V(next state) − V(this state).

    Generalised advantage estimation (arXiv 1506.02438, equation 16). The state after the last token
    has value 0, even if the response was cut off. λ = 1 gives the discounted return minus the
    value, and λ = 0 gives δ.
    """
    advantages = torch.zeros_like(values)
    advantage = following = values.new_zeros(len(values))
    for t in reversed(range(values.shape[1])):
        here, value = mask[:, t], values[:, t]
        delta = rewards[:, t] + gamma * following - value
        advantage = (delta + gamma * lam * advantage).where(here, advantage)
        following = value.where(here, following)
        advantages[:, t] = advantage.where(here, 0.0)
    return advantages


def discounted_returns(rewards: Tensor, mask: Tensor, *, gamma: float) -> Tensor:
    """Compute Σ_l γ^l r_{t+l} for each token t: the return from that token on."""
    return gae(rewards, torch.zeros_like(rewards), mask, gamma=gamma, lam=1.0)


def group_to_go(rewards: Tensor, mask: Tensor, *, gamma: float) -> Tensor:
    """Return each step's return-to-go, Σ_l γ^l r_{t+l}, minus its mean over the group at that step.

    This group-relative advantage compares episodes step by step. When this mean is computed, an
    episode that has already ended counts as 0. The result equals that of `group_mean` if γ = 1, all
    lengths are equal, and only the last step of each episode has a reward.

    Raises:
        ValueError: The group has a single episode.
    """
    if len(rewards) < 2:
        raise ValueError(f"group_to_go needs groups of at least 2 episodes, got {len(rewards)}")
    returns = discounted_returns(rewards, mask, gamma=gamma)
    return torch.where(mask, returns - returns.mean(dim=0), 0.0)


def vine(rewards: Tensor, state_values: Tensor, mask: Tensor) -> Tensor:
    """Return V(next valued state) − V(latest valued state) for each token.

    The latest valued state is the token's own state or, if that has no value, the last earlier
    state with a value. If no later state has a value, the reward of the response is used instead of
    V(next valued state). All tokens between two valued states have the same advantage. VinePPO,
    arXiv 2410.01679, equation 8, without discounting.

    Args:
        rewards: Reward of each response, (G,).
        state_values: Value of each state, (G, R); NaN for states without a value. The first state
            of every response needs a value.
        mask: Tokens that the policy sampled, (G, R).
    """
    tokens = mask.shape[1]
    position = torch.arange(tokens, device=mask.device)
    valued = mask & ~state_values.isnan()
    before = torch.where(valued, position, 0).cummax(dim=1).values
    at_or_after = torch.where(valued, position, tokens).flip(1).cummin(dim=1).values.flip(1)
    after = torch.cat((at_or_after[:, 1:], torch.full_like(before[:, :1], tokens)), dim=1)
    worth = torch.cat((state_values, rewards[:, None].to(state_values.dtype)), dim=1)
    return (worth.gather(1, after) - worth.gather(1, before)).where(mask, 0.0)


def whitened_tokens(
    advantages: Sequence[Tensor], masks: Sequence[Tensor], *, eps: float
) -> list[Tensor]:
    """Return (A − mean) / (sample std + eps) over the tokens of all groups, (G, R) per group.

    Equal advantages give exactly 0. If there is a single token, its result is also 0.
    """
    tokens = torch.cat([a[mask] for a, mask in zip(advantages, masks, strict=True)])
    white = whitened(tokens[None], eps)[0] if len(tokens) > 1 else torch.zeros_like(tokens)
    parts = white.split([int(mask.sum()) for mask in masks])
    return [
        torch.zeros_like(a).masked_scatter(mask, part)
        for a, mask, part in zip(advantages, masks, parts, strict=True)
    ]


# ---- Teacher: the reverse KL, token by token -----------------------------------------------------


def teacher_advantages(
    behaviour_log_probs: Tensor, teacher_log_probs: Tensor, mask: Tensor
) -> Tensor:
    """Return log π_T − log b of each token, (B, S), in nats.

    π_T is the teacher and b the policy that sampled the token. Off the mask, log-probs may hold
    anything and the result is 0. A policy gradient with these values as advantages lowers
    KL(π ‖ π_T) of the next token in the sampled contexts. Each token gets credit only for itself,
    as with a discount of 0.

    This is on-policy distillation: Lu and Thinking Machines Lab 2025,
    https://thinkingmachines.ai/blog/on-policy-distillation/. GKD (arXiv 2306.13649) includes the
    reverse KL on the student's samples as its special case λ = 1.
    """
    return k1(teacher_log_probs, behaviour_log_probs, mask)
