"""Policy-gradient losses per token. `aggregation` turns these losses into one number.

Shapes: B responses, S positions. All tensors are (B, S) unless stated otherwise. ρ is the ratio
π_θ / π_old and A the advantage. clip(ρ) is ρ limited to [1 − clip_low, 1 + clip_high].

`LOSSES` holds the built-in values of `loss.type`. All losses, including user-defined ones, take the
same tensors and the clip range, so the learner calls them all in the same way. A loss ignores
arguments that it does not need. Any further argument of a loss is either a setting of the same
name, such as `loss.tau_positive`, or `selected`, a mask from the module `selection`. Each function
returns the loss of every token and a mask of the tokens that it clipped. `loss/clip_fraction` is
the share of clipped tokens. Positions off the mask may hold anything: their loss is 0 and they
never count as clipped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from grpo_trainable.algo.masking import zero_off_mask
from grpo_trainable.algo.ratios import (
    bounded_log_ratio,
    clipped_surrogate,
    sequence_ratio,
    token_ratio,
)
from grpo_trainable.algo.selection import clip_cov, kl_cov, m2po
from grpo_trainable.algo.trust_regions import dppo_kl, dppo_tv, gmpo, sapo, topr

_T = TypeVar("_T")


class TokenLoss(Protocol):
    """A function that returns the loss of each token and a mask of clipped tokens, both (B, S)."""

    def __call__(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        /,
        *,
        clip_low: float,
        clip_high: float,
    ) -> tuple[Tensor, Tensor]:
        """Return the loss of each token and a bool mask of the clipped tokens, both (B, S)."""
        ...


def policy_gradient(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Tensor]:
    """Compute −A·log π per token, without a ratio and without clipping (REINFORCE)."""
    loss = -zero_off_mask(advantages, mask) * zero_off_mask(log_probs, mask)
    return loss, torch.zeros_like(loss, dtype=torch.bool)


def grpo_clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute −min(ρA, clip(ρ)A) per token.

    Papers, with their `clip_low` and `clip_high`: GRPO, arXiv 2402.03300 (0.2, 0.2); DAPO, arXiv
    2503.14476 (0.2, 0.28); PPO, arXiv 1707.06347, equation 7 (0.2, 0.2).

    With `dual_clip` c, the loss of a token with A < 0 is at most −cA. For ρ > c, that loss is
    constant, so the token has no gradient (dual-clip PPO, arXiv 1912.09729: c = 3).
    """
    ratio = token_ratio(log_probs, old_log_probs, mask)
    a = zero_off_mask(advantages, mask)
    loss, clipped = clipped_surrogate(ratio, a, clip_low, clip_high)
    if dual_clip is None:
        return loss, clipped
    cut = (a < 0) & (loss > -dual_clip * a)
    return torch.where(cut, -dual_clip * a, loss), clipped | cut


def cispo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Tensor]:
    """Compute −sg[min(ρ, 1 + clip_high)]·A·log π per token.

    sg (stop-gradient) makes the weight a constant. Only the weight is clipped, so every token keeps
    a gradient. Tokens with ρ above the bound count as clipped. The paper (arXiv 2506.13585) sets
    no lower bound, so `clip_low` is ignored.
    """
    ratio = token_ratio(log_probs, old_log_probs, mask).detach()
    weight = ratio.clamp(max=1 + clip_high)
    loss = -weight * zero_off_mask(advantages, mask) * zero_off_mask(log_probs, mask)
    return loss, ratio > 1 + clip_high


def gspo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Tensor]:
    """Compute −min(sA, clip(s)A) with one ratio s per response.

    GSPO, arXiv 2507.18071 (`clip_low` 3e-4, `clip_high` 4e-4).
    """
    ratio = sequence_ratio(log_probs, old_log_probs, mask)
    return clipped_surrogate(ratio, zero_off_mask(advantages, mask), clip_low, clip_high)


LOSSES: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "no_baseline": policy_gradient,
    "reinforce_with_baseline": policy_gradient,
    "grpo_clip": grpo_clip,
    # DAPO has the same formula, with a clip_high above clip_low.
    "dapo": grpo_clip,
    # PPO has the same formula, with an advantage for each token.
    "ppo": grpo_clip,
    "cispo": cispo,
    "gspo": gspo,
    "gmpo": gmpo,
    "sapo": sapo,
    "topr": topr,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "m2po": m2po,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
}


def compute_naive_policy_gradient_loss(
    raw_rewards_or_advantages: Tensor, policy_log_probs: Tensor
) -> Tensor:
    """Compute −A·log π per token, (B, S), with advantages or raw rewards A, (B, 1)."""
    return -raw_rewards_or_advantages * policy_log_probs


def compute_grpo_clip_loss(
    advantages: Tensor, policy_log_probs: Tensor, old_log_probs: Tensor, cliprange: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute −min(ρA, clip(ρ)A) per token, (B, S), and the metadata `clipped`.

    A is (B, 1). ρ = exp(policy_log_probs − old_log_probs) is at most e^20 (see `ratios`). clip(ρ)
    is ρ limited to [1 − cliprange, 1 + cliprange]. `clipped` is 1.0 for tokens whose clipped term
    is smaller than the other term. DeepSeekMath, arXiv 2402.03300.
    """
    ratio = bounded_log_ratio(policy_log_probs - old_log_probs).exp()
    loss, clipped = clipped_surrogate(ratio, advantages, cliprange, cliprange)
    return loss, {"clipped": clipped.float()}


def compute_policy_gradient_loss(
    policy_log_probs: Tensor,
    loss_type: str,
    raw_rewards: Tensor | None = None,
    advantages: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    cliprange: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the per-token loss (B, S) of `loss_type`, and its metadata.

    Args:
        policy_log_probs: Log-probs under the policy in training, (B, S).
        loss_type: `no_baseline`, `reinforce_with_baseline` or `grpo_clip`.
        raw_rewards: Rewards, (B, 1). Needed for `no_baseline`.
        advantages: Advantages, (B, 1). Needed for `reinforce_with_baseline` and `grpo_clip`.
        old_log_probs: Log-probs under the old policy, (B, S). Needed for `grpo_clip`.
        cliprange: Distance from 1 to each bound of the clip range. Needed for `grpo_clip`.

    Raises:
        ValueError: A needed argument is missing, or `loss_type` is unknown.
    """

    def given(name: str, value: _T | None) -> _T:
        if value is None:
            raise ValueError(f"loss_type {loss_type!r} needs the argument {name}")
        return value

    if loss_type == "no_baseline":
        reward = given("raw_rewards", raw_rewards)
        return compute_naive_policy_gradient_loss(reward, policy_log_probs), {}
    if loss_type == "reinforce_with_baseline":
        advantage = given("advantages", advantages)
        return compute_naive_policy_gradient_loss(advantage, policy_log_probs), {}
    if loss_type == "grpo_clip":
        return compute_grpo_clip_loss(
            given("advantages", advantages),
            policy_log_probs,
            given("old_log_probs", old_log_probs),
            given("cliprange", cliprange),
        )
    raise ValueError(
        f"loss_type must be no_baseline, reinforce_with_baseline or grpo_clip, got {loss_type!r}"
    )
