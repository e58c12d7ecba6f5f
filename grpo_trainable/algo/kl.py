"""Estimators of KL(π_θ ‖ π_ref) from sampled tokens, in nats.

d = log π_θ − log π_ref. All tensors are (B, S). Off the mask, log-probs may hold anything and
estimates are 0. Source: Schulman 2020, http://joschu.net/blog/kl-approx.html. `KL_ESTIMATORS` holds
the values of `loss.kl_estimator`. It also holds k1. That setting does not accept k1, because the
expected gradient of k1 in a loss is 0.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from grpo_trainable.algo.masking import zero_off_mask
from grpo_trainable.algo.ratios import bounded_log_ratio


class KLEstimator(Protocol):
    """A function that estimates the KL of each token, (B, S), from two policies' log-probs."""

    def __call__(self, log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, /) -> Tensor:
        """Return the KL estimate of each token, (B, S)."""
        ...


def k1(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor) -> Tensor:
    """Return d of each token, an unbiased estimate that can be negative."""
    return zero_off_mask(log_probs - ref_log_probs, mask)


def k2(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor) -> Tensor:
    """Return d² / 2 of each token, a biased estimate that is never negative."""
    return k1(log_probs, ref_log_probs, mask).square() / 2


def k3(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor) -> Tensor:
    """Return e^(−d) − 1 + d of each token, an unbiased estimate that is never negative.

    A d below −20 is treated as −20, both in the value and in the gradient, so that float32 can hold
    the exponential (see `ratios.bounded_log_ratio`).
    """
    minus_d = bounded_log_ratio(-k1(log_probs, ref_log_probs, mask))
    # `exp(-d) - 1` would lose all significant digits for small d, and d is usually small.
    return torch.expm1(minus_d) - minus_d


KL_ESTIMATORS: dict[str, KLEstimator] = {"k1": k1, "k2": k2, "k3": k3}


def sequence_kl(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, estimator: str) -> Tensor:
    """Return the mean KL per response in nats, a scalar.

    Sums over the tokens of each response, then averages over the non-empty responses. Returns 0 if
    every response is empty. `estimator` is a key of `KL_ESTIMATORS`.
    """
    kl = response_kl(log_probs, ref_log_probs, mask, estimator)
    return kl.sum() / mask.bool().any(dim=-1).sum().clamp(min=1)


def response_kl(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, estimator: str) -> Tensor:
    """Return the KL of each response in nats, (B,): the sum over its tokens.

    `estimator` is a key of `KL_ESTIMATORS`.
    """
    return KL_ESTIMATORS[estimator](log_probs, ref_log_probs, mask).sum(dim=-1)


def steered_coefficient(coefficient: float, kl: float, target: float, gain: float) -> float:
    """Return the next round's β: larger if `kl` is above `target`, smaller if `kl` is below.

    The result is β · (1 + gain · clip(kl / target − 1, −0.2, 0.2)) (Ziegler et al. 2019, arXiv
    1909.08593: gain 0.1). `kl` is the round's KL in nats per response. If `kl` is not finite, β
    stays unchanged.
    """
    if not math.isfinite(kl):
        return coefficient
    return coefficient * (1 + gain * min(max(kl / target - 1, -0.2), 0.2))
