"""What a gradient step minimises: the policy-gradient loss, its correction for staleness, the KL.

        J = mean over the response tokens of  w · ℓ(ρ, A) + β · KL(π_θ ‖ π_ref)

`aggregation` says which mean. ℓ is a formula of `losses`, A the advantage, ρ = π_θ / π_old, and
w the importance weight π_old / b of a token that the policy b sampled, bounded by C
(`ratios.importance_weight`). Without a cap C the ratio is taken to b itself, π_old = b, and w is 1:
staleness is corrected once, never twice.
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
    """One microbatch's share of J, a scalar, and the tokens that `loss` clipped, bool (B, S).

    All tensors are (B, S), log-probs in nats; off the mask they may hold anything.
    `behaviour_log_probs` are read only with an `importance_cap`, `reference_log_probs` only with a
    `kl_coef` above 0. `denominator` is `loss_denominator` of the whole gradient step: the shares of
    its microbatches add up to J. `selected`, bool (B, S), is given to a loss that selects tokens
    (`selection`), and to no other. ValueError for an unknown `aggregation`, KeyError for an unknown
    `kl_estimator`.
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
