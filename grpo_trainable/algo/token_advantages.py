"""Advantages of single tokens, from what the states between them are worth.

Shapes: G responses of R tokens; all tensors are (G, R) unless said otherwise. State t is the prompt
with the first t tokens of the response, token t the action taken there: `values[:, t]` is worth
what state t is expected to earn. `mask` may have holes, which are no states; off it tensors may
hold anything, and results are 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_trainable.algo.advantages import whitened
from grpo_trainable.algo.kl import k1


def at_the_end(rewards: Tensor, mask: Tensor) -> Tensor:
    """(G, R): the reward of each response, (G,), at its last token; an empty one has none."""
    position = torch.arange(mask.shape[1], device=mask.device)
    last = (mask * (position + 1)).amax(dim=1, keepdim=True) - 1  # −1 for an empty response
    return torch.where(position == last, rewards[:, None], 0.0)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> Tensor:
    """Σ (γλ)^l δ of the tokens l after this one, δ = r + γ·V(next state) − V(this state).

    Generalised advantage estimation (arXiv 1506.02438, equation 16). What follows the last token is
    worth 0, whether or not the response was cut off there. λ = 1 gives the discounted return less
    the value, λ = 0 gives δ.
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
    """Σ γ^l r of this token and those after it."""
    return gae(rewards, torch.zeros_like(rewards), mask, gamma=gamma, lam=1.0)


def group_to_go(rewards: Tensor, mask: Tensor, *, gamma: float) -> Tensor:
    """What a step's return from here on, Σ γ^l r, has over the mean of its group's at this step.

    A group-relative advantage for episodes whose steps stand side by side: an episode that has
    ended earns nothing more, and counts as 0. With a reward at the last step alone and equal
    lengths it is `group_mean`.

    Raises:
        ValueError: a group of one.
    """
    if len(rewards) < 2:
        raise ValueError(f"group_to_go needs groups of at least 2 episodes, got {len(rewards)}")
    returns = discounted_returns(rewards, mask, gamma=gamma)
    return torch.where(mask, returns - returns.mean(dim=0), 0.0)


def vine(rewards: Tensor, state_values: Tensor, mask: Tensor) -> Tensor:
    """V(next valued state) − V(the last one up to here); the reward (G,) stands for what follows
    the last valued state (VinePPO, arXiv 2410.01679, equation 8, without discount).

    `state_values` is NaN where the state was not valued; the first state of a response must have
    been. All tokens between two valued states share the advantage.
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
    """(A − mean) / (sample std + eps) over all tokens of all groups together, (G, R) for each.

    Equal advantages give exactly 0, and so does a single token, which is its own mean.
    """
    tokens = torch.cat([a[mask] for a, mask in zip(advantages, masks, strict=True)])
    white = whitened(tokens[None], eps)[0] if len(tokens) > 1 else torch.zeros_like(tokens)
    parts = white.split([int(mask.sum()) for mask in masks])
    return [
        torch.zeros_like(a).masked_scatter(mask, part)
        for a, mask, part in zip(advantages, masks, parts, strict=True)
    ]


# ---- Of a teacher: the reverse KL, token by token ------------------------------------------------


def teacher_advantages(
    behaviour_log_probs: Tensor, teacher_log_probs: Tensor, mask: Tensor
) -> Tensor:
    """log π_T − log b of each token, (B, S), in nats; 0 off the mask, where both may hold anything.

    π_T is the teacher and b the policy that sampled. As the advantages of a policy gradient they
    lower KL(π ‖ π_T) of the next token in the contexts that were sampled; each token answers for
    itself alone, a discount of 0. On-policy distillation, Lu and Thinking Machines
    Lab 2025, https://thinkingmachines.ai/blog/on-policy-distillation/; the reverse KL on the
    student's own samples is also the case λ = 1 of GKD (arXiv 2306.13649).
    """
    return k1(teacher_log_probs, behaviour_log_probs, mask)
