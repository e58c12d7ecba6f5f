"""Loss and gradient of one microbatch, for microbatches of equal size.

The learner uses `objective` instead, because its microbatches may differ in size.
"""

from __future__ import annotations

from torch import Tensor

from grpo_trainable.algo.losses import compute_policy_gradient_loss
from grpo_trainable.algo.masking import masked_row_mean, zero_off_mask


def grpo_microbatch_train_step(
    policy_log_probs: Tensor,
    response_mask: Tensor,
    gradient_accumulation_steps: int,
    loss_type: str,
    raw_rewards: Tensor | None = None,
    advantages: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    cliprange: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the loss of a microbatch, call backward on it, and return the loss and its metadata.

    The loss is the mean over each response's tokens, then over the B responses, divided by
    `gradient_accumulation_steps`. The loss is returned as a detached scalar. A response with an
    empty mask has a loss of 0. Off the mask, log-probs may hold anything. The other arguments and
    the errors are the same as for `compute_policy_gradient_loss`.
    """
    token_loss, metadata = compute_policy_gradient_loss(
        zero_off_mask(policy_log_probs, response_mask),
        loss_type,
        raw_rewards,
        advantages,
        None if old_log_probs is None else zero_off_mask(old_log_probs, response_mask),
        cliprange,
    )
    loss = masked_row_mean(token_loss, response_mask).mean() / gradient_accumulation_steps
    loss.backward()
    return loss.detach(), metadata
