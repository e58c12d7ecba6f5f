from __future__ import annotations

import dataclasses
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_trainable.protocol.rollout import (
    RolloutGroup,
    TrainBatch,
    as_rows,
    by_group,
    collate,
    extents,
)

PAD = 99


def group(prompt, responses, mask, *, rounds=None, versions=None, log_probs=None) -> RolloutGroup:
    ids = torch.tensor(responses)
    return RolloutGroup(
        prompt_index=0,
        prompt_ids=torch.tensor(prompt),
        response_ids=ids,
        response_mask=torch.tensor(mask, dtype=torch.bool),
        behaviour_log_probs=-ids.float() if log_probs is None else torch.tensor(log_probs),
        rewards=torch.zeros(len(ids)),
        finished=torch.zeros(len(ids), dtype=torch.bool),
        token_versions=torch.tensor(versions or torch.zeros_like(ids).tolist(), dtype=torch.int32),
        token_rounds=torch.tensor(rounds or torch.zeros_like(ids).tolist(), dtype=torch.int32),
    )


def two_groups() -> TrainBatch:
    """Return a batch of two groups, with prompts of 3 tokens and 1 token. One mask has a hole."""
    groups = [
        group([5, 6, 7], [[8, 9, 2], [8, 2, 0]], [[1, 0, 1], [1, 1, 0]]),
        group([4], [[3, 2]], [[1, 1]]),
    ]
    return collate(groups, [torch.tensor([0.5, -1.5]), torch.tensor([2.0])], PAD)


def test_collate_shifts_once_and_pads_on_the_right():
    batch = two_groups()
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9], [5, 6, 7, 8, PAD], [4, 3, PAD, PAD, PAD]]
    assert batch.target_ids.tolist() == [[6, 7, 8, 9, 2], [6, 7, 8, 2, PAD], [3, 2, PAD, PAD, PAD]]


def test_collate_aligns_mask_and_log_probs_with_the_targets_and_keeps_holes():
    batch = two_groups()
    assert batch.response_mask.int().tolist() == [[0, 0, 1, 0, 1], [0, 0, 1, 1, 0], [1, 1, 0, 0, 0]]
    assert batch.behaviour_log_probs.tolist() == [
        [0, 0, -8, 0, -2],
        [0, 0, -8, -2, 0],
        [-3, -2, 0, 0, 0],
    ]


def test_collate_gives_a_row_its_advantage_on_the_mask_and_zero_off_it():
    assert two_groups().advantages.tolist() == [
        [0, 0, 0.5, 0, 0.5],
        [0, 0, -1.5, -1.5, 0],
        [2, 2, 0, 0, 0],
    ]


def test_collate_cuts_every_response_after_the_last_token_of_its_mask():
    padded = group([5], [[8, 9, 2, 0, 0], [8, 2, 0, 0, 0]], [[1, 1, 1, 0, 0], [1, 1, 0, 0, 0]])
    assert collate([padded], [torch.ones(2)], PAD).input_ids.tolist() == [[5, 8, 9], [5, 8, PAD]]


def test_collate_keeps_the_row_of_an_empty_response():
    batch = collate([group([5, 6], [[8, 9], [0, 0]], [[1, 1], [0, 0]])], [torch.ones(2)], PAD)
    assert batch.input_ids.tolist() == [[5, 6, 8], [5, PAD, PAD]]
    assert batch.response_mask.int().tolist() == [[0, 1, 1], [0, 0, 0]]
    assert batch.advantages.tolist() == [[0, 1, 1], [0, 0, 0]]


def test_values_of_tokens_stand_where_collate_puts_the_tokens():
    groups = [
        group([5, 6, 7], [[8, 9, 2], [8, 2, 0]], [[1, 0, 1], [1, 1, 0]]),
        group([4], [[3, 2]], [[1, 1]]),
    ]
    values = [torch.tensor([[0.1, 0.0, 0.3], [0.4, 0.5, 0.0]]), torch.tensor([[0.7, 0.8]])]
    rows = torch.tensor([[0, 0, 0.1, 0, 0.3], [0, 0, 0.4, 0.5, 0], [0.7, 0.8, 0, 0, 0]])
    assert torch.equal(as_rows(groups, values), rows)
    for back, value in zip(by_group(groups, rows), values, strict=True):
        assert torch.equal(back, value)


