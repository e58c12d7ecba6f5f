"""Safetensors files written in pieces equal the files that the library writes."""

from __future__ import annotations

import hashlib
import io
import json
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from grpo_trainable.storage.tensor_files import (
    DTYPES,
    PIECE_BYTES,
    HashedFile,
    TensorFileError,
    file_pieces,
    joined_pieces,
    read_tensors,
)


def tensors() -> dict[str, torch.Tensor]:
    """Return tensors of every dtype, scalars, empty tensors, and names that JSON has to escape."""
    numbers = torch.arange(24).view(2, 3, 4)
    return {
        **{f"of {code}": numbers.to(getattr(torch, dtype)) for code, dtype in DTYPES.items()},
        "b.scalar": torch.tensor(1.5),
        "a.scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        'naïve "name"\n\\': torch.zeros(3),
        "large": torch.arange(PIECE_BYTES, dtype=torch.int32),
        "one long row": torch.arange(PIECE_BYTES, dtype=torch.float32).view(1, 1, -1),
    }


def read(content: bytes) -> dict[str, torch.Tensor]:
    return read_tensors(HashedFile(io.BytesIO(content), lambda: None))


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype
        assert tensor.shape == theirs[name].shape
        assert tensor.equal(theirs[name])


@pytest.mark.parametrize("held", [tensors(), {}], ids=["all", "none"])
def test_a_file_has_the_bytes_that_the_library_writes(held):
    assert b"".join(file_pieces(held)) == save(held)


def test_a_file_of_the_library_is_read_bit_for_bit():
    assert_same(read(save(tensors())), tensors())
    # Metadata are not tensors.
    assert_same(read(save({"a": torch.ones(2)}, {"format": "pt"})), {"a": torch.ones(2)})


@pytest.mark.slow
def test_views_and_shared_memory_are_stored_by_value():
    storage = torch.arange(4.0 * PIECE_BYTES)
    by_column = storage.view(64, -1).t()
    parameter = torch.nn.Parameter(storage)
    held = {"whole": parameter, "by column": by_column, "second": storage[::2]}

    found = load(b"".join(file_pieces(held)))

    assert_same(found, {"whole": storage, "by column": by_column, "second": storage[::2]})


def test_no_piece_is_larger_than_said():
    by_column = torch.zeros(3, 5 * PIECE_BYTES // 4).t()
    pieces = list(file_pieces({"a": by_column, "b": torch.zeros(1, 3, PIECE_BYTES)}))
    assert len(pieces) > 20
    assert max(map(len, pieces)) <= PIECE_BYTES


def test_pieces_are_joined_to_messages():
    content = b"".join(file_pieces(tensors()))
    messages = list(joined_pieces(file_pieces(tensors()), 3 * PIECE_BYTES))
    assert b"".join(messages) == content
    assert len(messages) == 3
    assert max(map(len, messages)) < 4 * PIECE_BYTES


def test_what_is_read_is_hashed_and_counted():
    content = save({"a": torch.zeros(5, PIECE_BYTES // 4)})
    ticks: list[int] = []
    file = HashedFile(io.BytesIO(content), lambda: ticks.append(1))
    read_tensors(file)
    assert file.sha256() == hashlib.sha256(content).hexdigest()
    assert len(ticks) >= 5


def header_of(**entry: Any) -> bytes:
    whole = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **entry}
    header = json.dumps({"a": whole}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(8)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "cut short"),
        (save({"a": torch.ones(2)})[:-1], "cut short"),
        (save({"a": torch.ones(2)})[:20], "cut short"),
        (b"\xff" * 100, "header is too long"),
        ((2).to_bytes(8, "little") + b"[]", "header is invalid"),
        ((1).to_bytes(8, "little") + b"\xff", "header is invalid"),
        ((50_000).to_bytes(8, "little") + b"[" * 50_000, "header is invalid"),
        (header_of(dtype="F31"), "KeyError: 'F31'"),
        (header_of(shape=[3]), "shape or the offsets of a are invalid"),
        (header_of(shape=[-1, -2]), "shape or the offsets of a are invalid"),
        (header_of(shape=[2.0]), "shape or the offsets of a are invalid"),
        (header_of(shape="ab"), "header is invalid"),
        (header_of(data_offsets=[8, 16]), "shape or the offsets of a are invalid"),
        (header_of(data_offsets=None), "shape or the offsets of a are invalid"),
    ],
)
def test_what_is_no_whole_file_is_refused(content: bytes, reason: str):
    with pytest.raises(TensorFileError, match=reason):
        read(content)


def test_the_content_before_the_test_of_refusals_is_read():
    assert_same(read(header_of()), {"a": torch.zeros(2)})
