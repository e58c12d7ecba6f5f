"""Losses that treat a few tokens of a gradient step differently, and the selection of those tokens.

The selection depends on all tokens of the step. It therefore runs before the step is split into
microbatches, and uses the log-probs of the policy before the step. For each loss in this module,
`SELECTIONS` has a function that takes the whole step and returns a mask (B, S) of the selected
tokens. The returned mask is False off the response mask. The loss receives its microbatch's part of
that mask as `selected`. Otherwise, shapes and results are the same as in `losses`. ρ is the ratio
π_θ / π_old of a token and A its advantage.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from grpo_trainable.algo.masking import masked_mean, zero_off_mask
from grpo_trainable.algo.ratios import clipped_surrogate, surrogate_without, token_ratio


class Selection(Protocol):
    """A function that returns a bool mask (B, S) of the tokens that a loss treats specially."""

    def __call__(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        rng: np.random.Generator,
        /,
        *,
        clip_low: float,
        clip_high: float,
    ) -> Tensor:
        """Return a bool mask (B, S) of the selected tokens."""
        ...


# ---- M2PO ------------------------------------------------------------------------------------


def second_moment_outliers(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    rng: np.random.Generator,
    *,
    clip_low: float,
    clip_high: float,
    second_moment: float,
) -> Tensor:
    """Select the fewest tokens whose removal brings the mean (log ρ)² down to `second_moment`.

    The selected tokens are those with the largest (log ρ)². Only tokens whose probability moved in
    the direction that A favours (A > 0 and ρ > 1, or A < 0 and ρ < 1) are counted or removed.
    Clipping would not affect the other tokens either. M2PO, arXiv 2510.01161, equation 4 and
    algorithm 1 (`second_moment` 0.04).
    """
    log_ratio = zero_off_mask(log_probs - old_log_probs, mask).double()
    moved = log_ratio * zero_off_mask(advantages, mask) > 0
    squares, order = log_ratio[moved].square().sort(stable=True)
    means = squares.cumsum(0) / torch.arange(1, len(squares) + 1, device=squares.device)
    kept = int((means <= second_moment).sum())
    return _at(moved.nonzero()[order[kept:]], mask)


def m2po(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    selected: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute −ρA per token, and 0 for the `selected` outliers, which count as clipped.

    `second_moment_outliers` selects the outliers. M2PO, arXiv 2510.01161, equation 5.
    """
    ratio = token_ratio(log_probs, old_log_probs, mask)
    return surrogate_without(ratio, zero_off_mask(advantages, mask), selected)


# ---- Clip-Cov and KL-Cov ---------------------------------------------------------------------


def covariances(log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Return (log π − mean)·(A − mean) of each token, (B, S); −∞ off the mask.

    The means are taken over all tokens of the gradient step. Tokens with a large covariance lower
    the entropy most (arXiv 2505.22617, equation 10).
    """
    deviations = (values - masked_mean(values, mask) for values in (log_probs, advantages))
    return torch.mul(*deviations).masked_fill(~mask.bool(), -torch.inf)


def clip_cov_tokens(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    rng: np.random.Generator,
    *,
    clip_low: float,
    clip_high: float,
    cov_fraction: float,
    cov_band: tuple[float, float],
) -> Tensor:
    """Select random tokens whose covariance is in `cov_band`.

    The number of selected tokens is `cov_fraction` times the number of all tokens, but at least 1.
    Clipped tokens are never selected. If too few tokens qualify, all that qualify are selected.
    Clip-Cov, arXiv 2505.22617, equation 11: fraction 2e-4, band 1 to 5. The minimum of one token
    follows the authors' code.
    """
    ratio = token_ratio(log_probs, old_log_probs, mask)
    _, clipped = clipped_surrogate(ratio, zero_off_mask(advantages, mask), clip_low, clip_high)
    cov = covariances(log_probs, advantages, mask)
    candidates = ((cov >= cov_band[0]) & (cov <= cov_band[1]) & ~clipped).nonzero()
    drawn = rng.permutation(len(candidates))[: _share(cov_fraction, mask)]
    return _at(candidates[torch.from_numpy(drawn).to(mask.device)], mask)


def clip_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    selected: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute −min(ρA, clip(ρ)A) per token, and 0 for the `selected` tokens.

    `clip_cov_tokens` selects these tokens. The selected tokens also count as clipped. Clip-Cov,
    arXiv 2505.22617, equation 12.
    """
    ratio = token_ratio(log_probs, old_log_probs, mask)
    loss, clipped = clipped_surrogate(ratio, zero_off_mask(advantages, mask), clip_low, clip_high)
    return loss.masked_fill(selected, 0), clipped | selected


def kl_cov_tokens(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    rng: np.random.Generator,
    *,
    clip_low: float,
    clip_high: float,
    cov_fraction: float,
) -> Tensor:
    """Select the tokens with the largest covariance.

    The number of selected tokens is `cov_fraction` times the number of all tokens, but at least 1.
    KL-Cov, arXiv 2505.22617, equation 13 (fraction 2e-4).
    """
    cov = covariances(log_probs, advantages, mask).flatten()
    largest = cov.sort(descending=True, stable=True).indices[: _share(cov_fraction, mask)]
    places = torch.stack((largest // mask.shape[1], largest % mask.shape[1]), dim=1)
    return _at(places, mask)


def kl_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    selected: Tensor,
    cov_kl_coef: float,
) -> tuple[Tensor, Tensor]:
    """Compute −ρA per token, plus `cov_kl_coef`·|log ρ| for the `selected` tokens.

    `kl_cov_tokens` selects the tokens. No ratio is clipped. KL-Cov (arXiv 2505.22617, equation 14:
    coefficient 1.0) adds KL(π_old ‖ π_θ) of the selected tokens. The authors' code replaces this KL
    with |log ρ|, and so does this function. |log ρ| has no gradient at ρ = 1.
    """
    log_ratio = zero_off_mask(log_probs - old_log_probs, mask)
    ratio = token_ratio(log_probs, old_log_probs, mask)
    loss = -ratio * zero_off_mask(advantages, mask)
    loss = loss + cov_kl_coef * log_ratio.abs() * selected
    return loss, torch.zeros_like(loss, dtype=torch.bool)


def _share(fraction: float, mask: Tensor) -> int:
    """Return `fraction` times the number of tokens, rounded down, but at least 1.

    If there are no tokens, return 0.
    """
    tokens = int(mask.bool().sum())
    return min(tokens, max(1, int(fraction * tokens)))


def _at(places: Tensor, mask: Tensor) -> Tensor:
    """Return a bool tensor with the shape of `mask`, True at the indices `places` (N, 2)."""
    selected = torch.zeros_like(mask, dtype=torch.bool)
    selected[places[:, 0], places[:, 1]] = True
    return selected


# The selection function of each `loss.type` that selects tokens.
SELECTIONS = {
    "m2po": second_moment_outliers,
    "clip_cov": clip_cov_tokens,
    "kl_cov": kl_cov_tokens,
}
