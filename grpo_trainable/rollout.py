"""The containers that carry everything, and the one place that pads and shifts.

Shapes: G responses per prompt, B rows, P prompt tokens, R response tokens (padded), S the longest
prompt + response of a batch, minus 1.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

BLOCK_BYTES = 4096  # of a storage checksum
# Of what is summed and then copied: it is still in a cache by then, and the copy reads it there.
# A multiple of the block; smaller ones cost more in calls than they save in memory.
PIECE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingLimits:
    """How a response is sampled and where it must end. Temperature 1 is the model's own law."""

    min_new_tokens: int
    max_new_tokens: int
    temperature: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to sample `group_size` responses for: the unit of dispatch and of counting.

    (stream, cursor) names the prompt and, with the seed, every random draw of its responses:
    asked for again, it gives the same tokens under the same weights.
    """

    stream: str  # "train" or "eval"
    cursor: int
    prompt_ids: tuple[int, ...]
    group_size: int
    limits: SamplingLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGroup:
    """G responses to one prompt. Every token knows the weights that sampled it.

    `rewards` is NaN from the engine until the scorer has filled it in, and never changes again.
    """

    cursor: int
    prompt_ids: Tensor  # (P,) int64
    response_ids: Tensor  # (G, R) int64, pad off the mask
    response_mask: Tensor  # (G, R) bool, end-of-text included; may have holes
    behaviour_log_probs: Tensor  # (G, R) float32, nats, as sampled; 0 off the mask
    rewards: Tensor  # (G,) float32
    finished: Tensor  # (G,) bool, ended with end-of-text rather than by length
    token_versions: Tensor  # (G, R) int32, gradient steps of the weights that sampled it
    token_rounds: Tensor  # (G, R) int32, rounds of those weights
    uses: int = 0  # gradient-step batches it has been in

    @property
    def oldest_round(self) -> int:
        """The round of the weights that sampled the group's oldest token."""
        return int(self.token_rounds[self.response_mask].min())

    @property
    def oldest_version(self) -> int:
        """The version of the weights that sampled the group's oldest token."""
        return int(self.token_versions[self.response_mask].min())

    @property
    def num_tokens(self) -> int:
        return int(self.response_mask.sum())

    def __reduce__(self) -> tuple[Any, ...]:
        # Between actors a group travels as numpy arrays: pickling its tensors one by one took a
        # tenth of a round.
        values = (getattr(self, item.name) for item in fields(self))
        return _group_from_arrays, tuple(
            value.numpy() if isinstance(value, Tensor) else value for value in values
        )


