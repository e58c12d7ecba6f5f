"""A KV cache for models of transformers that is allocated once.

The layers of a `DynamicCache` make new keys and values of all columns for every token.

A rows, N heads of keys and values, C columns in use, H head size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer


def preallocated_cache(config: PreTrainedConfig, columns: int) -> DynamicCache:
    """The cache of a model, with room for `columns` tokens of each row.

    Layers that keep something else than every token, such as those with a sliding window, stay as
    transformers makes them.
    """
    cache = DynamicCache(config=config)
    cache.layers = [
        PreallocatedLayer(columns) if type(layer) is DynamicLayer else layer
        for layer in cache.layers
    ]
    return cache


class PreallocatedLayer(DynamicLayer):
    """One layer, whose `keys` and `values` (A, N, C, H) are the first columns of larger tensors."""

    def __init__(self, columns: int) -> None:
        """`columns`: the most that may be in use."""
        super().__init__()
        self._columns = columns
        self._room: list[Tensor] = []  # storage of keys and of values, once there are any

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes the next columns; returns all keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        states = (key_states, value_states)
        if not self._room:
            self._room = [self._like(new) for new in states]
        begin = self.get_seq_length()
        end = begin + key_states.shape[-2]
        # A single token would be broadcast into no column at all.
        assert end <= self._columns, f"{end} tokens, and room for {self._columns}"
        for room, new in zip(self._room, states, strict=True):
            room[:, :, begin:end] = new
        self.keys, self.values = (room[:, :, :end] for room in self._room)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Goes on with these rows, of which one may be there several times."""
        if self.keys is None or self.values is None:
            return
        kept = self.keys[indices], self.values[indices]
        self._room, self.is_initialized = [], False
        self.update(*kept)

    def _like(self, states: Tensor) -> Tensor:
        """Room for the rows of `states` (A, N, T, H)."""
        rows, heads, _, size = states.shape
        return states.new_empty(rows, heads, self._columns, size)
