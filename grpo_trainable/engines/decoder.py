"""The interfaces between a sampling loop and the code that computes its logits.

A row is one response. Of the B rows of a call, A are in the batch. V is the size of the vocabulary.
Logits are float32, and the caller may change them in place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from grpo_trainable.models.kv_cache import padded


@dataclass(frozen=True, kw_only=True)
class PromptBatch:
    """The prompts of one call, one per request, and the index of each row's prompt."""

    prompts: list[Tensor]  # (P,) int64 each
    fan_out: Tensor  # (B,) int64, index of each row's prompt
    max_new_tokens: int
    slots: int | None = None  # maximum number of rows in the batch; None: no limit

    @property
    def longest(self) -> int:
        """Number of tokens in the longest prompt."""
        return max(map(len, self.prompts))


class Decoder(Protocol):
    """Computes next-token logits for the rows of one call, using a KV cache."""

    def enter(self, rows: range) -> Tensor:
        """Add `rows` to the batch and return the logits (rows, V) for their first tokens.

        The new rows come after those already in the batch. If `PromptBatch.slots` is None, all B
        rows enter together. Each distinct prompt of the new rows runs through the model once.
        """
        ...

    def next(self, tokens: Tensor) -> Tensor:
        """Append one token (A,) to every row and return the logits (A, V) for the next token."""
        ...

    def keep(self, rows: Tensor) -> None:
        """Keep only the rows at these indices of the batch."""
        ...

    def rebuild(self, sampled: Tensor, lengths: Sequence[int]) -> None:
        """Recompute the cache for the prompts and the sampled tokens, with the current weights.

        Args:
            sampled: Ids of the tokens so far, (A, T).
            lengths: Number of those tokens in each row. If all rows entered together, this number
                is T for every row.
        """
        ...


class EpisodeDecoder(ABC):
    """Computes next-token logits for rows with different numbers of tokens.

    Each row writes a token to the column of the token's position, and so overwrites the padding of
    its prompt. The cache therefore does not depend on when an environment answered. At first there
    are B rows. Later, A of them remain.
    """

    def __init__(self, batch: PromptBatch, pad_id: int) -> None:
        self._prompts = batch.prompts
        self._fan_out = batch.fan_out
        self._columns = batch.longest + batch.max_new_tokens
        self._pad_id = pad_id
        self._device = batch.fan_out.device

    def first(self) -> Tensor:
        """Run the model once per prompt; return the logits (B, V) for every row's first token."""
        hidden, lengths = self._begin(self._prompts, self._fan_out)
        last = hidden[torch.arange(len(hidden), device=self._device), lengths - 1]
        return self._logits(last)[self._fan_out]

    def rebuild(self, sequences: Sequence[Tensor]) -> None:
        """Recompute the cache with the current weights, from the tokens of each row."""
        self._begin(sequences, torch.arange(len(sequences), device=self._device))

    @abstractmethod
    def next(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the logits (A, V) after one more token (A,) of every row.

        `positions` (A,) are positions in prompt plus response. A token that is passed again
        overwrites its own cache entry.
        """

    @abstractmethod
    def keep(self, rows: Tensor) -> None:
        """Keep only the rows at these indices of the batch."""

    @abstractmethod
    def _prefill(self, ids: Tensor, lengths: Tensor, fan_out: Tensor) -> Tensor:
        """Start a new cache of `_columns` columns, and return hidden states (sequences, S, D).

        Args:
            ids: Sequences, (sequences, S), padded on the right.
            lengths: Number of tokens of each sequence, (sequences,).
            fan_out: Index of each row's sequence.
        """

    @abstractmethod
    def _logits(self, hidden: Tensor) -> Tensor:
        """Return the logits (A, V) of hidden states (A, D)."""

    def _begin(self, sequences: Sequence[Tensor], fan_out: Tensor) -> tuple[Tensor, Tensor]:
        """Start a new cache. `fan_out` contains the index of each row's sequence.

        Returns:
            Hidden states (sequences, S, D), and the lengths of the sequences.
        """
        ids = padded(sequences, self._pad_id).to(self._device)
        lengths = torch.tensor([len(sequence) for sequence in sequences], device=self._device)
        return self._prefill(ids, lengths, fan_out), lengths
