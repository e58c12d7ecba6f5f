"""The loss of a critic, and how much of the returns' variance the critic explains."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_trainable.algo.masking import zero_off_mask


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Compute ½·max((V − R)², (V_clip − R)²) per token, and a mask of clipped tokens, both (B, S).

    V_clip is V limited to within `clip` of the value before the round (PPO2, OpenAI baselines). A
    token is clipped if its V_clip term, which gives no gradient, is the larger one. `clip=None`
    turns clipping off. Where `mask` is False, tensors may hold anything, the loss is 0, and nothing
    is clipped.
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
    """Return 1 − Var(R − V) / Var(R) over tokens (T,), or None if all returns are equal.

    The result is 1 for a perfect critic and 0 for a critic that knows only the mean. If all returns
    are equal, there is no variance to explain.
    """
    if not len(returns) or bool((returns == returns[0]).all()):
        return None
    variance = returns.double().var(correction=0)
    return float(1 - (returns.double() - values.double()).var(correction=0) / variance)
