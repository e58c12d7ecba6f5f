"""From losses per token to one number. The denominator belongs to the whole gradient step.

A gradient step sums its microbatches, each divided by the same denominator, so any split into
microbatches (and later over learners), of equal sizes or not, gives the same gradient.
"""

from __future__ import annotations

from torch import Tensor

from grpo_trainable.algo.masking import masked_row_mean, masked_sum

# The values of `loss.aggregation`:
# sequence_mean  mean of each response, then mean of the responses (GRPO, arXiv 2402.03300)
# token_mean     mean of all tokens (DAPO, arXiv 2503.14476)
# constant       sum of each response over max tokens, then mean (Dr. GRPO, arXiv 2503.20783)
AGGREGATIONS = ("sequence_mean", "token_mean", "constant")


def loss_denominator(aggregation: str, mask: Tensor, max_tokens: int) -> float:
    """The number that divides every microbatch's sum; `mask` (B, S) is the whole gradient step's.

    `max_tokens` is the most tokens a response can have; only `constant` uses it. An empty response
    counts as a response. ValueError for an unknown `aggregation`.
    """
    _check(aggregation)
    num_responses = float(mask.shape[0])
    if aggregation == "sequence_mean":
        return num_responses
    if aggregation == "token_mean":
        # A step without a single token has loss 0, not 0 / 0.
        return max(mask.bool().sum().item(), 1.0)
    return num_responses * max_tokens


def aggregate(
    token_loss: Tensor, mask: Tensor, aggregation: str, denominator: float | Tensor
) -> Tensor:
    """This microbatch's share of the loss of its gradient step, a scalar.

    `token_loss` and `mask` are (B, S) of the microbatch; `denominator` is `loss_denominator` of
    the step. The shares add up to the loss. ValueError for an unknown `aggregation`.

    What a token weighs says how length biases the gradient. In a step of two responses, of 1 and of
    3 tokens where 4 are allowed, each token of the short one and of the long one weighs

        sequence_mean  1/2 and 1/6: a long response is spread thin, good or bad
        token_mean     1/4 and 1/4: it weighs three times as much as the short one in all
        constant       1/8 and 1/8: the same, and no other response's length changes it
    """
    _check(aggregation)
    if aggregation == "sequence_mean":
        return masked_row_mean(token_loss, mask).sum() / denominator
    return masked_sum(token_loss, mask) / denominator


def _check(aggregation: str) -> None:
    if aggregation not in AGGREGATIONS:
        raise ValueError(
            f"aggregation must be one of {', '.join(AGGREGATIONS)}, got {aggregation!r}"
        )
