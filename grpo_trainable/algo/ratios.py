"""Ratios of two policies' probabilities, from log-probs; float32 holds no more than e^88.

Shapes: B responses, S positions; all tensors are (B, S) unless said otherwise. Positions off the
mask may hold anything.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_trainable.algo.masking import masked_row_mean, masked_sum, zero_off_mask

# A ratio of e^20, 5e8, outweighs the sum of all others already: float32 keeps seven digits.
LOG_RATIO_MAX = 20.0

# The values of `loss.importance_level` and `loss.importance_rule`.
IMPORTANCE_LEVELS = ("token", "sequence")
IMPORTANCE_RULES = ("truncate", "mask")


def bounded_log_ratio(log_ratio: Tensor) -> Tensor:
    """min(log_ratio, LOG_RATIO_MAX) of any shape, through which gradients pass as if unbounded.

    Its exponential grows no further, and the derivative stays the ratio itself: a token that a loss
    does not clip (A < 0) is still pushed back, which the derivative 0 of a plain clamp would stop.
    No lower bound is needed: the exponential underflows to 0, and its derivative with it.
    """
    excess = (log_ratio.detach() - LOG_RATIO_MAX).clamp(min=0)
    return log_ratio - excess


def token_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """ρ of each token, (B, S), at most e^LOG_RATIO_MAX; 1 off the mask."""
    return bounded_log_ratio(zero_off_mask(log_probs - old_log_probs, mask)).exp()


def sequence_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """exp(mean over the response of log ρ), (B, 1), at most e^LOG_RATIO_MAX; 1 for an empty row
    (arXiv 2507.18071)."""
    mean = masked_row_mean(log_probs - old_log_probs, mask)
    return bounded_log_ratio(mean).exp().unsqueeze(-1)


def response_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """Product over the response of ρ, (B, 1), at most e^LOG_RATIO_MAX; 1 for an empty row."""
    total = masked_sum(log_probs - old_log_probs, mask, -1)
    return bounded_log_ratio(total).exp().unsqueeze(-1)


def importance_weight(
    start_log_probs: Tensor,
    behaviour_log_probs: Tensor,
    mask: Tensor,
    cap: float,
    *,
    level: str = "token",
    rule: str = "truncate",
    floor: float | None = None,
) -> Tensor:
    """The constant that multiplies the loss of each token, (B, S): w = p/b, bounded by `rule`.

    p is the policy at the start of the round, b the one that sampled, decoupled from the ratio that
    is clipped as in AReaL (arXiv 2505.24298): that is then π_θ / p. `level`: w of a token, 1 off
    the mask, or the product of the response's. `rule`: `truncate` gives min(w, `cap`), truncated
    importance sampling (Yao et al. 2025); `mask` gives w where `floor` ≤ w ≤ `cap` and 0 elsewhere,
    masked importance sampling (Liu et al. 2025), with a floor IcePop (arXiv 2510.18855: 0.5, 5).
    ValueError for an unknown `level` or `rule`.
    """
    if level not in IMPORTANCE_LEVELS or rule not in IMPORTANCE_RULES:
        raise ValueError(f"unknown level {level!r} or rule {rule!r} of importance weights")
    weight = _unbounded_weight(start_log_probs, behaviour_log_probs, mask, level)
    if rule == "truncate":
        return weight.clamp(max=cap)
    return weight.masked_fill(_out_of_range(weight, cap, floor), 0)


def weights_bounded(
    start_log_probs: Tensor,
    behaviour_log_probs: Tensor,
    mask: Tensor,
    cap: float,
    *,
    level: str = "token",
    floor: float | None = None,
) -> Tensor:
    """Tokens whose importance weight `importance_weight` cuts to the cap or sets to 0, bool (B, S),
    False off the mask. Both rules act on the same tokens, but that only `mask` has a `floor`."""
    weight = _unbounded_weight(start_log_probs, behaviour_log_probs, mask, level)
    return _out_of_range(weight, cap, floor) & mask.bool()


def _unbounded_weight(start: Tensor, behaviour: Tensor, mask: Tensor, level: str) -> Tensor:
    ratio_of = token_ratio if level == "token" else response_ratio
    return ratio_of(start, behaviour, mask).expand(mask.shape)


def _out_of_range(weight: Tensor, cap: float, floor: float | None) -> Tensor:
    return (weight > cap) | (weight < (floor or 0.0))


def bounded_tokens(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """Tokens whose ratio is above e^LOG_RATIO_MAX, bool (B, S), False off the mask;
    `loss/bounded_tokens` counts them."""
    return zero_off_mask(log_probs - old_log_probs, mask) > LOG_RATIO_MAX


# ---- The surrogate objective: ρA, whose gradient at ρ = 1 is that of A·log π ---------------------


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
