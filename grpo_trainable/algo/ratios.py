"""Ratios of two policies' probabilities, from log-probs; float32 holds no more than e^88.

Shapes: B responses, S positions; all tensors are (B, S) unless said otherwise. Positions off the
mask may hold anything.
"""

from __future__ import annotations

from torch import Tensor

from grpo_trainable.algo.masking import masked_row_mean, zero_off_mask

# A ratio of e^20, 5e8, outweighs the sum of all others already: float32 keeps seven digits.
LOG_RATIO_MAX = 20.0


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


def importance_weight(
    start_log_probs: Tensor, behaviour_log_probs: Tensor, mask: Tensor, cap: float
) -> Tensor:
    """min(p/b, cap) of each token, (B, S); 1 off the mask.

    p is the policy at the start of the round, b the one that sampled. Truncated importance sampling
    (Yao et al. 2025), decoupled from the ratio that is clipped as in AReaL (arXiv 2505.24298): the
    ratio is then π_θ / p, and the loss of a token is multiplied by this constant.
    """
    return token_ratio(start_log_probs, behaviour_log_probs, mask).clamp(max=cap)


def bounded_tokens(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """Tokens whose ratio is above e^LOG_RATIO_MAX, bool (B, S), False off the mask;
    `loss/bounded_tokens` counts them."""
    return zero_off_mask(log_probs - old_log_probs, mask) > LOG_RATIO_MAX
