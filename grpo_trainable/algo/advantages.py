"""Rewards in, advantages out. Shapes: N groups of G responses each; `rewards` is never changed.

`ADVANTAGES` holds the built-in values of `loss.advantage`, which share their signature with a
user's own: `fn(rewards (N, G) float32, *, eps) -> (N, G) float32`. Equal rewards give exactly 0,
except with `none`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Advantage(Protocol):
    """How much better than expected each response was, (N, G), from its reward, (N, G)."""

    def __call__(self, rewards: Tensor, /, *, eps: float) -> Tensor: ...


def _deviations(rewards: Tensor) -> Tensor:
    """r − mean of its row, (N, G)."""
    # The float32 mean of equal rewards can miss them by a rounding error, which a division by
    # std + eps turns into a real advantage. Relative to the row's first reward all are exactly 0.
    shifted = rewards - rewards[:, :1]
    return shifted - shifted.mean(dim=-1, keepdim=True)


def whitened(rewards: Tensor, eps: float) -> Tensor:
    """(r − mean) / (sample std + eps), row by row, (N, G)."""
    if rewards.shape[-1] < 2:
        raise ValueError(
            f"a sample standard deviation needs at least 2 rewards, got {rewards.shape[-1]}"
        )
    return _over_std(_deviations(rewards), eps)


def _over_std(deviations: Tensor, eps: float) -> Tensor:
    """Deviations / (their sample std + eps), row by row."""
    std = deviations.std(dim=-1, keepdim=True)
    # The smallest float makes 0 / 0 a 0 when eps is 0; it is too small to change another quotient.
    return deviations / (std + eps).clamp(min=torch.finfo(std.dtype).tiny)


def raw_reward(rewards: Tensor, *, eps: float) -> Tensor:
    """The reward r itself; `eps` has no use here."""
    return rewards


def zero(rewards: Tensor, *, eps: float) -> Tensor:
    """0 for every response: only a teacher counts (`distillation`). `eps` has no use here."""
    return torch.zeros_like(rewards)


def group_std(rewards: Tensor, *, eps: float) -> Tensor:
    """(r − mean) / (sample std + eps) within each group (GRPO, DeepSeekMath arXiv 2402.03300)."""
    return whitened(rewards, eps)


def group_mean(rewards: Tensor, *, eps: float) -> Tensor:
    """r − mean of its group (Dr. GRPO, arXiv 2503.20783); `eps` has no use here."""
    return _deviations(rewards)


def rloo(rewards: Tensor, *, eps: float) -> Tensor:
    """r − mean of the *other* rewards of its group (arXiv 2402.14740); `eps` has no use here."""
    _refuse_groups_of_one(rewards, "rloo")
    group_size = rewards.shape[-1]
    return _deviations(rewards) * (group_size / (group_size - 1))


def batch(rewards: Tensor, *, eps: float) -> Tensor:
    """(r − mean) / (sample std + eps) over all groups together (REINFORCE++, arXiv 2501.03262).

    A single reward is its own mean and has advantage 0; only one may be left where the others could
    not be scored.
    """
    if rewards.numel() == 1:
        return torch.zeros_like(rewards)
    return whitened(rewards.reshape(1, -1), eps).view_as(rewards)


def group_mean_batch_std(rewards: Tensor, *, eps: float) -> Tensor:
    """r − mean of its group, divided by the (sample std + eps) of these over all groups together
    (REINFORCE++-baseline, arXiv 2501.03262).

    The paper whitens over tokens, so that long responses weigh more; here a response counts once.
    """
    _refuse_groups_of_one(rewards, "group_mean_batch_std")
    # Their mean over the groups is 0 but for rounding, which would give equal rewards an advantage.
    return _over_std(_deviations(rewards).reshape(1, -1), eps).view_as(rewards)


def maxrl(rewards: Tensor, *, eps: float) -> Tensor:
    """(r − mean) / (mean + eps) within each group; 0 where all rewards are 0.

    With rewards of 0 and 1 the gradient is that of the mean log-likelihood of the right responses,
    as far as G samples tell, so hard prompts weigh more (MaxRL, arXiv 2602.02710). Equal rewards
    give 0: without a right response there is nothing to make likely.

    Raises:
        ValueError: a reward is below 0. The mean could be near 0, and the gradient all one group's.
    """
    _refuse_groups_of_one(rewards, "maxrl")
    if (rewards < 0).any():
        lowest = rewards.min().item()
        raise ValueError(f"maxrl needs rewards of 0 and above, got {lowest:.3g}")
    mean = rewards.mean(dim=-1, keepdim=True)
    return torch.where(mean > 0, _deviations(rewards) / (mean + eps), 0.0)


def _refuse_groups_of_one(rewards: Tensor, name: str) -> None:
    if rewards.shape[-1] < 2:
        raise ValueError(f"{name} needs groups of at least 2 responses, got {rewards.shape[-1]}")


ADVANTAGES: dict[str, Advantage] = {
    "none": raw_reward,
    "group_std": group_std,
    "group_mean": group_mean,
    "rloo": rloo,
    "batch": batch,
    "group_mean_batch_std": group_mean_batch_std,
    "maxrl": maxrl,
    "zero": zero,
}


def compute_group_normalized_rewards(
    reward_fn: Callable[[str, Any], Mapping[str, float]],
    rollout_responses: Sequence[str],
    repeated_ground_truths: Sequence[Any],
    group_size: int,
    advantage_eps: float,
    normalize_by_std: bool,
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Advantages (N,), raw rewards (N,), both float32, and statistics of the N responses.

    Consecutive runs of `group_size` responses are one group: `group_std` when `normalize_by_std`,
    else `group_mean`. `reward_fn(response, ground_truth)` gives `reward`, `format_reward` and
    `answer_reward`. ValueError when N is 0, no multiple of `group_size`, or not the number of
    ground truths, and for a group of one when `normalize_by_std`.
    """
    num_responses = len(rollout_responses)
    if num_responses != len(repeated_ground_truths):
        raise ValueError(
            f"{num_responses} rollout_responses but {len(repeated_ground_truths)} "
            "repeated_ground_truths"
        )
    if group_size < 1 or num_responses == 0 or num_responses % group_size != 0:
        raise ValueError(
            f"{num_responses} rollout_responses do not make groups of group_size={group_size}"
        )
    scores = [
        reward_fn(response, truth)
        for response, truth in zip(rollout_responses, repeated_ground_truths, strict=True)
    ]
    columns = torch.tensor(
        [[score[key] for score in scores] for key in ("reward", "format_reward", "answer_reward")],
        dtype=torch.float32,
    )
    raw_rewards, format_rewards, answer_rewards = columns.unbind()
    normalize = group_std if normalize_by_std else group_mean
    advantages = normalize(raw_rewards.view(-1, group_size), eps=advantage_eps).flatten()
    metadata = {
        "reward_mean": raw_rewards.mean().item(),
        "reward_std": raw_rewards.std().item() if num_responses > 1 else 0.0,
        "reward_min": raw_rewards.min().item(),
        "reward_max": raw_rewards.max().item(),
        "format_reward_mean": format_rewards.mean().item(),
        "answer_reward_mean": answer_rewards.mean().item(),
    }
    return advantages, raw_rewards, metadata
