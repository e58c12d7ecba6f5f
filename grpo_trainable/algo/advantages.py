"""Advantages from rewards. Shapes: N groups of G responses each. No function modifies `rewards`.

`ADVANTAGES` holds the built-in values of `loss.advantage`. Built-in and user-defined functions have
the signature `fn(rewards (N, G) float32, *, eps) -> (N, G) float32`. Equal rewards give exactly 0,
except with `none`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Advantage(Protocol):
    """A function that turns rewards (N, G) into advantages (N, G), per group or over all groups."""

    def __call__(self, rewards: Tensor, /, *, eps: float) -> Tensor:
        """Return the advantages (N, G) of `rewards` (N, G)."""
        ...


def _deviations(rewards: Tensor) -> Tensor:
    """Return each reward minus the mean of its row, (N, G)."""
    # The float32 mean of equal rewards can differ from them by a rounding error, and dividing by
    # std + eps turns that error into a real advantage. After the first reward of the row is
    # subtracted, equal rewards are exactly 0.
    shifted = rewards - rewards[:, :1]
    return shifted - shifted.mean(dim=-1, keepdim=True)


def whitened(rewards: Tensor, eps: float) -> Tensor:
    """Return (r − mean) / (sample std + eps), row by row, (N, G)."""
    if rewards.shape[-1] < 2:
        raise ValueError(
            f"a sample standard deviation needs at least 2 rewards, got {rewards.shape[-1]}"
        )
    return _over_std(_deviations(rewards), eps)


def _over_std(deviations: Tensor, eps: float) -> Tensor:
    """Return deviations / (their sample std + eps), row by row."""
    std = deviations.std(dim=-1, keepdim=True)
    # With eps = 0, the clamp to the smallest float turns 0 / 0 into 0. No other quotient changes.
    return deviations / (std + eps).clamp(min=torch.finfo(std.dtype).tiny)


def raw_reward(rewards: Tensor, *, eps: float) -> Tensor:
    """Return the reward r unchanged. `eps` is ignored."""
    return rewards


def zero(rewards: Tensor, *, eps: float) -> Tensor:
    """Return 0 for every response, so that all advantages come from a teacher (distillation).

    `eps` is ignored.
    """
    return torch.zeros_like(rewards)


def group_std(rewards: Tensor, *, eps: float) -> Tensor:
    """Return (r − mean) / (sample std + eps) within each group.

    GRPO, DeepSeekMath (arXiv 2402.03300).
    """
    return whitened(rewards, eps)


def group_mean(rewards: Tensor, *, eps: float) -> Tensor:
    """Return r − mean of its group (Dr. GRPO, arXiv 2503.20783). `eps` is ignored."""
    return _deviations(rewards)


def rloo(rewards: Tensor, *, eps: float) -> Tensor:
    """Return r − mean of the *other* rewards of its group (arXiv 2402.14740). `eps` is ignored."""
    _refuse_groups_of_one(rewards, "rloo")
    group_size = rewards.shape[-1]
    return _deviations(rewards) * (group_size / (group_size - 1))


def batch(rewards: Tensor, *, eps: float) -> Tensor:
    """Return (r − mean) / (sample std + eps) over all groups together.

    REINFORCE++ (arXiv 2501.03262). If the batch has a single reward (because the other
    responses could not be scored), the advantage of that response is 0.
    """
    if rewards.numel() == 1:
        return torch.zeros_like(rewards)
    return whitened(rewards.reshape(1, -1), eps).view_as(rewards)


def group_mean_batch_std(rewards: Tensor, *, eps: float) -> Tensor:
    """Return r − mean of its group, divided by (sample std + eps) over all groups together.

    The standard deviation is computed from the differences r − mean, not from the rewards. This is
    REINFORCE++-baseline (arXiv 2501.03262). The paper whitens over tokens and so gives long
    responses more weight. Here, every response counts once.
    """
    _refuse_groups_of_one(rewards, "group_mean_batch_std")
    # The mean of all deviations is 0 up to a rounding error. Subtracting this mean would give
    # equal rewards a nonzero advantage.
    return _over_std(_deviations(rewards).reshape(1, -1), eps).view_as(rewards)


def maxrl(rewards: Tensor, *, eps: float) -> Tensor:
    """Return (r − mean) / (mean + eps) within each group, or 0 if all rewards of the group are 0.

    With rewards of 0 and 1, the policy gradient uses G samples to estimate the gradient of the mean
    log-likelihood of correct responses. Hard prompts therefore have more weight (MaxRL, arXiv
    2602.02710). A group without a correct response gets 0, because it has no response to make more
    likely.

    Raises:
        ValueError: A reward is below 0. Negative rewards could bring the mean of a group near 0,
            and that group would dominate the gradient.
    """
    _refuse_groups_of_one(rewards, "maxrl")
    if (rewards < 0).any():
        lowest = rewards.min().item()
        raise ValueError(f"maxrl needs rewards of at least 0, got {lowest:.3g}")
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
    """Return advantages (N,), raw rewards (N,) and statistics of N responses.

    Every `group_size` consecutive responses form one group. Advantages and rewards are float32.

    Args:
        reward_fn: `reward_fn(response, ground_truth)` returns a mapping with the keys `reward`,
            `format_reward` and `answer_reward`.
        rollout_responses: N responses.
        repeated_ground_truths: N ground truths, one for each response.
        group_size: Responses per group.
        advantage_eps: Constant added to the standard deviation. `group_mean` ignores it.
        normalize_by_std: True for `group_std`, False for `group_mean`.

    Raises:
        ValueError: N is 0, is not a multiple of `group_size`, or differs from the number of ground
            truths; or `group_size` is below 1 (below 2 with `normalize_by_std`).
    """
    num_responses = len(rollout_responses)
    if num_responses != len(repeated_ground_truths):
        raise ValueError(
            f"{num_responses} rollout_responses but {len(repeated_ground_truths)} "
            "repeated_ground_truths"
        )
    if group_size < 1 or num_responses == 0 or num_responses % group_size != 0:
        raise ValueError(
            f"{num_responses} rollout_responses cannot be split into groups of "
            f"group_size={group_size}"
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
