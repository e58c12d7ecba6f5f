"""Memory that the processes of one node share: the sender packs, the receivers map.

A slot is an anonymous file (`memfd_create`), which other processes of the same user open through
the sender's `/proc/<pid>/fd`. It has no name in any file system, so nothing can be left behind:
when the last process that has it open or mapped is gone, however it ended, so is the memory. It is
not bound by the size of `/dev/shm` either, which is 64 MB in many containers.
"""

from __future__ import annotations

import math
import mmap
import os
import secrets
import struct
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_trainable.rollout import PolicyWeights
from grpo_trainable.transports.base import TransportError, read_only_is_fine

ALIGNMENT = 64  # bytes: of torch's own tensors
HEADER = struct.Struct("=16sq")  # the slot's token; which publication is in it, or WRITING
HEADER_BYTES = 4096
WRITING = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one tensor lies in a slot."""

    name: str
    offset: int  # bytes
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # as the sender stores it: then packing is copying bytes
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedWeights:
    """The handle. `token` tells the slot from any other file that may come to bear its number."""

    pid: int
    fd: int
    token: bytes
    size: int  # bytes of the file
    publication: int
    places: tuple[Place, ...]
    version: int
    round: int
    checksum: str


class _Slot:
    """One file, laid out for the tensors that it was made for."""

    def __init__(self, places: tuple[Place, ...], size: int) -> None:
        self.places, self.size = places, size
        self.token = secrets.token_bytes(16)
        self.round: int | None = None  # of what is in it; None: nothing anybody may still read
        self.fd = os.memfd_create("grpo-weights", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, size)
            self._map = mmap.mmap(self.fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError as error:
            os.close(self.fd)
            raise TransportError(
                f"transport=shm: no {size:,} bytes of shared memory ({error.strerror})"
            ) from error
        self._views = [_view(self._map, place) for place in places]

    def write(self, publication: int, weights: PolicyWeights) -> None:
        HEADER.pack_into(self._map, 0, self.token, WRITING)
        self.round = weights.round
        for place, view in zip(self.places, self._views, strict=True):
            view.copy_(weights.tensors[place.name])
        HEADER.pack_into(self._map, 0, self.token, publication)

    def close(self) -> None:
        """The mapping goes with the slot."""
        os.close(self.fd)


class ShmSender:
    """Packs snapshots into slots. A slot is written again when the snapshot in it was released;
    until then, as beside a slow generator, there are more slots."""

    def __init__(self) -> None:
        self._slots: list[_Slot] = []
        self._publication = 0

    def publish(self, weights: PolicyWeights) -> SharedWeights:
        """
        Raises:
            TransportError: the system gives no memory.
        """
        slot = self._free_slot(*_layout(weights.tensors))
        self._publication += 1
        slot.write(self._publication, weights)
        return SharedWeights(
            pid=os.getpid(),
            fd=slot.fd,
            token=slot.token,
            size=slot.size,
            publication=self._publication,
            places=slot.places,
            version=weights.version,
            round=weights.round,
            checksum=weights.checksum,
        )

    def release(self, before_round: int | None = None) -> None:
        for slot in self._slots:
            if before_round is None or (slot.round is not None and slot.round < before_round):
                slot.round = None

    def close(self) -> None:
        for slot in self._slots:
            slot.close()
        self._slots = []

    def _free_slot(self, places: tuple[Place, ...], size: int) -> _Slot:
        for slot in self._slots:
            if slot.round is None and slot.places == places:
                return slot
        self._slots.append(_Slot(places, size))
        return self._slots[-1]


class ShmReceiver:
    """Maps a slot once and reads it from then on; nothing is copied."""

    name = "shm"

    def __init__(self) -> None:
        self._maps: dict[bytes, mmap.mmap] = {}  # by token

    def fetch(self, handle: SharedWeights) -> PolicyWeights:
        """
        Raises:
            TransportError: the sender is gone, or has written something else there meanwhile.
        """
        mapped = self._maps.get(handle.token)
        if mapped is None:
            mapped = self._maps[handle.token] = _open(handle)
        _, publication = HEADER.unpack_from(mapped)
        if publication != handle.publication:
            raise TransportError(
                f"transport=shm: weights version {handle.version} were overwritten before they "
                "were fetched"
            )
        return PolicyWeights(
            version=handle.version,
            round=handle.round,
            checksum=handle.checksum,
            tensors={place.name: _view(mapped, place) for place in handle.places},
        )

    def release(self, before_round: int) -> None:
        """The sender's slots are the sender's."""

    def close(self) -> None:
        """Mappings go with the last tensor that lies in them."""
        self._maps = {}


def _open(handle: SharedWeights) -> mmap.mmap:
    read_only_is_fine()
    path = f"/proc/{handle.pid}/fd/{handle.fd}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise TransportError(
            f"transport=shm: the sender's memory cannot be opened ({path}: {error.strerror}); "
            "learner and generator must be processes of one user on one machine, in one container"
        ) from error
    try:
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        mapped = mmap.mmap(fd, handle.size, flags=flags, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    token, _ = HEADER.unpack_from(mapped)
    if token != handle.token:
        raise TransportError(f"transport=shm: {path} is not the sender's memory any more")
    return mapped


def _layout(tensors: Mapping[str, Tensor]) -> tuple[tuple[Place, ...], int]:
    """Where each tensor goes, by name, and the bytes of the whole."""
    places, offset = [], HEADER_BYTES
    for name in sorted(tensors):
        tensor = tensors[name]
        dense = torch.empty_like(tensor, device="meta")  # in the same order of dimensions
        places.append(
            Place(
                name=name,
                offset=offset,
                shape=tuple(dense.shape),
                stride=dense.stride(),
                dtype=dense.dtype,
            )
        )
        offset += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return tuple(places), offset


def _view(memory: mmap.mmap, place: Place) -> Tensor:
    count = math.prod(place.shape)
    if count == 0:
        return torch.empty(place.shape, dtype=place.dtype)
    flat = torch.frombuffer(memory, dtype=place.dtype, count=count, offset=place.offset)
    return flat.as_strided(place.shape, place.stride)
