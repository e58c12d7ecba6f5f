from __future__ import annotations

import dataclasses
import pickle

import pytest
import torch

from grpo_trainable import rollout
from grpo_trainable.rollout import (
    RolloutGroup,
    TrainBatch,
    checksum,
    collate,
    storage_checksum,
)

PAD = 99


def group(prompt, responses, mask, *, rounds=None, versions=None, log_probs=None) -> RolloutGroup:
    ids = torch.tensor(responses)
    return RolloutGroup(
        cursor=0,
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
    """Prompts of three tokens and of one; a hole in the first mask; trailing padding elsewhere."""
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


def test_rows_cuts_trailing_padding_only():
    batch = two_groups()
    last = batch.rows(slice(2, 3))
    assert last.input_ids.tolist() == [[4, 3]]
    assert last.target_ids.tolist() == [[3, 2]]
    assert last.advantages.tolist() == [[2, 2]]
    first = batch.rows(torch.tensor([0]))
    assert first.input_ids.tolist() == [[5, 6, 7, 8, 9]]
    assert first.response_mask.int().tolist() == [[0, 0, 1, 0, 1]]
    picked = batch.rows(torch.tensor([2, 1]))
    assert picked.input_ids.tolist() == [[4, 3, PAD, PAD], [5, 6, 7, 8]]
    assert picked.behaviour_log_probs.tolist() == [[-3, -2, 0, 0], [0, 0, -8, -2]]


def test_rows_without_a_single_response_token_keep_one_column():
    batch = collate([group([5, 6], [[8], [0]], [[1], [0]])], [torch.ones(2)], PAD)
    assert batch.rows(slice(1, 2)).input_ids.shape == (1, 1)


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


def test_checksum_catches_a_flipped_bit():
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4)}
    before = checksum(tensors)
    tensors["b"].view(torch.int32)[2] ^= 1
    assert checksum(tensors) != before
    tensors["b"].view(torch.int32)[2] ^= 1
    assert checksum(tensors) == before


@pytest.mark.parametrize("of", [checksum, storage_checksum])
def test_checksums_catch_swapped_names_shapes_and_types(of):
    a, b = torch.arange(6.0), torch.ones(6)
    whole = of({"a": a, "b": b})
    assert of({"a": b, "b": a}) != whole
    assert of({"a": a.view(2, 3), "b": b}) != whole
    assert of({"a": a.view(torch.int32), "b": b}) != whole
    assert of({"a": a}) != whole


def test_checksum_is_that_of_the_values_not_of_order_or_layout():
    a, b = torch.arange(6.0).view(2, 3), torch.ones(6)
    by_column = a.t().contiguous().t()
    assert checksum({"b": b, "a": by_column}) == checksum({"a": a, "b": b})


def test_storage_checksum_catches_a_flipped_bit_anywhere():
    """In a whole block of 4 KiB, and in what is left after the last one."""
    for numel in (3, 1024, 2500):
        for place in (0, numel // 2, numel - 1):
            tensors = {"a": torch.arange(float(numel)), "b": torch.ones(4)}
            before = storage_checksum(tensors)
            tensors["a"].view(torch.int32)[place] ^= 1 << 30
            assert storage_checksum(tensors) != before


def test_storage_checksum_catches_blocks_of_another_version():
    old, new = torch.randn(4096), torch.randn(4096)
    torn = torch.cat((new[:2048], old[2048:]))
    assert len({storage_checksum({"a": a}) for a in (old, new, torn)}) == 3
    swapped = torch.cat((new[2048:], new[:2048]))
    assert storage_checksum({"a": swapped}) != storage_checksum({"a": new})


def test_storage_checksum_catches_the_same_bytes_read_by_column():
    square = torch.arange(4.0).view(2, 2)
    assert storage_checksum({"a": square.t()}) != storage_checksum({"a": square})


LAYOUTS = {
    "by_row": lambda t: t,
    "by_column": lambda t: t.t().contiguous().t(),
    "every_other": lambda t: t.repeat_interleave(2, dim=1)[:, ::2],
    "askew": lambda t: torch.cat((torch.zeros(1), t.flatten()))[1:].view(t.shape),
    "of_one_row": lambda t: t[:1],
    "empty": lambda t: t[:0],
    "short": lambda t: t.to(torch.bfloat16),
}


@pytest.mark.parametrize("stored", LAYOUTS)
@pytest.mark.parametrize("room", ["empty_like", "by_row"])
def test_what_is_copied_on_the_way_has_the_checksum_that_was_taken(stored, room, monkeypatch):
    monkeypatch.setattr(rollout, "PIECE_BYTES", 2 * rollout.BLOCK_BYTES)
    tensor = LAYOUTS[stored](torch.randn(70, 100))
    tensors = {"a": tensor, "left_out": torch.randn(5000)}
    by_row = torch.empty(tensor.shape, dtype=tensor.dtype)
    copy = torch.empty_like(tensor) if room == "empty_like" else by_row
    before = copy.stride()
    whole = storage_checksum(tensors)
    assert storage_checksum(tensors, copies={"a": copy}) == whole
    assert copy.equal(tensor)
    assert copy.stride() == before
    if copy.stride() == torch.empty_like(tensor).stride():
        assert storage_checksum(tensors | {"a": copy}) == whole


def test_storage_checksum_does_not_depend_on_the_pieces(monkeypatch):
    tensors = {"a": torch.randn(70, 100)}
    whole = storage_checksum(tensors)
    monkeypatch.setattr(rollout, "PIECE_BYTES", rollout.BLOCK_BYTES)
    assert storage_checksum(tensors) == whole


def test_storage_checksum_is_that_of_what_is_there_not_of_where_it_lies():
    a = torch.randn(3000)
    askew = torch.empty(3001)[1:].copy_(a)
    assert storage_checksum({"b": a[:9], "a": askew}) == storage_checksum({"a": a, "b": a[:9]})
    one = torch.randn(1, 8)
    assert storage_checksum({"a": one}) == storage_checksum({"a": one.t().contiguous().t()})


def test_checksum_takes_a_tensor_without_dimensions_and_an_empty_one():
    assert checksum({"step": torch.tensor(3.0)}) != checksum({"step": torch.tensor(4.0)})
    assert checksum({"none": torch.zeros(0)}) == checksum({"none": torch.ones(0)})


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
