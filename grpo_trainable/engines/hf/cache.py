"""Caches of keys and values for Hugging Face models, allocated once for a whole call.

Shapes: A rows, N heads of keys and values, C columns, head size H, T tokens.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer


def cache_argument(body: torch.nn.Module) -> str:
    """Return the name of the argument with which a model receives its cache."""
    # Since version 5.24 of `transformers`, most of its models call this argument `cache`.
    known = inspect.signature(body.forward).parameters
    return "cache" if "cache" in known else "past_key_values"


def preallocated_cache(config: PreTrainedConfig, columns: int) -> DynamicCache:
    """Return a cache for a model, with room for `columns` tokens per row.

    Layers that do not keep every token, such as those with a sliding window, are left as
    `transformers` creates them.
    """
    cache = DynamicCache(config=config)
    cache.layers = [
        PreallocatedLayer(columns) if type(layer) is DynamicLayer else layer
        for layer in cache.layers
    ]
    return cache


class PreallocatedLayer(DynamicLayer):
    """A cache layer whose `keys` and `values` (A, N, C, H) are views of preallocated tensors."""

    def __init__(self, columns: int) -> None:
        """Set up a layer for at most `columns` columns."""
        super().__init__()
        self._columns = columns
        self._room: list[Tensor] = []  # storage of keys and values; empty before the first `update`

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the next columns, and return all keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        states = (key_states, value_states)
        if not self._room:
            self._room = [self._like(new) for new in states]
        begin = self.get_seq_length()
        end = begin + key_states.shape[-2]
        # Without this check, a single token would be broadcast to an empty slice without an error.
        assert end <= self._columns, f"{end} tokens, but room for only {self._columns}"
        for room, new in zip(self._room, states, strict=True):
            room[:, :, begin:end] = new
        self.keys, self.values = (room[:, :, :end] for room in self._room)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows at `indices`, in this order. A row may occur several times."""
        if self.keys is None or self.values is None:
            return
        kept = self.keys[indices], self.values[indices]
        self._room, self.is_initialized = [], False
        self.update(*kept)

    def _like(self, states: Tensor) -> Tensor:
        """Return empty storage for the rows of `states` (A, N, T, H)."""
        rows, heads, _, size = states.shape
        return states.new_empty(rows, heads, self._columns, size)


@dataclass(kw_only=True)
class Places:
    """The columns to which the rows of a batch write their next tokens, the same in all layers."""

    columns: Tensor | None = None  # (A,), or None while prompts are written to the first columns
    reach: int = 0  # number of columns in use: the highest index in `columns`, plus 1


def episode_cache(config: PreTrainedConfig, columns: int, places: Places) -> DynamicCache:
    """Return a cache for rows with different numbers of tokens, up to `columns`.

    Raises:
        ValueError: A layer does not keep the keys and values of every token.
    """
    cache = DynamicCache(config=config)
    others = [layer for layer in cache.layers if type(layer) is not DynamicLayer]
    if others:
        raise ValueError(
            "episodes need a cache that keeps every token, but a layer of this model has a "
            f"{type(others[0]).__name__}"
        )
    cache.layers[:] = [EpisodeLayer(columns, places) for _ in cache.layers]
    return cache


class EpisodeLayer(PreallocatedLayer):
    """A cache layer in which each row writes its next token to the column that `Places` names.

    The caller's attention mask hides the columns that a row has not written.
    """

    def __init__(self, columns: int, places: Places) -> None:
        """Set up a layer for at most `columns` columns. The caller updates `places`."""
        super().__init__(columns)
        self._places = places

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the tokens of prompts, or one token for each row; return keys and values."""
        columns = self._places.columns
        if columns is None:
            return super().update(key_states, value_states)
        rows = torch.arange(len(columns), device=columns.device)
        for room, new in zip(self._room, (key_states, value_states), strict=True):
            room[rows, :, columns] = new[:, :, 0]
        return self._show(self._places.reach)

    def get_seq_length(self) -> int:
        """Return the index of the last column that any row writes in this pass.

        `transformers` computes the mask as if every row wrote to this column.
        """
        return super().get_seq_length() if self._places.columns is None else self._places.reach - 1

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows at `indices`, in this order. A row may occur several times."""
        assert self.keys is not None, "prompts are written before rows are selected"
        self._room = [room[indices] for room in self._room]
        self._show(self.keys.shape[-2])

    def _show(self, columns: int) -> tuple[Tensor, Tensor]:
        self.keys, self.values = (room[:, :, :columns] for room in self._room)
        return self.keys, self.values

    def _like(self, states: Tensor) -> Tensor:
        """Return storage filled with zeros for the rows of `states` (A, N, T, H).

        Attention multiplies the values of masked columns by 0, so these values must be finite.
        """
        return super()._like(states).zero_()
