"""What tells torn and mixed-up weights from whole ones."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from functools import lru_cache

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
    sums, as 64-bit integers and on the tensors' device, of every 4 KiB as they are stored. What
    goes unseen is another order of the words within 4 KiB.
    """
    return copy_with_checksum(tensors, {})


def copy_with_checksum(tensors: Mapping[str, Tensor], copies: Mapping[str, Tensor]) -> str:
    """Copies the tensors that `copies` has room for, and returns the `storage_checksum` of all.

    A room is of the tensor's shape and type, and begins at a word of 8 bytes. Where it is stored as
    the tensor is, without gaps, each piece is summed and copied while it is in a cache, which takes
    little longer than the copy by itself. Sum and copy then agree whatever else is written to the
    tensor meanwhile: that nobody writes is up to the caller.
    """
    described = summed = 0
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        description, order, dense = _storage(name, tensor.shape, tensor.stride(), tensor.dtype)
        described = zlib.crc32(description, described)
        copy = copies.get(name)
        room = None
        if copy is not None and dense and copy.stride() == tensor.stride():
            room = _bytes(copy)
        elif copy is not None:
            copy.copy_(tensor)
        stored = _bytes(tensor if dense else tensor.permute(order).contiguous())
        for sums in _block_sums(stored, room):
            summed = zlib.crc32(sums.cpu().numpy(), summed)  # pyright: ignore[reportArgumentType]
    return f"{described:08x}{summed:08x}"


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


def _block_sums(stored: Tensor, room: Tensor | None) -> Iterator[Tensor]:
    """(blocks,) int64 of one piece of the (bytes,) uint8 after the other, and the bytes that are
    left. Each piece is copied to `room` once it has been summed."""
    whole = len(stored) // BLOCK_BYTES * BLOCK_BYTES
    if whole:
        words = _words(stored[:whole])
        # By words: torch takes longer to copy as many single bytes.
        room_for_words = None if room is None else room[:whole].view(torch.int64)
        step = PIECE_BYTES // 8 if stored.device.type == "cpu" else len(words)
        for start in range(0, len(words), step):
            piece = words[start : start + step]
            yield piece.view(-1, BLOCK_BYTES // 8).sum(dim=1)
            if room_for_words is not None:
                room_for_words[start : start + step].copy_(piece)
    if whole < len(stored):
        yield stored[whole:]
        if room is not None:
            room[whole:].copy_(stored[whole:])


def _words(stored: Tensor) -> Tensor:
    """int64 of (bytes,) uint8, copied where those do not begin at a word"""
    askew = stored.data_ptr() % 8 or stored.storage_offset() % 8
    return (stored.clone() if askew else stored).view(torch.int64)
