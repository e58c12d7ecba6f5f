"""Estimators of KL(π_θ ‖ π_ref) from sampled tokens, d = log π_θ − log π_ref, in nats.

All tensors are (B, S). Off the mask the log-probs may hold anything and the estimates are 0.
Schulman 2020, http://joschu.net/blog/kl-approx.html. `KL_ESTIMATORS` holds the values of
`loss.kl_estimator`, and k1, which is measured alone: its expected gradient is 0.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from grpo_trainable.algo.masking import zero_off_mask
from grpo_trainable.algo.ratios import bounded_log_ratio


class KLEstimator(Protocol):
    def __call__(self, log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, /) -> Tensor: ...


def k1(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor) -> Tensor:
    """d per token: unbiased, of either sign."""
    return zero_off_mask(log_probs - ref_log_probs, mask)


def k2(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor) -> Tensor:
    """d² / 2 per token: biased, never negative."""
    return k1(log_probs, ref_log_probs, mask).square() / 2


def k3(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor) -> Tensor:
    """e^(−d) − 1 + d per token: unbiased, never negative.

    A d below −20 counts as −20, whose exponential float32 can hold, and has the gradient of −20
    (`ratios.bounded_log_ratio`).
    """
    minus_d = bounded_log_ratio(-k1(log_probs, ref_log_probs, mask))
    # exp(-d) - 1 loses every digit of a small d; the two policies are close most of the time.
    return torch.expm1(minus_d) - minus_d


KL_ESTIMATORS: dict[str, KLEstimator] = {"k1": k1, "k2": k2, "k3": k3}


def sequence_kl(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, estimator: str) -> Tensor:
    """KL of a response in nats, a scalar: sum over its tokens, mean over the non-empty responses.

    `estimator` is a key of `KL_ESTIMATORS`. 0 when every response is empty.
    """
    token_kl = KL_ESTIMATORS[estimator](log_probs, ref_log_probs, mask)
    return token_kl.sum() / mask.bool().any(dim=-1).sum().clamp(min=1)


def steered_coefficient(coefficient: float, kl: float, target: float, gain: float) -> float:
    """β of the next round, after one whose KL was `kl` nats a response: larger where that is above
    `target`, else smaller.

    β · (1 + gain · clip(kl / target − 1, −0.2, 0.2)) (Ziegler et al. 2019, arXiv 1909.08593:
    gain 0.1). A KL that is not finite says nothing, and β stays.
    """
    if not math.isfinite(kl):
        return coefficient
    return coefficient * (1 + gain * min(max(kl / target - 1, -0.2), 0.2))
