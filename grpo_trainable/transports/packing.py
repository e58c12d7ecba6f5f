"""Tensors packed into one buffer, so that a snapshot is one piece of memory."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from threading import Lock
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from grpo_trainable.models.parameters import ALIGNMENT
from grpo_trainable.protocol.checksums import copy_with_checksum
from grpo_trainable.protocol.rollout import LiveWeights, PolicyWeights

_one_at_a_time = Lock()  # two threads may fetch: new weights can arrive while a batch is sampled
S = TypeVar("S", bound="Slot")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLayout:
    """The place of one tensor in a buffer."""

    name: str
    offset: int  # bytes
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # the sender's stride, so that packing only copies bytes
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def of(self, buffer: Tensor) -> Tensor:
        """Return the tensor in `buffer`, which is (bytes,) uint8."""
        flat = buffer[self.offset : self.offset + self.nbytes].view(self.dtype)
        return flat.as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class Layout:
    """The places of all tensors in a buffer.

    A layout stays the same from round to round. Each layout is pickled once, and unpickled once per
    process.
    """

    places: tuple[TensorLayout, ...]
    size: int  # size of the buffer in bytes

    def of(self, buffer: Tensor) -> dict[str, Tensor]:
        """Return the tensors in `buffer`, (size,) uint8, as a mapping from name to tensor."""
        return {place.name: place.of(buffer) for place in self.places}

    @cached_property
    def _pickled(self) -> bytes:
        return pickle.dumps((self.places, self.size))

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (self._pickled,)


@lru_cache(maxsize=64)
def _unpickled(pickled: bytes) -> Layout:
    return Layout(*pickle.loads(pickled))


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Description of a snapshot, without its bytes, as a part of a handle."""

    version: int
    round: int
    checksum: str
    layout: Layout

    def unpacked(self, buffer: Tensor) -> PolicyWeights:
        """Return the snapshot in `buffer`.

        `buffer`, (size,) uint8, is the buffer that the snapshot was packed into, or a copy of it.
        """
        return PolicyWeights(
            version=self.version,
            round=self.round,
            checksum=self.checksum,
            tensors=self.layout.of(buffer),
        )


class Slot(Protocol):
    """Memory for one snapshot, with the layout that the memory was allocated for."""

    layout: Layout
    round: int | None  # round of its snapshot; None if the slot is free


class Slots(Generic[S]):
    """Keeps one slot for each snapshot in use.

    A slot is reused after its snapshot has been released. If a slow generator releases a snapshot
    late, more slots are needed.
    """

    def __init__(self, make: Callable[..., S]) -> None:
        """Start without slots. `make` makes a slot from all arguments of `take` except `round_`."""
        self._make = make
        self._slots: list[S] = []

    def __iter__(self) -> Iterator[S]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)

    def take(self, round_: int, layout: Layout, *more: Any) -> S:
        """Reserve a slot for a snapshot of this round. Create a slot if none is free."""
        with _one_at_a_time:
            for slot in self._slots:
                if slot.round is None and slot.layout == layout:
                    slot.round = round_
                    return slot
            slot = self._make(layout, *more)
            slot.round = round_
            self._slots.append(slot)
            return slot

    def release(self, before_round: int) -> None:
        """Free the slots of rounds before `before_round`."""
        with _one_at_a_time:
            for slot in self._slots:
                if slot.round is not None and slot.round < before_round:
                    slot.round = None

    def clear(self) -> None:
        """Forget all slots."""
        self._slots = []


def layout_for(
    tensors: Mapping[str, Tensor], without: Collection[str] = (), start: int = 0
) -> Layout:
    """Return a layout of the tensors in name order, from byte `start` on.

    Each tensor keeps the order in which its dimensions are stored.
    """
    chosen = ((name, tensors[name]) for name in sorted(tensors) if name not in without)
    stored = tuple((name, tuple(t.shape), t.stride(), t.dtype) for name, t in chosen)
    return _laid_out(stored, start)


@lru_cache(maxsize=64)
def _laid_out(
    stored: tuple[tuple[str, tuple[int, ...], tuple[int, ...], torch.dtype], ...], start: int
) -> Layout:
    places, offset = [], start
    for name, shape, stride, dtype in stored:
        # Take the strides from a tensor with memory, although nothing touches that memory. On the
        # `meta` device, torch loses the strides of dimensions with one element or none.
        dense = torch.empty_like(torch.empty_strided(shape, stride, dtype=dtype), device="meta")
        stride = dense.stride()
        places.append(
            TensorLayout(name=name, offset=offset, shape=shape, stride=stride, dtype=dtype)
        )
        offset += -(-dense.nbytes // ALIGNMENT) * ALIGNMENT
    return Layout(tuple(places), offset)


def pack(weights: LiveWeights, views: Mapping[str, Tensor], layout: Layout) -> Packed:
    """Copy the weights into `views` of a buffer with this layout.

    Weights without a place in the layout are not copied, but the checksum includes them.
    """
    return Packed(
        version=weights.version,
        round=weights.round,
        checksum=copy_with_checksum(weights.tensors, views),
        layout=layout,
    )
