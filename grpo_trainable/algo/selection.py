"""Losses that treat a few tokens of a gradient step unlike the others, and which tokens these are.

Which they are depends on all tokens of the step, so it is settled before the step is split into
microbatches, from the log-probs of the policy before it: `SELECTIONS` has a function for each such
loss, which takes the whole step and returns the tokens as bool (B, S), False off the mask. The loss
itself is given its microbatch's share of them as `selected`. Shapes and results are otherwise those
of `losses`; ρ is the ratio π_θ / π_old of a token and A its advantage.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from grpo_trainable.algo.masking import masked_mean, zero_off_mask
from grpo_trainable.algo.ratios import clipped_surrogate, surrogate_without, token_ratio


class Selection(Protocol):
    """The tokens of a gradient step that its loss treats differently, bool (B, S)."""

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
    ) -> Tensor: ...


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
    """The tokens with the largest (log ρ)², as few as bring the mean of the others down to
    `second_moment`.

    Only tokens that have moved to where A pushes them (A > 0 and ρ > 1, or A < 0 and ρ < 1) are
    counted or taken: the others would not be clipped either. Equation 4 and algorithm 1 of arXiv
    2510.01161: 0.04.
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
    """−ρA per token, 0 for the outliers `selected` by `second_moment_outliers`, which count as
    clipped (M2PO, arXiv 2510.01161, equation 5)."""
    ratio = token_ratio(log_probs, old_log_probs, mask)
    return surrogate_without(ratio, zero_off_mask(advantages, mask), selected)


# ---- Clip-Cov and KL-Cov ---------------------------------------------------------------------


def covariances(log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """(log π − mean)·(A − mean) of each token, (B, S), the means over the step; −∞ off the mask.

    Tokens for which it is large lower the entropy most (arXiv 2505.22617, equation 10).
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
    """`cov_fraction` of all tokens, at least one, drawn from those that are not clipped and whose
    covariance is within `cov_band`; all of these if they are fewer.

    Clip-Cov, arXiv 2505.22617, equation 11: 2e-4, 1 to 5. At least one token is as in the authors'
    code.
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
    """−min(ρA, clip(ρ)A) per token, 0 for the tokens `selected` by `clip_cov_tokens`, which count
    as clipped too (Clip-Cov, arXiv 2505.22617, equation 12)."""
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
    """`cov_fraction` of all tokens, at least one, with the largest covariance (KL-Cov, arXiv
    2505.22617, equation 13: 2e-4)."""
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
    """−ρA per token, and + `cov_kl_coef`·|log ρ| for the tokens `selected` by `kl_cov_tokens`.

    No ratio is clipped. KL-Cov (arXiv 2505.22617, equation 14: 1.0) has KL(π_old ‖ π_θ) of
    these tokens, for which the authors' code takes |log ρ|, as here. It has no gradient at ρ = 1.
    """
    log_ratio = zero_off_mask(log_probs - old_log_probs, mask)
    ratio = token_ratio(log_probs, old_log_probs, mask)
    loss = -ratio * zero_off_mask(advantages, mask)
    loss = loss + cov_kl_coef * log_ratio.abs() * selected
    return loss, torch.zeros_like(loss, dtype=torch.bool)


def _share(fraction: float, mask: Tensor) -> int:
    """`fraction` of the tokens, at least one where there are any."""
    tokens = int(mask.bool().sum())
    return min(tokens, max(1, int(fraction * tokens)))


def _at(places: Tensor, mask: Tensor) -> Tensor:
    """True at these `places`, (N, 2), of a tensor shaped as `mask`."""
    selected = torch.zeros_like(mask, dtype=torch.bool)
    selected[places[:, 0], places[:, 1]] = True
    return selected


# The losses of `loss.type` that select, and how.
SELECTIONS = {
    "m2po": second_moment_outliers,
    "clip_cov": clip_cov_tokens,
    "kl_cov": kl_cov_tokens,
}
