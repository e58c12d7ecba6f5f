"""Log-probs of given tokens under a policy, differentiable for the learner.

B rows, S positions, T positions on the mask, D d_model, V size of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_trainable.models.policy import Policy, widened
from grpo_trainable.models.shape import HELD

# Number of rows of logits that are turned into probabilities together: 64 x 4096 float32 numbers
# fit into the L2 cache of a core.
CHUNK = 64


class _Law(NamedTuple):
    """The distribution that the tokens of T rows are sampled from."""

    temperature: float
    end_ids: Sequence[int]
    early_T: Tensor | None  # True for rows that must not end yet; None if all rows may end

    def of(self, rows: slice) -> _Law:
        return self if self.early_T is None else self._replace(early_T=self.early_T[rows])


class _HeadLogProbs(torch.autograd.Function):
    """Computes log softmax(hidden @ weight.T / temperature)[target] with little memory.

    Logits and log-softmax are never in memory at the same time. Rows go through the head in blocks
    of at most `HELD` probabilities. With one block, the forward pass keeps the block's
    probabilities, and the backward pass turns them into the gradient in place. With several blocks,
    the backward pass recomputes the probabilities of each block, so that memory does not grow with
    rows x vocabulary.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, law: _Law
    ) -> tuple[Tensor, Tensor]:
        """Return log p(target) and the entropy of p, both (T,)."""
        blocks = _blocks(len(hidden_TD), len(weight_VD))
        scored, probs_TV = [], None
        for rows in blocks:
            probs_TV = None  # frees the previous block before the next is computed
            probs_TV = _logits(hidden_TD[rows], weight_VD)
            scored.append(_become_probs(probs_TV, targets_T[rows], law.of(rows)))
        log_probs_T, entropy_T = (torch.cat(parts) for parts in zip(*scored, strict=True))
        kept_TV = probs_TV if len(blocks) == 1 else None
        ctx.save_for_backward(hidden_TD, weight_VD, targets_T, kept_TV)
        ctx.law, ctx.blocks = law, blocks
        ctx.mark_non_differentiable(entropy_T)
        return log_probs_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor | None, None, None]:
        """Return the gradients of hidden states and weight."""
        hidden_TD, weight_VD, targets_T, kept_TV = ctx.saved_tensors
        scale_T = grads[0] / ctx.law.temperature
        hidden_grads, weight_grad = [], None
        for rows in ctx.blocks:
            grad_TV = kept_TV  # frees the previous block, as in the forward pass
            if grad_TV is None:
                grad_TV = _logits(hidden_TD[rows], weight_VD)
                _become_probs(grad_TV, targets_T[rows], ctx.law.of(rows))
            _become_gradient(grad_TV, targets_T[rows], scale_T[rows])
            grad_TV = grad_TV.to(weight_VD.dtype)
            hidden_grads.append(grad_TV @ weight_VD)
            if not ctx.needs_input_grad[1]:
                continue
            if weight_grad is None:
                weight_grad = grad_TV.t() @ hidden_TD[rows]
            else:
                weight_grad.addmm_(grad_TV.t(), hidden_TD[rows])
        hidden_grad = hidden_grads[0] if len(hidden_grads) == 1 else torch.cat(hidden_grads)
        return hidden_grad, weight_grad, None, None


def _blocks(count: int, vocab_size: int) -> list[slice]:
    """Return the rows of each block, or a single empty block if there are no rows."""
    size = max(1, HELD // vocab_size)
    return [slice(start, min(start + size, count)) for start in range(0, max(1, count), size)]


def _logits(hidden_TD: Tensor, weight_VD: Tensor) -> Tensor:
    """Return logits (T, V) in new memory.

    One product computes all rows. With one product per chunk, each product would read all weights
    again.
    """
    return widened(hidden_TD @ weight_VD.t())


def _become_probs(logits_TV: Tensor, targets_T: Tensor, law: _Law) -> tuple[Tensor, Tensor]:
    """Turn logits into probabilities in place; return log p(target) and the entropy, (T,)."""
    count = len(logits_TV)
    log_probs_T = logits_TV.new_empty(count)
    entropy_T = logits_TV.new_empty(count)
    for start in range(0, count, CHUNK):
        rows = slice(start, min(start + CHUNK, count))
        logits = logits_TV[rows].div_(law.temperature)
        if law.early_T is not None:
            for end_id in law.end_ids:
                logits[law.early_T[rows], end_id] = -torch.inf
        logits.sub_(logits.amax(dim=-1, keepdim=True))
        chosen = logits.gather(1, targets_T[rows, None])[:, 0]
        probs = logits.exp()
        total = probs.sum(dim=-1)
        log_total = total.log()
        log_probs_T[rows] = chosen - log_total
        probs.div_(total[:, None])
        if law.early_T is not None:  # without `early_T`, all logits are finite
            # The entropy is -sum p log p. xlogy would be exact for p = 0, but a clamp costs less.
            logits.clamp_(min=torch.finfo(logits.dtype).min)
        entropy_T[rows] = log_total - torch.linalg.vecdot(probs, logits)
        logits_TV[rows] = probs
    return log_probs_T, entropy_T


def _become_gradient(probs_TV: Tensor, targets_T: Tensor, scale_T: Tensor) -> None:
    """Turn probabilities, in place, into the gradient of log p(target) times `scale_T`.

    The gradient is with respect to the logits before they are divided by the temperature.
    """
    probs_TV.mul_(-scale_T[:, None])
    probs_TV.scatter_add_(1, targets_T[:, None], scale_T[:, None])


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
    """Return log p(target | input) and the entropy of p, both (B, S), 0 off the mask, in nats.

    p is the distribution that responses are sampled from: logits are divided by `temperature`, and
    `end_ids` are impossible among a row's first `min_new_tokens` - 1 sampled tokens. Only positions
    on the mask run through the head. The entropy carries no gradient.
    """
    return state_log_probs(
        model,
        response_states(model, input_ids, response_mask),
        target_ids,
        response_mask,
        temperature=temperature,
        min_new_tokens=min_new_tokens,
        end_ids=end_ids,
    )


def response_states(model: Policy, input_ids: Tensor, response_mask: Tensor) -> Tensor:
    """Return the hidden states (T, D) that predict the response tokens, in the order of rows."""
    return model.states_at(input_ids, response_mask)


def state_log_probs(
    model: Policy,
    hidden_TD: Tensor,
    target_ids: Tensor,
    response_mask: Tensor,
    *,
    temperature: float,
    min_new_tokens: int,
    end_ids: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Return the same as `response_log_probs`, given the `response_states` of the input."""
    hidden_TD, weight_VD = model.head_operands(hidden_TD)
    early_T = None
    if min_new_tokens > 1:
        sampled_before = response_mask.cumsum(dim=1) - 1
        early_T = sampled_before[response_mask] < min_new_tokens - 1
    log_probs_T, entropy_T = _HeadLogProbs.apply(
        hidden_TD, weight_VD, target_ids[response_mask], _Law(temperature, end_ids, early_T)
    )
    log_probs = torch.zeros_like(response_mask, dtype=log_probs_T.dtype)
    entropy = torch.zeros_like(log_probs)
    return (
        log_probs.masked_scatter(response_mask, log_probs_T),
        entropy.masked_scatter(response_mask, entropy_T),
    )
