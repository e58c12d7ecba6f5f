"""Split a round's batches into the rows of each gradient step and of each microbatch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import count, islice

import numpy as np
import torch
from torch import Tensor

from grpo_trainable.config import GRPOConfig
from grpo_trainable.learner.ranks import ALONE, Ranks, deal
from grpo_trainable.models.policy import ActingPolicy
from grpo_trainable.protocol.rollout import TrainBatch
from grpo_trainable.telemetry.progress import advance


def step_rows(
    config: GRPOConfig, round_: int, batches: Sequence[TrainBatch]
) -> Iterator[tuple[int, Tensor]]:
    """For each gradient step, yield the index of a batch and the rows of this batch to train on.

    `k_mode` decides how the rows are chosen. With `k_mode=minibatches`, the groups of the batch are
    shuffled and divided among parts. Each group stays whole. If there are fewer groups than parts,
    the empty parts are left out.
    """
    match config.k_mode:
        case "fresh_batches":
            yield from ((b, torch.arange(batch.num_rows)) for b, batch in enumerate(batches))
        case "same_batch":
            (batch,) = batches
            yield from ((0, torch.arange(batch.num_rows)) for _ in range(config.k))
        case "minibatches":
            (batch,) = batches
            yield from ((0, rows) for rows in _minibatches(config, round_, batch.num_rows))


def _minibatches(config: GRPOConfig, round_: int, num_rows: int) -> Iterator[Tensor]:
    groups = torch.arange(num_rows).view(-1, config.rollout.group_size)
    epochs = config.optim.epochs
    for epoch in range(epochs):
        rng = np.random.default_rng((config.seed, round_, epoch))
        order = torch.from_numpy(rng.permutation(len(groups)))
        for part in order.tensor_split(config.k // epochs):
            if len(part):
                yield groups[part].flatten()


def microbatches(batch: TrainBatch, config: GRPOConfig, ranks: Ranks = ALONE) -> Iterator[Tensor]:
    """Yield the rows of each microbatch.

    A microbatch has `optim.microbatch` rows, or as many rows as fit into `optim.microbatch_tokens`,
    padding included. Rows of similar length share a microbatch, because padding is wasted work.
    With `model.packing`, rows stay in order instead, so the rows of a prompt are processed together
    and share the prompt.

    If there are several `ranks`, each rank gets different microbatches. Together, the microbatches
    of all ranks contain every row exactly once.
    """
    position = torch.arange(batch.response_mask.shape[1], device=batch.response_mask.device)
    lengths = (batch.response_mask * position).amax(dim=1)
    order = torch.sort(lengths, stable=True).indices
    if config.model.packing and config.reads("model.packing"):
        order = torch.arange(len(lengths), device=lengths.device)
    tokens, optim = (lengths + 1).tolist(), config.optim
    if optim.microbatch_tokens is None:
        parts = list(order.split(optim.microbatch))
    else:
        in_order = [tokens[row] for row in order.tolist()]
        parts = list(_within(order, in_order, optim.microbatch_tokens))
    hands = deal(parts, lambda rows: len(rows) * max(tokens[r] for r in rows.tolist()), ranks.size)
    for rows in hands[ranks.rank]:
        yield rows
        advance()


def largest_microbatch(
    config: GRPOConfig, prompt_tokens: int, end_ids: Collection[int]
) -> TrainBatch:
    """Return an artificial microbatch with the largest shape that this config allows.

    Each row repeats one token that is not in `end_ids`, because end ids may have probability 0 at
    the beginning of a response. Adjacent rows have different tokens, so packing finds nothing to
    share.

    Args:
        config: The trial's settings.
        prompt_tokens: Number of tokens in the longest prompt.
        end_ids: The tokens that may end a response.
    """
    rollout, optim = config.rollout, config.optim
    length = prompt_tokens + rollout.max_new_tokens - 1
    most = optim.microbatch
    if optim.microbatch_tokens is not None:
        most = max(1, optim.microbatch_tokens // length)
    shape = (min(most, rollout.prompts * rollout.group_size), length)
    one, other = islice((token for token in count() if token not in end_ids), 2)
    ids = torch.full(shape, one)
    ids[1::2] = other
    zeros = torch.zeros(shape)
    mask = torch.zeros(shape, dtype=torch.bool)
    mask[:, prompt_tokens - 1 :] = True
    return TrainBatch(
        input_ids=ids,
        target_ids=ids,
        response_mask=mask,
        behaviour_log_probs=zeros,
        advantages=zeros,
    )


def with_observations(batch: TrainBatch, policy: ActingPolicy) -> TrainBatch:
    """Adapt an artificial batch to an `ActingPolicy`. All observations and actions are 0."""
    shape, numbers = batch.input_ids.shape, policy.action_numbers
    return replace(
        batch,
        target_ids=torch.zeros_like(batch.target_ids),
        observations=torch.zeros(*shape, *policy.observation_shape),
        actions=torch.zeros(*shape, numbers) if numbers else None,
    )


def _within(order: Tensor, tokens: Sequence[int], at_most: int) -> Iterator[Tensor]:
    """Split `order` into parts whose padded size stays within `at_most` tokens.

    The padded size is the number of rows times the length of the longest row. Every part has at
    least one row, even if that row alone is too long.

    Args:
        order: Row indices.
        tokens: Number of tokens of each row in `order`.
        at_most: Maximum padded size of a part, in tokens.
    """
    start = longest = 0
    for end, length in enumerate(tokens, start=1):
        longest = max(longest, length)
        if end - start > 1 and (end - start) * longest > at_most:
            yield order[start : end - 1]
            start, longest = end - 1, length
    yield order[start:]
