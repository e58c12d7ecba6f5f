"""Logits of rows that have come unequally far, on a KV cache.

Each row writes a token to the column of its own position, over the padding of its prompt, so that
what is cached does not depend on when an environment answered.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_trainable.engines.local import PromptBatch
from grpo_trainable.models.kv_cache import KVCache, decode_in_place, padded, prefill
from grpo_trainable.models.transformer import TransformerLM


class EpisodeCache:
    """B rows at first, of which A are left; V vocabulary. Logits are the caller's to change."""

    _cache: KVCache

    def __init__(self, model: TransformerLM, batch: PromptBatch, pad_id: int) -> None:
        self._model = model
        self._batch = batch
        self._pad_id = pad_id
        self._device = batch.fan_out.device

    def first(self) -> Tensor:
        """Logits (B, V) of every row's first token. Each distinct prompt is run once."""
        hidden, lengths = self._prefill(self._batch.prompts, self._batch.fan_out)
        last = hidden[torch.arange(len(hidden), device=self._device), lengths - 1]
        return self._model.head(last)[self._batch.fan_out]

    def next(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits (A, V) after one more token of every row, at its position in prompt and response.
        A token that was given before takes its own place."""
        hidden = decode_in_place(self._model, tokens, positions, self._cache)
        return self._model.head(hidden)

    def keep(self, rows: Tensor) -> None:
        """Keeps only these of the A rows."""
        self._cache.keep(rows)

    def rebuild(self, sequences: Sequence[Tensor]) -> None:
        """Fills the cache anew with the weights that are there now: all tokens of each row."""
        self._prefill(sequences, torch.arange(len(sequences), device=self._device))

    def _prefill(self, sequences: Sequence[Tensor], fan_out: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states (sequences, S, D) and the sequences' lengths, and a new cache of the rows
        that `fan_out` says."""
        ids = padded(sequences, self._pad_id)
        lengths = torch.tensor([len(sequence) for sequence in sequences], device=self._device)
        columns = self._batch.longest + self._batch.max_new_tokens
        hidden, self._cache = prefill(
            self._model, ids.to(self._device), lengths, fan_out, columns=columns
        )
        return hidden, lengths
