"""Losses that keep the policy near the old one without clipping each ratio.

Shapes, signatures and results are the same as in `losses`. ρ is the ratio π_θ / π_old of a token
and A its advantage.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_trainable.algo.masking import masked_row_mean, zero_off_mask
from grpo_trainable.algo.ratios import (
    bounded_log_ratio,
    response_ratio,
    surrogate_without,
    token_ratio,
)


def sapo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    tau_positive: float,
    tau_negative: float,
) -> tuple[Tensor, Tensor]:
    """Compute −(4/τ)·σ(τ(ρ − 1))·A per token: a gate that closes gradually on both sides of ρ = 1.

    τ is `tau_positive` where A > 0, else `tau_negative`. Nothing is clipped, so `clip_low` and
    `clip_high` are ignored. SAPO, arXiv 2511.20347 (τ = 1.0 and 1.05).
    """
    ratio = token_ratio(log_probs, old_log_probs, mask)
    a = zero_off_mask(advantages, mask)
    tau = torch.full_like(a, tau_negative).masked_fill(a > 0, tau_positive)
    loss = -4 / tau * torch.sigmoid(tau * (ratio - 1)) * a
    return loss, torch.zeros_like(loss, dtype=torch.bool)


def gmpo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Tensor]:
    """Compute −sA per token, where s is the geometric mean of a response's clipped ratios.

    Ratios are clipped before their mean is computed: log ρ is at most `clip_high` where A > 0, and
    at least −`clip_low` elsewhere. ρ therefore stays within [e^−clip_low, e^clip_high] on the side
    that A favours. GMPO, arXiv 2507.20673 (`clip_low` and `clip_high` 0.4). Every token of a
    response has the loss −sA, so `sequence_mean` gives the loss of the paper.
    """
    log_ratio = zero_off_mask(log_probs - old_log_probs, mask)
    a = zero_off_mask(advantages, mask)
    held = torch.where(a > 0, log_ratio.clamp(max=clip_high), log_ratio.clamp(min=-clip_low))
    ratio = bounded_log_ratio(masked_row_mean(held, mask)).exp().unsqueeze(-1)
    return -ratio * a, (held != log_ratio) & (a != 0)


def topr(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Tensor]:
    """Compute −w·A·log π per token: w = 1 where A ≥ 0, else sg[min(ρ of the whole response, 1)].

    sg stops the gradient. A good response is imitated even after it has become unlikely. A bad
    response is ignored once it is unlikely. The tokens of a bad response count as clipped if the
    response's ratio was cut to 1. `clip_low` and `clip_high` are ignored. TOPR, arXiv 2503.14286.
    As in the paper, the response's ratio is the product of ρ over its tokens. A is the paper's R
    minus the baseline of `loss.advantage`.
    """
    ratio = response_ratio(log_probs, old_log_probs, mask).detach()
    a = zero_off_mask(advantages, mask)
    weight = torch.where(a < 0, ratio.clamp(max=1), 1.0)
    return -weight * a * zero_off_mask(log_probs, mask), (a < 0) & (ratio > 1)


def dppo_tv(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Tensor]:
    """Compute −ρA per token; 0 where the probability moved too far in the direction that A favours.

    Too far means π_θ − π_old > `clip_high` where A > 0, and π_old − π_θ > `clip_low` where A < 0.
    |π_θ − π_old| is the total variation distance for the choice between this token and any other.
    DPPO-Binary-TV, arXiv 2602.04879, equations 12 and 13 (threshold 0.15). The authors' code also
    caps ρ, at a value of at least 10. Here, the only bound on ρ is e^20.
    """
    moved = _probability(log_probs, mask) - _probability(old_log_probs, mask)
    a = zero_off_mask(advantages, mask)
    too_far = ((a > 0) & (moved > clip_high)) | ((a < 0) & (moved < -clip_low))
    return surrogate_without(token_ratio(log_probs, old_log_probs, mask), a, too_far)


def dppo_kl(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Tensor]:
    """Compute −ρA per token, and 0 where the KL grew too large in the direction that A favours.

    The KL is computed for the choice between this token and any other:
    π_old·log(π_old/π_θ) + (1 − π_old)·log((1 − π_old)/(1 − π_θ)). The limit on the KL is
    `clip_high` where A > 0 and ρ > 1, and `clip_low` where A < 0 and ρ < 1. DPPO-Binary-KL, arXiv
    2602.04879, equations 12 and 14 (limit 0.05). ρ is bounded as in `dppo_tv`.
    """
    new, old = _probability(log_probs, mask), _probability(old_log_probs, mask)
    log_ratio = zero_off_mask(log_probs - old_log_probs, mask).detach()
    # 1 - π is 0 for a token of probability 1. Adding 1e-8, as the authors do, avoids 0 / 0.
    others = ((1 - old + 1e-8) / (1 - new + 1e-8)).log()
    kl = -old * log_ratio + (1 - old) * others
    a = zero_off_mask(advantages, mask)
    up, down = (a > 0) & (log_ratio > 0), (a < 0) & (log_ratio < 0)
    too_far = (up & (kl > clip_high)) | (down & (kl > clip_low))
    return surrogate_without(token_ratio(log_probs, old_log_probs, mask), a, too_far)


def _probability(log_probs: Tensor, mask: Tensor) -> Tensor:
    """Return π of each token, without gradient; 1 off the mask."""
    return zero_off_mask(log_probs, mask).detach().exp()