def _group_from_arrays(*values: Any) -> RolloutGroup:
    names = (item.name for item in fields(RolloutGroup))
    # Copied: what Ray hands out is mapped read-only.
    arguments: dict[str, Any] = {
        name: torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value
        for name, value in zip(names, values, strict=True)
    }
    return RolloutGroup(**arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """Rows for one gradient step. Every field is aligned with `target_ids`."""

    input_ids: Tensor  # (B, S) int64
    target_ids: Tensor  # (B, S) int64, the input shifted left once, here
    response_mask: Tensor  # (B, S) bool
    behaviour_log_probs: Tensor  # (B, S) float32, 0 off the mask
    advantages: Tensor  # (B, S) float32, 0 off the mask

    @property
    def num_rows(self) -> int:
        return self.input_ids.shape[0]

    def rows(self, index: slice | Tensor) -> TrainBatch:
        """The rows at `index`, cut to their own longest row: trailing padding costs nothing."""
        mask = self.response_mask[index]
        used = mask.any(dim=0).nonzero()
        length = int(used[-1]) + 1 if len(used) else 1
        return TrainBatch(
            input_ids=self.input_ids[index, :length],
            target_ids=self.target_ids[index, :length],
            response_mask=mask[:, :length],
            behaviour_log_probs=self.behaviour_log_probs[index, :length],
            advantages=self.advantages[index, :length],
        )

    def to(self, device: torch.device) -> TrainBatch:
        return TrainBatch(
            input_ids=self.input_ids.to(device),
            target_ids=self.target_ids.to(device),
            response_mask=self.response_mask.to(device),
            behaviour_log_probs=self.behaviour_log_probs.to(device),
            advantages=self.advantages.to(device),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveWeights:
    """What a snapshot is taken of: tensors that the next gradient step may change."""

    version: int
    round: int
    tensors: dict[str, Tensor]  # unique named parameters, in the type in which they travel


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyWeights:
    """A snapshot. Version, round and checksum are inside: they cannot come apart from it."""

    version: int
    round: int
    checksum: str
    tensors: dict[str, Tensor]  # unique named parameters: a tied head once


def checksum(tensors: dict[str, Tensor]) -> str:
    """CRC-32 of names, shapes, types and bytes, in name order, as 8 hexadecimal digits.

    It finds torn and mixed-up weights, not forged ones; checkpoints carry SHA-256.
    """
    crc = 0
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        crc = zlib.crc32(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode(), crc)
        crc = zlib.crc32(memoryview(tensor.flatten().view(torch.uint8).numpy()), crc)  # pyright: ignore[reportArgumentType]
    return f"{crc:08x}"


def storage_checksum(
    tensors: Mapping[str, Tensor], copies: Mapping[str, Tensor] | None = None
) -> str:
    """16 hexadecimal digits that tell torn and mixed-up weights, at the speed of memory.

    CRC-32 of names, shapes, types and the order in which dimensions are stored; and CRC-32 of the
    sums, as 64-bit integers and on the tensors' device, of every 4 KiB as they are stored. What
    goes unseen is another order of the words within 4 KiB.

    A tensor that `copies` has room for is copied there in the same pass over it, which takes hardly
    longer than the copy by itself.
    """
    described = summed = 0
    for name in sorted(tensors):
        tensor, copy, room = tensors[name].detach(), (copies or {}).get(name), None
        description, order, dense = _storage(name, tensor.shape, tensor.stride(), tensor.dtype)
        described = zlib.crc32(description, described)
        stored = _bytes(tensor if dense else tensor.permute(order).contiguous())
        if copy is not None and copy.stride() == tensor.stride() and dense:
            room = _bytes(copy)
        elif copy is not None:
            copy.copy_(tensor)
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
    words, rest = _words(stored[:whole]), stored[whole:]
    step = PIECE_BYTES // 8 if stored.device.type == "cpu" else max(1, len(words))
    # By words: torch takes a third longer to copy as many single bytes.
    room_for_words = None if room is None else room[:whole].view(torch.int64)
    for start in range(0, len(words), step):
        piece = words[start : start + step]
        yield piece.view(-1, BLOCK_BYTES // 8).sum(dim=1)
        if room_for_words is not None:
            room_for_words[start : start + step].copy_(piece)
    if len(rest):
        yield rest
        if room is not None:
            room[whole:].copy_(rest)


def _words(stored: Tensor) -> Tensor:
    """int64 of (bytes,) uint8, copied where those do not begin at a word"""
    askew = stored.data_ptr() % 8 or stored.storage_offset() % 8
    return (stored.clone() if askew else stored).view(torch.int64)


def collate(
    groups: Sequence[RolloutGroup], advantages: Sequence[Tensor], pad_id: int
) -> TrainBatch:
    """The groups' responses as rows, right-padded, shifted once; `advantages` one (G,) a group.

    A row is its prompt followed by its response up to the last token of the mask. Position s
    predicts token s + 1: `input_ids[b, s]` is followed by `target_ids[b, s]`.
    """
    rows = []
    for group, group_advantages in zip(groups, advantages, strict=True):
        for g in range(len(group.response_ids)):
            sampled = group.response_mask[g].nonzero()
            length = int(sampled[-1]) + 1 if len(sampled) else 0
            rows.append((group, g, length, group_advantages[g]))
    width = max(len(group.prompt_ids) + length for group, _, length, _ in rows) - 1

    shape = (len(rows), width)
    input_ids = torch.full(shape, pad_id, dtype=torch.int64)
    target_ids = torch.full(shape, pad_id, dtype=torch.int64)
    response_mask = torch.zeros(shape, dtype=torch.bool)
    behaviour_log_probs = torch.zeros(shape, dtype=torch.float32)
    row_advantages = torch.zeros(shape, dtype=torch.float32)
    for b, (group, g, length, advantage) in enumerate(rows):
        ids = torch.cat((group.prompt_ids, group.response_ids[g, :length]))
        start = len(group.prompt_ids) - 1  # the position that predicts the first response token
        here = slice(start, start + length)
        input_ids[b, : len(ids) - 1] = ids[:-1]
        target_ids[b, : len(ids) - 1] = ids[1:]
        mask = group.response_mask[g, :length]
        response_mask[b, here] = mask
        behaviour_log_probs[b, here] = group.behaviour_log_probs[g, :length].where(mask, 0.0)
        row_advantages[b, here] = advantage.to(torch.float32) * mask
    return TrainBatch(
        input_ids=input_ids,
        target_ids=target_ids,
        response_mask=response_mask,
        behaviour_log_probs=behaviour_log_probs,
        advantages=row_advantages,
    )
