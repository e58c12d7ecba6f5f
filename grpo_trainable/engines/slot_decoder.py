"""Logits of rows that enter the batch in the place of others that have ended."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_trainable.engines.local import PromptBatch
from grpo_trainable.models.kv_cache import padded
from grpo_trainable.models.shelved_cache import ShelvedCache
from grpo_trainable.models.transformer import TransformerLM


class SlotDecoder:
    """Computes logits on a `ShelvedCache`, which has a place for each slot."""

    def __init__(self, model: TransformerLM, batch: PromptBatch, slots: int, pad_id: int) -> None:
        self._model = model
        self._pad_id = pad_id
        self._prompts = batch.prompts
        self._prompt_of: list[int] = batch.fan_out.tolist()  # which of them each of the B rows has
        self._rows: list[int] = []  # (A,) which of the B
        self._device = batch.fan_out.device
        columns = batch.longest + batch.max_new_tokens
        self._cache = ShelvedCache(model.config, columns, slots, self._device)

    def enter(self, rows: range) -> Tensor:
        # Rows of a group follow each other, so that these are the prompts from one on.
        first, last = self._prompt_of[rows[0]], self._prompt_of[rows[-1]]
        fan_out = [self._prompt_of[row] - first for row in rows]
        self._rows += rows
        return self._first(self._prompts[first : last + 1], fan_out)

    def next(self, tokens: Tensor) -> Tensor:
        return self._model.head(self._cache.decode(self._model, tokens))

    def keep(self, rows: Tensor) -> None:
        places = rows.tolist()
        self._rows = [self._rows[place] for place in places]
        self._cache.keep(places)

    def rebuild(self, sampled: Tensor, lengths: Sequence[int]) -> None:
        prompts = [self._prompts[self._prompt_of[row]] for row in self._rows]
        sampled = sampled.cpu()
        sequences = [
            torch.cat((prompt, own[:length]))
            for prompt, own, length in zip(prompts, sampled, lengths, strict=True)
        ]
        self._cache.clear()
        self._prefill(sequences, range(len(sequences)))

    def _first(self, prompts: Sequence[Tensor], fan_out: Sequence[int]) -> Tensor:
        """Logits (rows, V) of the first tokens of rows with these prompts."""
        hidden = self._prefill(prompts, fan_out)
        last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=self._device)
        hidden = hidden[torch.arange(len(prompts), device=self._device), last]
        logits = self._model.head(hidden)
        return logits[torch.tensor(fan_out, device=self._device)]

    def _prefill(self, sequences: Sequence[Tensor], fan_out: Sequence[int]) -> Tensor:
        """Hidden states (sequences, S, D); rows of them are in the cache from now on."""
        ids = padded(sequences, self._pad_id).to(self._device)
        return self._cache.prefill(self._model, ids, [len(s) for s in sequences], fan_out)
