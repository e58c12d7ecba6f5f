"""What a critic minimises, and how much of the returns it explains."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_trainable.algo.masking import zero_off_mask


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip: float | None
) -> tuple[Tensor, Tensor]:
    """½·max((V − R)², (V_clip − R)²) per token, (B, S), and where the clipped term was taken,
    which gives no gradient.

    V_clip is V held within `clip` of the value before the round (PPO2, OpenAI baselines); None does
    not clip. Off the mask tensors may hold anything; there the loss is 0 and nothing is clipped.
    """
    target = zero_off_mask(returns, mask)
    values, old = zero_off_mask(values, mask), zero_off_mask(old_values, mask)
    squares = (values - target).square()
    if clip is None:
        return squares / 2, torch.zeros_like(mask, dtype=torch.bool)
    held = old + (values - old).clamp(-clip, clip)
    held_squares = (held - target).square()
    return torch.maximum(squares, held_squares) / 2, held_squares > squares


def explained_variance(values: Tensor, returns: Tensor) -> float | None:
    """1 − Var(R − V) / Var(R) over tokens (T,): 1 for a perfect critic, 0 for one that knows the
    mean alone. None where all returns are equal, so that there is nothing to explain."""
    if not len(returns) or bool((returns == returns[0]).all()):
        return None
    variance = returns.double().var(correction=0)
    return float(1 - (returns.double() - values.double()).var(correction=0) / variance)
