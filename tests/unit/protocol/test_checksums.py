"""Checksums of weights, and copying that also computes a checksum."""

from __future__ import annotations

import pytest
import torch

from grpo_trainable.protocol import checksums
from grpo_trainable.protocol.checksums import checksum, copy_with_checksum, storage_checksum


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
    """Flip a bit in a whole block of 4 KiB and in the remainder after the last block."""
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
    monkeypatch.setattr(checksums, "PIECE_BYTES", 2 * checksums.BLOCK_BYTES)
    tensor = LAYOUTS[stored](torch.randn(70, 100))
    tensors = {"a": tensor, "left_out": torch.randn(5000)}
    by_row = torch.empty(tensor.shape, dtype=tensor.dtype)
    copy = torch.empty_like(tensor) if room == "empty_like" else by_row
    before = copy.stride()
    whole = storage_checksum(tensors)
    assert copy_with_checksum(tensors, {"a": copy}) == whole
    assert copy.equal(tensor)
    assert copy.stride() == before
    if copy.stride() == torch.empty_like(tensor).stride():
        assert storage_checksum(tensors | {"a": copy}) == whole


def test_storage_checksum_does_not_depend_on_the_pieces(monkeypatch):
    tensors = {"a": torch.randn(70, 100)}
    whole = storage_checksum(tensors)
    monkeypatch.setattr(checksums, "PIECE_BYTES", checksums.BLOCK_BYTES)
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