@pytest.mark.slow
@given(st.data())
def test_rows_of_groups_and_back_are_the_same_values(data: st.DataObject):
    groups = []
    for _ in range(data.draw(st.integers(1, 3))):
        shape = (data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4)))
        bits = st.lists(st.booleans(), min_size=shape[1], max_size=shape[1])
        mask = [data.draw(bits) for _ in range(shape[0])]
        prompt = [7] * data.draw(st.integers(2, 4))
        groups.append(group(prompt, torch.ones(shape, dtype=torch.int64).tolist(), mask))
    values = [torch.randn(g.response_ids.shape) * g.response_mask for g in groups]

    rows = as_rows(groups, values)

    batch = collate(groups, [torch.ones(len(g.response_ids)) for g in groups], PAD)
    assert rows.shape == batch.response_mask.shape
    assert not rows[~batch.response_mask].any()
    assert all(map(torch.equal, by_group(groups, rows), values))


def test_rows_cuts_trailing_padding_only():
    batch = two_groups()
    last = batch.select(slice(2, 3))
    assert last.input_ids.tolist() == [[4, 3]]
    assert last.target_ids.tolist() == [[3, 2]]
    assert last.advantages.tolist() == [[2, 2]]
    first = batch.select(torch.tensor([0]))
    assert first.input_ids.tolist() == [[5, 6, 7, 8, 9]]
    assert first.response_mask.int().tolist() == [[0, 0, 1, 0, 1]]
    picked = batch.select(torch.tensor([2, 1]))
    assert picked.input_ids.tolist() == [[4, 3, PAD, PAD], [5, 6, 7, 8]]
    assert picked.behaviour_log_probs.tolist() == [[-3, -2, 0, 0], [0, 0, -8, -2]]


def test_rows_without_a_single_response_token_keep_one_column():
    batch = collate([group([5, 6], [[8], [0]], [[1], [0]])], [torch.ones(2)], PAD)
    assert batch.select(slice(1, 2)).input_ids.shape == (1, 1)


def test_oldest_counts_only_the_mask():
    mixed = group(
        [5],
        [[8, 9, 2], [8, 2, 0]],
        [[1, 0, 1], [1, 1, 0]],
        rounds=[[4, 1, 3], [5, 5, 0]],
        versions=[[8, 2, 6], [10, 7, 0]],
    )
    assert mixed.oldest_round == 3
    assert mixed.oldest_version == 6
    assert mixed.num_tokens == 4


def test_a_group_survives_the_journey_between_actors():
    sent = group([5, 6], [[8, 9], [2, 0]], [[1, 1], [1, 0]], rounds=[[3, 4], [3, 0]])

    arrived = pickle.loads(pickle.dumps(sent, protocol=5))

    for item in dataclasses.fields(RolloutGroup):
        before, after = getattr(sent, item.name), getattr(arrived, item.name)
        if isinstance(before, torch.Tensor):
            assert before.dtype == after.dtype
            assert torch.equal(before, after)
        else:
            assert before == after
    assert arrived.oldest_round == 3


def test_a_response_reaches_up_to_its_last_sampled_token():
    mask = [[1, 0, 1, 0], [0, 0, 0, 0], [0, 1, 1, 1], [1, 0, 0, 0]]
    own = group([9], [[1, 2, 3, 4]] * 4, mask)
    assert own.extents.tolist() == [3, 0, 4, 1]
    assert own.responses() == [[1, 2, 3], [], [1, 2, 3, 4], [1]]
    assert extents(torch.zeros(2, 0, dtype=torch.bool)).tolist() == [0, 0]
