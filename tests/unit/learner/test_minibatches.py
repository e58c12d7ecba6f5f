"""The rows of each microbatch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_trainable.config import GRPOConfig
from grpo_trainable.learner.minibatches import microbatches
from grpo_trainable.protocol.rollout import TrainBatch


def batch_of(lengths: list[int]) -> TrainBatch:
    """Return a batch whose rows have these lengths.

    A length counts prompt and response tokens, minus the last token.
    """
    shape = (len(lengths), max(lengths))
    mask = torch.zeros(shape, dtype=torch.bool)
    for row, length in enumerate(lengths):
        mask[row, length - 1] = True
    ids, zeros = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
    return TrainBatch(
        input_ids=ids,
        target_ids=ids,
        response_mask=mask,
        behaviour_log_probs=zeros,
        advantages=zeros,
    )


def parts(lengths: list[int], *, packing: bool = False, **optim: int) -> list[list[int]]:
    model, rollout = {"packing": packing}, {"max_new_tokens": 1}
    config = GRPOConfig.from_dict({"optim": optim, "rollout": rollout, "model": model})
    return [rows.tolist() for rows in microbatches(batch_of(lengths), config)]


def test_a_microbatch_has_a_number_of_rows():
    assert parts([3, 1, 2, 3, 1], microbatch=2) == [[1, 4], [2, 0], [3]]


def test_a_microbatch_has_a_number_of_tokens_with_their_padding():
    # Padded, the rows of length 1, 1 and 2 are 3 x 2 tokens. A fourth row would make them 4 x 3.
    assert parts([3, 1, 2, 3, 1], microbatch_tokens=6) == [[1, 4, 2], [0, 3]]
    assert parts([3, 1, 2, 3, 1], microbatch_tokens=5) == [[1, 4], [2], [0], [3]]
    assert parts([3, 1, 2, 3, 1], microbatch_tokens=100) == [[1, 4, 2, 0, 3]]


def test_a_row_that_is_too_long_is_alone():
    assert parts([9, 1, 9], microbatch_tokens=4) == [[1], [0], [2]]


def test_packed_rows_keep_their_order():
    assert parts([3, 1, 2, 3, 1], packing=True, microbatch=2) == [[0, 1], [2, 3], [4]]
    # Padded, the rows of length 3 and 1 are 2 x 3 tokens. A third row would make them 3 x 3.
    assert parts([3, 1, 2, 1], packing=True, microbatch_tokens=6) == [[0, 1], [2, 3]]


def test_rows_of_a_policy_without_text_are_sorted_because_they_are_never_packed():
    config = GRPOConfig.from_dict({"task": {"name": "control"}, "optim": {"microbatch": 2}})
    assert config.model.packing  # the default, which has no effect
    found = [rows.tolist() for rows in microbatches(batch_of([3, 1, 2, 3, 1]), config)]
    assert found == [[1, 4], [2, 0], [3]]


@pytest.mark.slow
@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(1, 80), st.booleans())
def test_every_row_is_in_one_microbatch_that_fits(lengths: list[int], tokens: int, packing: bool):
    found = parts(lengths, packing=packing, microbatch_tokens=tokens)
    assert sorted(row for rows in found for row in rows) == list(range(len(lengths)))
    for rows in found:
        assert len(rows) == 1 or len(rows) * max(lengths[row] for row in rows) <= tokens
