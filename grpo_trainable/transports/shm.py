"""Shared memory on one machine: the sender packs weights into it, and receivers map it.

A slot is an anonymous file (`memfd_create`). Other processes of the same user open it through the
sender's `/proc/<pid>/fd`. The file has no name in any file system, so nothing can be left behind.
Once no running process has the file open or mapped, the system frees the file's memory. The size of
`/dev/shm`, 64 MB in many containers, does not limit the size of the file.
"""

from __future__ import annotations

import math
import mmap
import os
import secrets
import struct
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_trainable.protocol.rollout import LiveWeights, PolicyWeights
from grpo_trainable.transports.packing import Layout, Packed, Slots, layout_for, pack
from grpo_trainable.transports.transport import TransportError, read_only_is_fine

HEADER = struct.Struct("=16sq")  # token of the slot, then its publication number or WRITING
HEADER_BYTES = 4096
WRITING = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedWeights:
    """The handle. `token` identifies the slot, because another file may later get the same `fd`."""

    pid: int
    fd: int
    token: bytes
    publication: int
    packed: Packed


class _Slot:
    """One file in memory, with the layout that the file was created for."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.token = secrets.token_bytes(16)
        self.round: int | None = None
        self.fd = -1
        try:
            self.fd = os.memfd_create("grpo-weights", os.MFD_CLOEXEC)
            os.ftruncate(self.fd, layout.size)
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            self._map = mmap.mmap(self.fd, layout.size, flags=flags)
        except OSError as error:
            if self.fd >= 0:
                os.close(self.fd)
            raise TransportError(
                f"transport=shm: could not allocate {layout.size:,} bytes of shared memory "
                f"({error.strerror})"
            ) from error
        self._views = layout.of(_bytes(self._map))

    def write(self, publication: int, weights: LiveWeights) -> Packed:
        """Pack the weights, and mark the slot as being written until all of them are packed."""
        HEADER.pack_into(self._map, 0, self.token, WRITING)
        packed = pack(weights, self._views, self.layout)
        HEADER.pack_into(self._map, 0, self.token, publication)
        return packed

    def close(self) -> None:
        """Close the file. The mapping ends when Python frees the slot."""
        os.close(self.fd)


class ShmSender:
    """Packs snapshots into memory that other processes can map."""

    def __init__(self) -> None:
        self.slots = Slots(_Slot)
        self._publication = 0

    def publish(self, weights: LiveWeights, frozen: Collection[str] = ()) -> SharedWeights:
        """Pack a snapshot, without `frozen` tensors, into a free slot, and return its handle.

        Raises:
            TransportError: The system does not provide the memory.
        """
        layout = layout_for(weights.tensors, frozen, start=HEADER_BYTES)
        slot = self.slots.take(weights.round, layout)
        self._publication += 1
        return SharedWeights(
            packed=slot.write(self._publication, weights),
            pid=os.getpid(),
            fd=slot.fd,
            token=slot.token,
            publication=self._publication,
        )

    def release(self, before_round: int) -> None:
        """Free the slots of rounds before `before_round`."""
        self.slots.release(before_round)

    def close(self) -> None:
        """Close all slots."""
        for slot in self.slots:
            slot.close()
        self.slots.clear()


class ShmReceiver:
    """Maps a slot once and reads it from then on, without copying."""

    name = "shm"

    def __init__(self, deadline_s: float = math.inf, device: str = "cpu") -> None:
        """Set up a receiver. Both arguments are ignored.

        The snapshot behind a handle is already in memory, and the engine moves the weights to its
        own device.
        """
        self._maps: dict[bytes, mmap.mmap] = {}  # token of a slot -> its mapping

    def fetch(self, handle: SharedWeights, received: Any = None) -> PolicyWeights:
        """Map the snapshot behind the handle.

        Raises:
            TransportError: The sender has ended, or has overwritten the snapshot.
        """
        mapped = self._maps.get(handle.token)
        if mapped is None:
            mapped = self._maps[handle.token] = _open(handle)
        _, publication = HEADER.unpack_from(mapped)
        if publication != handle.publication:
            raise TransportError(
                f"transport=shm: the weights of version {handle.packed.version} were overwritten "
                "before they were fetched"
            )
        return handle.packed.unpacked(_bytes(mapped))

    def release(self, before_round: int) -> None:
        """Do nothing: the slots belong to the sender."""

    def close(self) -> None:
        """Forget the mappings. A mapping ends when its last tensor is freed."""
        self._maps = {}


def _open(handle: SharedWeights) -> mmap.mmap:
    read_only_is_fine()
    path = f"/proc/{handle.pid}/fd/{handle.fd}"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise TransportError(
            f"transport=shm: the sender's memory cannot be opened ({path}: {error.strerror}); "
            "run the learner and the generator as the same user, on the same machine and in the "
            "same container"
        ) from error
    try:
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        mapped = mmap.mmap(fd, handle.packed.layout.size, flags=flags, prot=mmap.PROT_READ)
    except (OSError, ValueError) as error:
        raise TransportError(f"transport=shm: {path} cannot be mapped ({error})") from error
    finally:
        os.close(fd)
    token, _ = HEADER.unpack_from(mapped)
    if token != handle.token:
        raise TransportError(f"transport=shm: {path} is no longer the sender's memory")
    return mapped


def _bytes(memory: mmap.mmap) -> Tensor:
    """Return the memory as a tensor, (bytes,) uint8."""
    return torch.frombuffer(memory, dtype=torch.uint8)
