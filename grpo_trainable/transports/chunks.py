"""A snapshot cut into parts of equal size, stored as separate objects in Ray's object store.

A machine can pass on an object only after it has fetched the whole object. So machines that fetch
one large object all take it from the learner's machine at the same time. If the object is cut into
parts, and each machine begins with a different part, the machines can take parts from one another.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_trainable.transports.packing import Layout, Packed, TensorLayout

PARTS = 16
LEAST_BYTES = 1 << 20  # minimum size of a part; smaller parts take longer to request than to send


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A range of the bytes of a tensor, in storage order."""

    place: TensorLayout
    start: int
    end: int

    @property
    def in_buffer(self) -> slice:
        """Slice of the buffer that holds the piece."""
        return slice(self.place.offset + self.start, self.place.offset + self.end)


def parts_for(layout: Layout) -> int:
    """Return the number of parts into which a snapshot is cut."""
    return max(1, min(PARTS, layout.size // LEAST_BYTES))


@lru_cache(maxsize=64)
def pieces_of_parts(layout: Layout, count: int) -> tuple[tuple[Piece, ...], ...]:
    """Split the buffer into `count` parts, and return the pieces of each part in buffer order."""
    size = max(1, -(-layout.size // count))
    parts: list[list[Piece]] = [[] for _ in range(count)]
    for place in layout.places:
        begin, end = place.offset, place.offset + place.nbytes
        while begin < end:
            part = begin // size
            stop = min(end, (part + 1) * size)
            piece = Piece(place=place, start=begin - place.offset, end=stop - place.offset)
            parts[part].append(piece)
            begin = stop
    return tuple(map(tuple, parts))


def cut(tensors: Mapping[str, Tensor], layout: Layout, count: int) -> list[list[np.ndarray]]:
    """Split the snapshot into `count` parts, and return the bytes of each part, piece by piece.

    An array is a view if its tensor is in main memory without gaps, and a copy otherwise.
    """
    stored = {place.name: _stored(tensors[place.name], place) for place in layout.places}
    return [
        [stored[piece.place.name][piece.start : piece.end] for piece in pieces]
        for pieces in pieces_of_parts(layout, count)
    ]


def _stored(tensor: Tensor, place: TensorLayout) -> np.ndarray:
    """Return the bytes of a tensor, (bytes,) uint8, in the layout that `place` defines."""
    tensor = tensor.detach().cpu()
    if tensor.stride() != place.stride:
        laid_out = torch.empty_strided(place.shape, place.stride, dtype=place.dtype)
        tensor = laid_out.copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredParts:
    """The handle of stored parts. Ray does not resolve `refs` inside a handle."""

    packed: Packed
    refs: tuple[Any, ...]  # references to the parts, in order


class Assembly:
    """A buffer that becomes a snapshot as its parts arrive, in any order."""

    def __init__(self, layout: Layout, count: int) -> None:
        """Allocate a buffer for `count` parts of `layout`."""
        self._parts = pieces_of_parts(layout, count)
        self.buffer = torch.empty(layout.size, dtype=torch.uint8)
        self._bytes = self.buffer.numpy()

    def put(self, part: int, arrays: Sequence[np.ndarray]) -> None:
        """Copy the pieces of a part into the buffer."""
        for piece, array in zip(self._parts[part], arrays, strict=True):
            self._bytes[piece.in_buffer] = array


def in_turn(count: int, first: float) -> list[int]:
    """Return the indices of all parts, beginning with part `first` · `count` and wrapping around.

    `first` is in [0, 1), and the product is rounded down.
    """
    start = int(first * count)
    return [*range(start, count), *range(start)]


class TimeLeft:
    """Counts down the seconds of a deadline that several steps share."""

    def __init__(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds

    def __call__(self) -> float:
        """Return the seconds left, at least 0."""
        return max(0.0, self._until - time.monotonic())
