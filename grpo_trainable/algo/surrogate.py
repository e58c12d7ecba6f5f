"""The surrogate objective of a token, ρA, whose gradient at ρ = 1 is that of A·log π.

Shapes: B responses, S positions; all tensors are (B, S), the ratio ρ may be (B, 1). The advantages
A are 0 off the mask. Both functions return the loss and which tokens give no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """−min(ρA, clip(ρ)A), and where the min took the clipped term, which gives no gradient: ρ is
    out of range on the side that A favours."""
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return -torch.minimum(unclipped, clipped), clipped < unclipped


def surrogate_without(ratio: Tensor, advantages: Tensor, dropped: Tensor) -> tuple[Tensor, Tensor]:
    """−ρA, and 0 for the tokens `dropped`, bool (B, S)."""
    return (-ratio * advantages).masked_fill(dropped, 0), dropped
