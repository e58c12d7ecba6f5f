"""Logits of Hugging Face models for episodes, whose rows differ in their numbers of tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from grpo_trainable.engines.decoder import EpisodeDecoder, PromptBatch
from grpo_trainable.engines.hf.cache import Places, cache_argument, episode_cache
from grpo_trainable.models.hf.policy import HFPolicy


class HFEpisodeDecoder(EpisodeDecoder):
    """Computes logits with a cache whose rows write to the columns of their own positions."""

    def __init__(
        self,
        policy: HFPolicy,
        logits: Callable[[Tensor], Tensor],
        batch: PromptBatch,
        pad_id: int,
    ) -> None:
        """Set up a decoder. `logits` maps hidden states (A, D) to logits (A, V)."""
        super().__init__(batch, pad_id)
        self._policy = policy
        self._logits_of = logits
        self._cache_name = cache_argument(policy.body)

    def next(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the logits (A, V) after one more token (A,) of every row."""
        reach = int(positions.max()) + 1
        self._places.columns, self._places.reach = positions, reach
        columns = torch.arange(reach, device=self._device)
        output = self._policy.body(
            input_ids=tokens[:, None],
            attention_mask=columns <= positions[:, None],
            position_ids=positions[:, None],
            **{self._cache_name: self._cache},
            use_cache=True,
        )
        return self._logits(output.last_hidden_state[:, 0])

    def keep(self, rows: Tensor) -> None:
        """Keep only the rows at these indices of the batch."""
        self._cache.batch_select_indices(rows)

    def _prefill(self, ids: Tensor, lengths: Tensor, fan_out: Tensor) -> Tensor:
        self._places = Places()
        self._cache = episode_cache(self._policy.model.config, self._columns, self._places)
        # No token sees later columns, so the padding on the right needs no mask.
        output = self._policy.body(
            input_ids=ids,
            position_ids=torch.arange(ids.shape[1], device=self._device)[None],
            **{self._cache_name: self._cache},
            use_cache=True,
        )
        self._cache.batch_select_indices(fan_out)
        return output.last_hidden_state

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._logits_of(hidden)
