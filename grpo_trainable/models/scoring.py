"""Log-probs of given tokens under a policy, which the learner differentiates.

B rows, S positions, T positions that count, D d_model, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_trainable.models.policy import Policy

# Rows of logits that are turned into probabilities at a time: 64 x 4096 float32 fit the
# second-level cache of a core.
CHUNK = 64


class _HeadLogProbs(torch.autograd.Function):
    """log softmax(hidden @ weight.T / temperature)[target] without ever holding logits and
    log-softmax at once: the forward pass keeps the probabilities, the backward pass turns them
    into the gradient in place."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        targets_T: Tensor,
        temperature: float,
        forbidden: tuple[Tensor, Sequence[int]] | None,
    ) -> tuple[Tensor, Tensor]:
        count = len(hidden_TD)
        # One product serves all rows: in chunks each would read all weights.
        probs_TV = hidden_TD @ weight_VD.t()
        log_probs_T = hidden_TD.new_empty(count)
        entropy_T = hidden_TD.new_empty(count)
        for start in range(0, count, CHUNK):
            rows = slice(start, min(start + CHUNK, count))
            logits = probs_TV[rows].div_(temperature)
            if forbidden is not None:
                for end_id in forbidden[1]:
                    logits[forbidden[0][rows], end_id] = -torch.inf
            logits.sub_(logits.amax(dim=-1, keepdim=True))
            chosen = logits.gather(1, targets_T[rows, None])[:, 0]
            probs = logits.exp()
            total = probs.sum(dim=-1)
            log_total = total.log()
            log_probs_T[rows] = chosen - log_total
            probs.div_(total[:, None])
            # The entropy is -sum p log p. xlogy would be exact for p = 0; a clamp costs less.
            entropy_T[rows] = log_total - torch.linalg.vecdot(
                probs, logits.clamp_(min=torch.finfo(logits.dtype).min)
            )
            probs_TV[rows] = probs
        ctx.save_for_backward(hidden_TD, weight_VD, targets_T, probs_TV)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy_T)
        return log_probs_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None, None, None]:
        hidden_TD, weight_VD, targets_T, grad_TV = ctx.saved_tensors
        scale_T = grads[0] / ctx.temperature
        grad_TV.mul_(-scale_T[:, None])
        grad_TV.scatter_add_(1, targets_T[:, None], scale_T[:, None])
        return grad_TV @ weight_VD, grad_TV.t() @ hidden_TD, None, None, None


def response_log_probs(
    model: Policy,
    input_ids: Tensor,
    target_ids: Tensor,
    response_mask: Tensor,
    *,
    temperature: float,
    min_new_tokens: int,
    end_ids: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """log p(target | input) and the entropy of p, both (B, S), 0 off the mask, in nats.

    p is the law that responses are sampled from: logits divided by `temperature`, `end_ids`
    impossible among a row's first `min_new_tokens` - 1 sampled tokens. Only positions on the mask
    run through the head. The entropy carries no gradient.
    """
    hidden_TD = model.hidden_states(input_ids)[response_mask]
    forbidden = None
    if min_new_tokens > 1:
        sampled_before = response_mask.cumsum(dim=1) - 1
        early = sampled_before[response_mask] < min_new_tokens - 1
        forbidden = (early, end_ids)
    log_probs_T, entropy_T = _HeadLogProbs.apply(
        hidden_TD, model.head_weight, target_ids[response_mask], temperature, forbidden
    )
    log_probs = torch.zeros_like(response_mask, dtype=log_probs_T.dtype)
    entropy = torch.zeros_like(log_probs)
    return (
        log_probs.masked_scatter(response_mask, log_probs_T),
        entropy.masked_scatter(response_mask, entropy_T),
    )
