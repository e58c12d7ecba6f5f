"""What tells torn and mixed-up weights from whole ones."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from functools import lru_cache
from itertools import zip_longest

import torch
from torch import Tensor

BLOCK_BYTES = 4096  # that one sum is of
# That are summed and then copied: they are in a cache by then. A multiple of the block; smaller
# ones cost more in calls than they save in memory.
PIECE_BYTES = 4 << 20


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """CRC-32 of names, shapes, types and bytes, in name order, as 8 hexadecimal digits.

    It finds torn and mixed-up weights, not forged ones; checkpoints carry SHA-256.
    """
    crc = 0
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        crc = zlib.crc32(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode(), crc)
        crc = zlib.crc32(memoryview(tensor.flatten().view(torch.uint8).numpy()), crc)  # pyright: ignore[reportArgumentType]
    return f"{crc:08x}"


def storage_checksum(tensors: Mapping[str, Tensor]) -> str:
    """16 hexadecimal digits that tell torn and mixed-up weights, at the speed of memory.

    CRC-32 of names, shapes, types and the order in which dimensions are stored; and CRC-32 of the
    sums, as 64-bit integers and on the tensors' device, of every 4 KiB as they are stored, then of
    what the last 4 KiB of each leave. What goes unseen is another order of the words within 4 KiB.
    """
    return copy_with_checksum(tensors, {})


def copy_with_checksum(tensors: Mapping[str, Tensor], copies: Mapping[str, Tensor]) -> str:
    """Copies the tensors that `copies` has room for, and returns the `storage_checksum` of all.

    A room is of the tensor's shape and type, and begins at a word of 8 bytes. Where it is stored as
    the tensor is, without gaps, each piece is summed and copied while it is in a cache, which takes
    little longer than the copy by itself. Sum and copy then agree whatever else is written to the
    tensor meanwhile: that nobody writes is up to the caller.
    """
    described, summed = 0, _Sums()
    for name in sorted(tensors):
        tensor, copy = tensors[name].detach(), copies.get(name)
        description, order, dense = _storage(name, tensor.shape, tensor.stride(), tensor.dtype)
        described = zlib.crc32(description, described)
        room = None
        if copy is not None and dense and copy.stride() == tensor.stride():
            room = _bytes(copy)
        elif copy is not None:
            copy.copy_(tensor)
        summed.add(_bytes(tensor if dense else tensor.permute(order).contiguous()), room)
    return f"{described:08x}{summed.crc():08x}"


@lru_cache(maxsize=4096)
def _storage(
    name: str, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> tuple[bytes, tuple[int, ...], bool]:
    """What a checksum says of a tensor, the order in which its dimensions are stored, the slowest
    first, and whether its elements then follow each other without gaps."""
    order = tuple(sorted(range(len(shape)), key=lambda d: -stride[d]))
    told = [d for d in order if shape[d] > 1]
    behind = [math.prod(shape[d] for d in told[i + 1 :]) for i in range(len(told))]
    dense = [stride[d] for d in told] == behind or 0 in shape
    return f"{name}{tuple(shape)}{dtype}{told}".encode(), order, dense


def _bytes(tensor: Tensor) -> Tensor:
    """(bytes,) uint8 of a tensor without gaps, in the order in which it is stored"""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _pieces(memory: Tensor, size: int) -> tuple[Tensor, ...]:
    return memory.split(size) if memory.numel() > size else (memory,)


class _Sums:
    """Of blocks, and the bytes that no block is full of: gathered, to leave the device once."""

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []  # (blocks,) int64 each
        self._rests: list[Tensor] = []  # (bytes,) uint8 each

    def add(self, stored: Tensor, room: Tensor | None) -> None:
        """Of (bytes,) uint8; each piece is copied to `room` once it has been summed."""
        if stored.data_ptr() % 8 or stored.storage_offset() % 8:
            stored = stored.clone()  # to begin at a word
        size = PIECE_BYTES if stored.device.type == "cpu" else stored.numel()
        targets = () if room is None else _pieces(room, size)
        for piece, target in zip_longest(_pieces(stored, size), targets):
            rest = piece.numel() % BLOCK_BYTES
            if rest:
                piece, left = piece[:-rest], piece[-rest:]
                self._rests.append(left)
                if target is not None:
                    target[-rest:].copy_(left)
                    target = target[:-rest]
            if piece.numel():
                words = piece.view(torch.int64)
                self._blocks.append(words.view(-1, BLOCK_BYTES // 8).sum(dim=1))
                if target is not None:  # by words: single bytes take torch longer
                    target.view(torch.int64).copy_(words)

    def crc(self) -> int:
        crc = 0
        for gathered in (self._blocks, self._rests):
            if gathered:
                crc = zlib.crc32(torch.cat(gathered).cpu().numpy(), crc)  # pyright: ignore[reportArgumentType]
        return crc
