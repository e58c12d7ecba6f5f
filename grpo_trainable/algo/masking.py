"""Sums and means over the positions that a mask selects.

All other positions may hold anything, including NaN.
"""

from __future__ import annotations

from torch import Tensor


def zero_off_mask(tensor: Tensor, mask: Tensor) -> Tensor:
    """Return `tensor` with 0 where `mask` is 0. No gradient flows to positions off the mask."""
    # Multiplying by the mask would give 0 * inf = NaN, in the value and also in the gradient.
    return tensor.masked_fill(~mask.bool(), 0)


def masked_sum(tensor: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return the sum over positions with mask 1, along `dim` or in total; 0 if there are none."""
    return zero_off_mask(tensor, mask).sum(dim)


def masked_mean(tensor: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return the mean over positions with mask 1; NaN if there are none, as in `Tensor.mean`."""
    return masked_sum(tensor, mask, dim) / mask.bool().expand_as(tensor).sum(dim)


def masked_row_mean(tensor: Tensor, mask: Tensor) -> Tensor:
    """Return each row's mean over positions with mask 1, (B, S) -> (B,); 0 for an empty row."""
    return masked_sum(tensor, mask, -1) / mask.bool().sum(-1).clamp(min=1)


def masked_normalize(
    tensor: Tensor, mask: Tensor, dim: int | None = None, constant_normalizer: float = 1.0
) -> Tensor:
    """Return the sum over positions with mask 1, divided by a constant.

    Dr. GRPO, arXiv 2503.20783.
    """
    return masked_sum(tensor, mask, dim) / constant_normalizer
