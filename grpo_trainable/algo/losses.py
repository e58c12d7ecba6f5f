"""Policy-gradient losses per token. A loss is a formula; how tokens are summed is `aggregation`.

Shapes: B responses, S positions; all tensors are (B, S) unless said otherwise. ρ is the ratio
π_θ / π_old, A the advantage. Clipping keeps ρ within [1 − clip_low, 1 + clip_high].

`LOSSES` holds what `loss.type` can be. All have one signature, so that the learner calls any of
them; what a formula has no use for is ignored. Positions off the mask may hold anything.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

import torch
from torch import Tensor

from grpo_trainable.algo.masking import zero_off_mask
from grpo_trainable.algo.ratios import bounded_log_ratio, sequence_ratio, token_ratio

_T = TypeVar("_T")


class TokenLoss(Protocol):
    """Loss per token, (B, S); 0 off the mask."""

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
    ) -> Tensor: ...


def _clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """−min(ρA, clip(ρ)A)."""
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def _clip_is_active(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Whether the min above took the clipped term: ρ out of range on the side that A favours."""
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return clipped * advantages < ratio * advantages


def policy_gradient(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """−A·log π per token; no ratio, no clip (REINFORCE)."""
    return -zero_off_mask(advantages, mask) * zero_off_mask(log_probs, mask)


def grpo_clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """−min(ρA, clip(ρ)A) per token (arXiv 2402.03300: 0.2, 0.2; DAPO 2503.14476: 0.2, 0.28)."""
    ratio = token_ratio(log_probs, old_log_probs, mask)
    return _clipped_surrogate(ratio, zero_off_mask(advantages, mask), clip_low, clip_high)


def cispo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """−sg[min(ρ, 1 + clip_high)]·A·log π per token: the weight is clipped, never the gradient.

    The paper (arXiv 2506.13585) sets no lower bound, so `clip_low` has no use here.
    """
    weight = token_ratio(log_probs, old_log_probs, mask).clamp(max=1 + clip_high).detach()
    return -weight * zero_off_mask(advantages, mask) * zero_off_mask(log_probs, mask)


def gspo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """−min(sA, clip(s)A), one ratio s per response (arXiv 2507.18071: 3e-4, 4e-4)."""
    ratio = sequence_ratio(log_probs, old_log_probs, mask)
    return _clipped_surrogate(ratio, zero_off_mask(advantages, mask), clip_low, clip_high)


LOSSES: dict[str, TokenLoss] = {
    "no_baseline": policy_gradient,
    "reinforce_with_baseline": policy_gradient,
    "grpo_clip": grpo_clip,
    # The same formula: what makes it DAPO is a clip_high above clip_low.
    "dapo": grpo_clip,
    "cispo": cispo,
    "gspo": gspo,
}


def clipped_tokens(
    loss_type: str,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """Tokens that `loss_type` clips, what `loss/clip_fraction` counts: bool (B, S), False off mask.

    For `cispo` these are the tokens of a cut weight; for the others those whose ratio (of the
    response for `gspo`) left the range on the side that A favours, so that they give no gradient.
    """
    if loss_type in ("no_baseline", "reinforce_with_baseline"):
        return torch.zeros_like(log_probs, dtype=torch.bool)
    if loss_type == "cispo":
        return token_ratio(log_probs, old_log_probs, mask) > 1 + clip_high
    ratio_of = sequence_ratio if loss_type == "gspo" else token_ratio
    ratio = ratio_of(log_probs, old_log_probs, mask)
    return _clip_is_active(ratio, zero_off_mask(advantages, mask), clip_low, clip_high)


def compute_naive_policy_gradient_loss(
    raw_rewards_or_advantages: Tensor, policy_log_probs: Tensor
) -> Tensor:
    """−A·log π per token, (B, S); A is (B, 1)."""
    return -raw_rewards_or_advantages * policy_log_probs


def compute_grpo_clip_loss(
    advantages: Tensor, policy_log_probs: Tensor, old_log_probs: Tensor, cliprange: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """−min(ρA, clip(ρ)A) per token, (B, S), and `clipped`, 1.0 where the clipped term was taken.

    A is (B, 1), ρ = exp(policy_log_probs − old_log_probs), at most e^20 (`ratios`), clipped to
    [1 − cliprange, 1 + cliprange]. DeepSeekMath, arXiv 2402.03300.
    """
    ratio = bounded_log_ratio(policy_log_probs - old_log_probs).exp()
    loss = _clipped_surrogate(ratio, advantages, cliprange, cliprange)
    return loss, {"clipped": _clip_is_active(ratio, advantages, cliprange, cliprange).float()}


def compute_policy_gradient_loss(
    policy_log_probs: Tensor,
    loss_type: str,
    raw_rewards: Tensor | None = None,
    advantages: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    cliprange: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Per-token loss (B, S) of `loss_type`, and its metadata; rewards and advantages are (B, 1).

    `no_baseline` needs raw_rewards; `reinforce_with_baseline` advantages; `grpo_clip` advantages,
    old_log_probs and cliprange. ValueError names a missing argument or an unknown `loss_type`.
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
