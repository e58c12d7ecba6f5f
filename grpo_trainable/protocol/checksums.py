"""Checksums that detect torn and mixed-up weights."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from functools import lru_cache
from itertools import zip_longest

import torch
from torch import Tensor

BLOCK_BYTES = 4096  # number of bytes that one block sum covers
# Number of bytes that are summed and then copied while they are in the CPU's cache; a multiple of
# BLOCK_BYTES. With smaller pieces, the function calls cost more time than the cache saves.
PIECE_BYTES = 4 << 20


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """Return the CRC-32 of names, shapes, types and bytes, in name order, as 8 hexadecimal digits.

    The checksum detects torn weights (parts of several snapshots) and mixed-up weights, but not
    forged ones. Checkpoints use SHA-256 instead.
    """
    crc = 0
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        crc = zlib.crc32(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode(), crc)
        crc = zlib.crc32(memoryview(tensor.flatten().view(torch.uint8).numpy()), crc)  # pyright: ignore[reportArgumentType]
    return f"{crc:08x}"


def storage_checksum(tensors: Mapping[str, Tensor]) -> str:
    """Return a checksum of weights, computed at memory speed, as 16 hexadecimal digits.

    The first eight digits are the CRC-32 of names, shapes, types and the order in which dimensions
    are stored. The last eight digits are the CRC-32 of a sequence of bytes: first all block sums,
    then the bytes left over at the end of each tensor. A block is 4 KiB of a tensor, in storage
    order. Each block is summed as 64-bit integers, on the device that holds the tensor. If 64-bit
    words within a block change places, the checksum stays the same.
    """
    return copy_with_checksum(tensors, {})


def copy_with_checksum(tensors: Mapping[str, Tensor], copies: Mapping[str, Tensor]) -> str:
    """Copy the tensors that have a destination, and return the `storage_checksum` of all tensors.

    If a copy has the same memory layout as its tensor, and this layout has no gaps, each piece of
    the tensor is summed and then copied while it is in the CPU's cache. Summing and copying then
    takes little longer than copying alone. If another thread writes to a tensor meanwhile, the sum
    and the copy still agree, so the checksum does not detect the write. The caller must prevent
    such writes.

    Args:
        tensors: the weights, by name.
        copies: destinations by name. Each destination has the shape and type of its tensor and
            begins at a multiple of 8 bytes.
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
    """Describe a tensor and its layout in memory.

    Returns:
        The description for the checksum; the order of the dimensions in memory, beginning with the
        one that varies slowest; and True if the elements follow each other in that order without
        gaps.
    """
    order = tuple(sorted(range(len(shape)), key=lambda d: -stride[d]))
    told = [d for d in order if shape[d] > 1]
    behind = [math.prod(shape[d] for d in told[i + 1 :]) for i in range(len(told))]
    dense = [stride[d] for d in told] == behind or 0 in shape
    return f"{name}{tuple(shape)}{dtype}{told}".encode(), order, dense


def _bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor without gaps as (bytes,) uint8, in storage order."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _pieces(memory: Tensor, size: int) -> tuple[Tensor, ...]:
    return memory.split(size) if memory.numel() > size else (memory,)


class _Sums:
    """Collects block sums and left-over bytes, so that all are copied from the device together."""

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []  # (blocks,) int64 each
        self._rests: list[Tensor] = []  # (bytes,) uint8 each

    def add(self, stored: Tensor, room: Tensor | None) -> None:
        """Add `stored`, (bytes,) uint8, and copy each piece to `room` after summing it."""
        if stored.data_ptr() % 8 or stored.storage_offset() % 8:
            stored = stored.clone()  # a clone is aligned to 8 bytes
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
                if target is not None:  # words are copied faster than bytes
                    target.view(torch.int64).copy_(words)

    def crc(self) -> int:
        """Return the CRC-32 of a sequence of bytes: all block sums, then all left-over bytes."""
        crc = 0
        for gathered in (self._blocks, self._rests):
            if gathered:
                crc = zlib.crc32(torch.cat(gathered).cpu().numpy(), crc)  # pyright: ignore[reportArgumentType]
        return crc
