"""The objective of a gradient step: policy-gradient loss, staleness correction and KL.

        J = mean over the response tokens of  w · ℓ(ρ, A) + β · KL(π_θ ‖ π_ref)

`aggregation` defines the mean. ℓ is a formula from the module `losses`, A is the advantage and
ρ = π_θ / π_old. w is the importance weight π_old / b, bounded by C, where b is the policy that
sampled the token (`ratios.importance_weight`). With a cap C, w corrects for staleness. Without a
cap, π_old = b, so w is 1 and ρ corrects for staleness.
"""

from __future__ import annotations

from torch import Tensor

from grpo_trainable.algo.aggregation import aggregate
from grpo_trainable.algo.kl import KL_ESTIMATORS
from grpo_trainable.algo.losses import TokenLoss
from grpo_trainable.algo.ratios import importance_weight


def compute_objective(
    log_probs: Tensor,
    old_log_probs: Tensor,
    behaviour_log_probs: Tensor,
    reference_log_probs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    loss: TokenLoss,
    clip_low: float,
    clip_high: float,
    importance_cap: float | None,
    kl_coef: float,
    kl_estimator: str,
    aggregation: str,
    denominator: float,
    importance_level: str = "token",
    importance_rule: str = "truncate",
    importance_floor: float | None = None,
    selected: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return a microbatch's share of J, as a scalar, and a mask (B, S) of tokens clipped by `loss`.

    All tensors are (B, S) and may hold anything off the mask. Log-probs are in nats.

    Args:
        log_probs: Log-probs under the policy in training.
        old_log_probs: Log-probs under π_old, the denominator of ρ.
        behaviour_log_probs: Log-probs under b, the policy that sampled the tokens. Used only with
            an `importance_cap`.
        reference_log_probs: Log-probs under π_ref. Used only with a `kl_coef` above 0.
        advantages: Advantage of each token.
        mask: True for the tokens that count.
        loss: Function for the loss of each token: a value of `LOSSES`, or user-defined.
        clip_low: Distance from 1 down to the lower bound of the clip range; passed to `loss`.
        clip_high: Distance from 1 up to the upper bound of the clip range; passed to `loss`.
        importance_cap: C, the upper bound on w. None omits w.
        kl_coef: β. 0 omits the KL.
        kl_estimator: A key of `KL_ESTIMATORS`.
        aggregation: One of `AGGREGATIONS`.
        denominator: `loss_denominator` of the whole gradient step. With this denominator, the
            shares of the step's microbatches add up to J.
        importance_level: One of `IMPORTANCE_LEVELS`.
        importance_rule: One of `IMPORTANCE_RULES`.
        importance_floor: Lower bound on w for the rule `mask`.
        selected: Mask of the tokens that the module `selection` chose, bool (B, S). Needed only by
            a loss that selects tokens.

    Raises:
        ValueError: `aggregation`, `importance_level` or `importance_rule` is unknown.
        KeyError: `kl_estimator` is unknown.
    """
    share = {} if selected is None else {"selected": selected}
    token_loss, clipped = loss(
        log_probs, old_log_probs, advantages, mask, clip_low=clip_low, clip_high=clip_high, **share
    )
    if importance_cap is not None:
        token_loss = token_loss * importance_weight(
            old_log_probs,
            behaviour_log_probs,
            mask,
            importance_cap,
            level=importance_level,
            rule=importance_rule,
            floor=importance_floor,
        )
    if kl_coef > 0:
        assert reference_log_probs is not None, "the KL needs the reference's log-probs"
        kl = KL_ESTIMATORS[kl_estimator](log_probs, reference_log_probs, mask)
        token_loss = token_loss + kl_coef * kl
    return aggregate(token_loss, mask, aggregation, denominator), clipped
