"""Sums and means over the positions that a mask selects; others may hold anything, also NaN."""

from __future__ import annotations

from torch import Tensor


def zero_off_mask(tensor: Tensor, mask: Tensor) -> Tensor:
    """`tensor` with 0 wherever `mask` is 0; no gradient flows back to those positions."""
    # Filling, never multiplying: 0 * inf is NaN, in the value and again in the gradient.
    return tensor.masked_fill(~mask.bool(), 0)


def masked_sum(tensor: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum over the positions with mask 1, along `dim` or over everything; 0 for none."""
    return zero_off_mask(tensor, mask).sum(dim)


def masked_mean(tensor: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean over the positions with mask 1; NaN for none, as `mean()` of nothing is."""
    return masked_sum(tensor, mask, dim) / mask.bool().expand_as(tensor).sum(dim)


def masked_row_mean(tensor: Tensor, mask: Tensor) -> Tensor:
    """(B, S) -> (B,) mean of each row over its mask; 0 for an empty row."""
    return masked_sum(tensor, mask, -1) / mask.bool().sum(-1).clamp(min=1)


def masked_normalize(
    tensor: Tensor, mask: Tensor, dim: int | None = None, constant_normalizer: float = 1.0
) -> Tensor:
    """Sum over the positions with mask 1, divided by a constant (Dr. GRPO, arXiv 2503.20783)."""
    return masked_sum(tensor, mask, dim) / constant_normalizer
