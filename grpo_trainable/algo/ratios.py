"""Ratios of two policies' probabilities, computed from log-probs and bounded for float32.

float32 holds at most e^88. Shapes: B responses, S positions. All tensors are (B, S) unless stated
otherwise. Positions off the mask may hold anything.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_trainable.algo.masking import masked_row_mean, masked_sum, zero_off_mask

# float32 keeps seven digits, so a single ratio of e^20 = 5e8 already outweighs the sum of all
# others.
LOG_RATIO_MAX = 20.0

# The values of `loss.importance_level` and `loss.importance_rule`.
IMPORTANCE_LEVELS = ("token", "sequence")
IMPORTANCE_RULES = ("truncate", "mask")


def bounded_log_ratio(log_ratio: Tensor) -> Tensor:
    """Return min(log_ratio, LOG_RATIO_MAX), for any shape, with a gradient even above the bound.

    Above the bound, the exponential of the result is e^LOG_RATIO_MAX, and so is its derivative.
    Most losses do not clip tokens with A < 0 and a ratio above the bound, so the gradient still
    lowers the probability of these tokens. A plain clamp has derivative 0 and would leave their
    probability unchanged. No lower bound is needed: the exponential underflows to 0, and so does
    its derivative.
    """
    excess = (log_ratio.detach() - LOG_RATIO_MAX).clamp(min=0)
    return log_ratio - excess


def token_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """Return ρ of each token, (B, S), at most e^LOG_RATIO_MAX; 1 off the mask."""
    return bounded_log_ratio(zero_off_mask(log_probs - old_log_probs, mask)).exp()


def sequence_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """Return exp(mean over the response of log ρ), (B, 1), at most e^LOG_RATIO_MAX.

    An empty row has ratio 1. GSPO, arXiv 2507.18071.
    """
    mean = masked_row_mean(log_probs - old_log_probs, mask)
    return bounded_log_ratio(mean).exp().unsqueeze(-1)


def response_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """Return the product of ρ over the response, (B, 1), at most e^LOG_RATIO_MAX.

    An empty row has ratio 1.
    """
    total = masked_sum(log_probs - old_log_probs, mask, -1)
    return bounded_log_ratio(total).exp().unsqueeze(-1)


def effective_sample_fraction(
    log_probs: Tensor, behaviour_log_probs: Tensor, mask: Tensor
) -> float:
    """Return the effective sample size of a batch's responses, as a fraction of their number.

    The result is 1 / (n · Σ w̃²), where w̃ are the importance weights of the n responses, divided
    by their sum. The weight of a response is the product of π/b over its tokens. If all weights are
    equal, the result is 1. If one weight outweighs all others, the result is 1/n. As in VCPO (arXiv
    2602.17616), the weights belong to whole responses and have no upper bound. Rows without tokens
    do not count. If no row has a token, the result is 1.

    Args:
        log_probs: Log-probs under the policy π, (B, S).
        behaviour_log_probs: Log-probs under the policy b that sampled the tokens, (B, S).
        mask: True for the tokens that count, (B, S).
    """
    total = masked_sum(log_probs.double() - behaviour_log_probs.double(), mask, -1)
    weights = total[mask.bool().any(dim=1)].softmax(dim=0)
    return 1 / (len(weights) * float(weights.square().sum())) if len(weights) else 1.0


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
    """Return the weight w = p/b of each token, (B, S), bounded according to `rule`.

    The weight is a constant factor of the token's loss. p is the policy at the start of the round,
    and b the policy that sampled the token. As in AReaL (arXiv 2505.24298), w is decoupled from the
    clipped ratio, which is π_θ / p.

    Args:
        start_log_probs: Log-probs under p, (B, S).
        behaviour_log_probs: Log-probs under b, (B, S).
        mask: True for the tokens that count, (B, S).
        cap: Upper bound on w.
        level: `token` gives each token its own w; off the mask, w is 1. `sequence` gives every
            token the product of p/b over its response.
        rule: `truncate` gives min(w, `cap`), truncated importance sampling (Yao et al. 2025).
            `mask` gives w where `floor` ≤ w ≤ `cap` and 0 elsewhere, masked importance sampling
            (Liu et al. 2025). `mask` with a floor is IcePop (arXiv 2510.18855: 0.5 to 5).
        floor: Lower bound on w for the rule `mask`. None means no bound.

    Raises:
        ValueError: `level` or `rule` is unknown.
    """
    if level not in IMPORTANCE_LEVELS or rule not in IMPORTANCE_RULES:
        raise ValueError(f"unknown level {level!r} or unknown rule {rule!r} for importance weights")
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
    """Return a mask (B, S) of tokens whose importance weight is cut to the cap or set to 0.

    The result is False off the mask. The rules `truncate` and `mask` of `importance_weight` change
    the same tokens, except that only `mask` has a `floor`. For the arguments, see
    `importance_weight`.
    """
    weight = _unbounded_weight(start_log_probs, behaviour_log_probs, mask, level)
    return _out_of_range(weight, cap, floor) & mask.bool()


def _unbounded_weight(start: Tensor, behaviour: Tensor, mask: Tensor, level: str) -> Tensor:
    ratio_of = token_ratio if level == "token" else response_ratio
    return ratio_of(start, behaviour, mask).expand(mask.shape)


def _out_of_range(weight: Tensor, cap: float, floor: float | None) -> Tensor:
    return (weight > cap) | (weight < (floor or 0.0))


def bounded_tokens(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """Return True for tokens with a ratio above e^LOG_RATIO_MAX, (B, S); False off the mask.

    The metric `loss/bounded_tokens` counts these tokens.
    """
    return zero_off_mask(log_probs - old_log_probs, mask) > LOG_RATIO_MAX


# ---- The surrogate objective: ρA, which has the gradient of A·log π at ρ = 1 ---------------------


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Return −min(ρA, clip(ρ)A), and a mask of tokens whose clipped term is the smaller one.

    The clipped term, which gives no gradient, is the smaller one if ρ has left the clip range in
    the direction that A favours.
    """
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return -torch.minimum(unclipped, clipped), clipped < unclipped


def surrogate_without(ratio: Tensor, advantages: Tensor, dropped: Tensor) -> tuple[Tensor, Tensor]:
    """Return −ρA, or 0 for tokens on the mask `dropped` (B, S), and return `dropped` itself."""
    return (-ratio * advantages).masked_fill(dropped, 0), dropped
