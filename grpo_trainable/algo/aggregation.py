"""Aggregation of per-token losses into one number.

The denominator is computed once per gradient step. A step divides the loss sum of each microbatch
by this denominator and adds up the results. Therefore the gradient does not depend on how the step
is split into microbatches or over learners.
"""

from __future__ import annotations

from torch import Tensor

from grpo_trainable.algo.masking import masked_row_mean, masked_sum

# The values of `loss.aggregation`:
# sequence_mean  mean of each response, then mean of the responses (GRPO, arXiv 2402.03300)
# token_mean     mean of all tokens (DAPO, arXiv 2503.14476)
# constant       sum of each response / max_tokens, then mean (Dr. GRPO, arXiv 2503.20783)
AGGREGATIONS = ("sequence_mean", "token_mean", "constant")


def loss_denominator(aggregation: str, mask: Tensor, max_tokens: int) -> float:
    """Return the number by which a gradient step divides the loss sum of each microbatch.

    An empty response counts as a response.

    Args:
        aggregation: One of `AGGREGATIONS`.
        mask: Response mask of the whole gradient step, (B, S).
        max_tokens: Largest number of tokens in a response. Only `constant` uses it.

    Raises:
        ValueError: `aggregation` is unknown.
    """
    _check(aggregation)
    num_responses = float(mask.shape[0])
    if aggregation == "sequence_mean":
        return num_responses
    if aggregation == "token_mean":
        # With a denominator of 1, a step without any token has loss 0 instead of 0 / 0.
        return max(mask.bool().sum().item(), 1.0)
    return num_responses * max_tokens


def aggregate(
    token_loss: Tensor, mask: Tensor, aggregation: str, denominator: float | Tensor
) -> Tensor:
    """Return this microbatch's share of its gradient step's loss, as a scalar.

    The shares of all microbatches add up to the loss.

    The aggregation sets the weight of each token. These weights determine how the lengths of
    responses bias the gradient. For example, suppose that a step has two responses, of 1 and 3
    tokens, and that `max_tokens` is 4. A token of the short response and a token of the long
    response have these weights:

        sequence_mean  1/2 and 1/6: both responses weigh the same in total
        token_mean     1/4 and 1/4: the long response weighs three times as much in total
        constant       1/8 and 1/8: equal, and independent of the lengths of other responses

    Args:
        token_loss: Loss per token of the microbatch, (B, S).
        mask: Response mask of the microbatch, (B, S).
        aggregation: One of `AGGREGATIONS`.
        denominator: `loss_denominator` of the gradient step.

    Raises:
        ValueError: `aggregation` is unknown.
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
