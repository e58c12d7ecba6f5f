"""Tensors packed into one buffer, and seen in it: a snapshot is one piece of memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from grpo_trainable.models.parameters import ALIGNMENT
from grpo_trainable.rollout import PolicyWeights

_one_at_a_time = Lock()  # a deposit is fetched by another thread
S = TypeVar("S", bound="Slot")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one tensor lies in a buffer."""

    name: str
    offset: int  # bytes
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # as the sender stores it: then packing is copying bytes
    dtype: torch.dtype

    def of(self, buffer: Tensor) -> Tensor:
        """The tensor in `buffer`, which is (bytes,) uint8."""
        size = math.prod(self.shape) * self.dtype.itemsize
        flat = buffer[self.offset : self.offset + size].view(self.dtype)
        return flat.as_strided(self.shape, self.stride)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A snapshot but for its bytes: what a handle says of it."""

    version: int
    round: int
    checksum: str
    places: tuple[Place, ...]

    def unpacked(self, buffer: Tensor) -> PolicyWeights:
        """`buffer`: the (bytes,) uint8 that the snapshot was packed into, or a copy."""
        return PolicyWeights(
            version=self.version,
            round=self.round,
            checksum=self.checksum,
            tensors={place.name: place.of(buffer) for place in self.places},
        )


class Slot(Protocol):
    """Memory for one snapshot, laid out for the tensors that it was made for."""

    places: tuple[Place, ...]
    round: int | None  # of what is in it; None: nothing that anybody may still read


class Slots(Generic[S]):
    """As many slots as snapshots are in use at a time: a slot is written again once the snapshot
    in it was released, and until then, as beside a slow generator, there are more."""

    def __init__(self, make: Callable[..., S]) -> None:
        """`make(places, size, *more)`; `more` is what `take` was given besides."""
        self._make = make
        self._slots: list[S] = []

    def __iter__(self) -> Iterator[S]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)

    def take(self, round_: int, places: tuple[Place, ...], size: int, *more: Any) -> S:
        """One for a snapshot of this round, of `size` bytes."""
        with _one_at_a_time:
            for slot in self._slots:
                if slot.round is None and slot.places == places:
                    slot.round = round_
                    return slot
            slot = self._make(places, size, *more)
            slot.round = round_
            self._slots.append(slot)
            return slot

    def release(self, before_round: int) -> list[S]:
        """Those that became free."""
        with _one_at_a_time:
            old = [
                slot for slot in self._slots if slot.round is not None and slot.round < before_round
            ]
            for slot in old:
                slot.round = None
            return old

    def clear(self) -> None:
        self._slots = []


def layout(tensors: Mapping[str, Tensor], start: int = 0) -> tuple[tuple[Place, ...], int]:
    """Where each tensor goes from byte `start` on, by name, and where the last one ends."""
    places, offset = [], start
    for name in sorted(tensors):
        dense = torch.empty_like(tensors[name], device="meta")  # in the same order of dimensions
        places.append(
            Place(
                name=name,
                offset=offset,
                shape=tuple(dense.shape),
                stride=dense.stride(),
                dtype=dense.dtype,
            )
        )
        offset += -(-dense.nbytes // ALIGNMENT) * ALIGNMENT
    return tuple(places), offset


def pack(weights: PolicyWeights, views: Sequence[Tensor], places: Sequence[Place]) -> Packed:
    """Copies the weights into `views`, one a place."""
    for place, view in zip(places, views, strict=True):
        view.copy_(weights.tensors[place.name])
    return Packed(
        version=weights.version,
        round=weights.round,
        checksum=weights.checksum,
        places=tuple(places),
    )
