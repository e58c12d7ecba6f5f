"""Snapshots cut into parts: each byte is in exactly one part, and the parts restore the tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_trainable.protocol.checksums import storage_checksum
from grpo_trainable.protocol.rollout import LiveWeights
from grpo_trainable.transports.chunks import (
    PARTS,
    Assembly,
    TimeLeft,
    cut,
    in_turn,
    parts_for,
    pieces_of_parts,
)
from grpo_trainable.transports.packing import Layout, layout_for, pack

MB = 1 << 20
SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
TYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8])


def described(layout: Layout, count: int) -> list[list[tuple[str, int, int]]]:
    parts = pieces_of_parts(layout, count)
    return [[(piece.place.name, piece.start, piece.end) for piece in part] for part in parts]


def test_parts_are_cut_where_the_bytes_say_and_not_the_tensors() -> None:
    # 40 and 24 floats are 160 and 96 bytes. Tensors start at multiples of 64 bytes, so they take
    # 192 and 128 bytes, 320 together. A third of 320 is 107.
    layout = layout_for({"a": torch.zeros(40), "b": torch.zeros(24)})
    assert layout.size == 320
    assert described(layout, 3) == [
        [("a", 0, 107)],
        [("a", 107, 160), ("b", 0, 22)],
        [("b", 22, 96)],
    ]


@pytest.mark.parametrize(
    ("size", "parts"), [(0, 1), (100, 1), (2 * MB, 2), (16 * MB, 16), (3000 * MB, PARTS)]
)
def test_parts_are_a_mebibyte_or_more_and_at_most_16(size: int, parts: int) -> None:
    assert parts_for(Layout((), size)) == parts


@pytest.mark.slow
@settings(max_examples=25)
@given(
    st.dictionaries(st.text("abc", min_size=1), st.tuples(SHAPES, TYPES, st.booleans())),
    st.integers(1, 7),
    st.randoms(use_true_random=False),
)
def test_parts_make_the_snapshot_again_in_whatever_order_they_come(shapes, count, random) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, (shape, dtype, turned) in shapes.items():
        tensor = torch.randint(0, 100, shape, generator=generator).to(dtype)
        tensors[name] = tensor.permute(list(reversed(range(len(shape))))) if turned else tensor
    layout = layout_for(tensors)
    parts = cut(tensors, layout, count)
    order = list(range(count))
    random.shuffle(order)

    assembly = Assembly(layout, count)
    for part in order:
        assembly.put(part, [array.copy() for array in parts[part]])

    made = layout.of(assembly.buffer)
    assert made.keys() == tensors.keys()
    assert all(torch.equal(made[name], tensor) for name, tensor in tensors.items())
    assert storage_checksum(made) == storage_checksum(tensors)
    largest = max(sum(map(len, part)) for part in parts)
    assert largest <= -(-layout.size // count)


def test_tensors_with_gaps_and_without_elements_travel_as_well() -> None:
    tensors = {"every_other": torch.arange(20.0)[::2], "none": torch.zeros(0, 3)}
    layout = layout_for(tensors)
    assembly = Assembly(layout, 2)
    for part, arrays in enumerate(cut(tensors, layout, 2)):
        assembly.put(part, arrays)
    assert layout.of(assembly.buffer)["every_other"].tolist() == list(range(0, 20, 2))


def test_a_part_that_is_missing_or_mixed_up_is_seen_by_the_checksum() -> None:
    tensors = {"a": torch.arange(5000.0), "b": torch.arange(3000.0) + 7}
    layout = layout_for(tensors)
    buffer = torch.empty(layout.size, dtype=torch.uint8)
    packed = pack(LiveWeights(version=1, round=1, tensors=tensors), layout.of(buffer), layout)
    parts, others = (
        cut(each, layout, 4) for each in (tensors, {n: -t for n, t in tensors.items()})
    )
    assembly = Assembly(layout, 4)
    for part, arrays in enumerate([*parts[:2], others[2], parts[3]]):
        assembly.put(part, arrays)
    assert storage_checksum(packed.unpacked(assembly.buffer).tensors) != packed.checksum
    assembly.put(2, parts[2])
    assert storage_checksum(packed.unpacked(assembly.buffer).tensors) == packed.checksum


def test_four_receivers_begin_a_quarter_of_the_parts_apart() -> None:
    assert [in_turn(16, index / 4)[0] for index in range(4)] == [0, 4, 8, 12]
    assert in_turn(4, 0.5) == [2, 3, 0, 1]
    assert in_turn(1, 0.9) == [0]


@pytest.mark.slow
@given(st.integers(1, 16), st.floats(0, 1, exclude_max=True))
def test_every_receiver_fetches_every_part_once(count: int, first: float) -> None:
    assert sorted(in_turn(count, first)) == list(range(count))


def test_the_seconds_that_are_left_never_grow_nor_go_below_none() -> None:
    left = TimeLeft(30.0)
    assert 30.0 >= left() >= left() > 0.0
    assert TimeLeft(-1.0)() == 0.0
