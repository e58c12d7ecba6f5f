"""A key-value cache for rows that come and go at different times.

Shapes: L layers, A rows in the batch, N heads, H head size, C columns of a shelf. Token t of a row,
counting prompt and response together, is in column t.

A batched product over C columns costs as much for a short row as for a long row. Rows are therefore
grouped by length into shelves. The last shelf has as many columns as a row can have tokens, the
shelf before it has half as many, and so on. A row that has filled its shelf moves to the next
shelf. At least half of the columns of a row therefore contain tokens, except in the shortest rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from grpo_trainable.models.kv_cache import attention, run_prompts, run_tokens
from grpo_trainable.models.model_config import ModelConfig
from grpo_trainable.models.transformer import TransformerLM

SHORTEST = 32  # minimum columns of a shelf, unless rows are limited to fewer tokens


def shelf_columns(most: int) -> list[int]:
    """Return each shelf's number of columns, shortest first, for rows of at most `most` tokens."""
    columns = most
    found = [columns]
    while (columns := -(-columns // 2)) >= SHORTEST:
        found.append(columns)
    return found[::-1]


class Shelf:
    """Keys and values of rows that have at most `columns` tokens, stored row by row."""

    def __init__(
        self, config: ModelConfig, columns: int, places: int, device: torch.device
    ) -> None:
        self.columns = columns
        self.rows: list[int] = []  # for each place, the index of its row in the batch
        self.lengths: list[int] = []  # for each place, the number of tokens of its row
        shape = (config.num_layers, 2, places, config.num_heads, columns, config.head_dim)
        self._storage = torch.empty(shape, device=device)
        self._device = device

    def add(self, rows: Sequence[int], lengths: Sequence[int], source: Tensor, at: Tensor) -> None:
        """Append rows.

        Args:
            rows: Rows of the batch.
            lengths: Number of tokens of each row.
            source: Keys and values, (L, 2, any, N, any, H).
            at: Index of each row in the third dimension of `source`.
        """
        here = slice(len(self.rows), len(self.rows) + len(rows))
        filled = min(self.columns, source.shape[4])
        for own, other in zip(self._storage, source, strict=True):
            own[:, here, :, :filled] = other[:, at, :, :filled]
            # An attention weight of 0 would not hide a NaN in an empty column: 0 x NaN is NaN.
            own[:, here, :, filled:] = 0.0
        self.rows += rows
        self.lengths += lengths

    def move(self, places: Sequence[int], shelf: Shelf) -> None:
        """Move the rows at these places to the end of another shelf."""
        rows, lengths = ([of[place] for place in places] for of in (self.rows, self.lengths))
        shelf.add(rows, lengths, self._storage, torch.tensor(places, device=self._device))
        self.remove(places)

    def remove(self, places: Sequence[int]) -> None:
        """Remove the rows at these places, and fill the gaps with the last rows of the shelf."""
        left, gone = len(self.rows) - len(places), set(places)
        holes = [place for place in places if place < left]
        movers = [place for place in range(left, len(self.rows)) if place not in gone]
        if holes:
            self._storage[:, :, holes] = self._storage[:, :, movers]
        for of in (self.rows, self.lengths):
            for hole, mover in zip(holes, movers, strict=True):
                of[hole] = of[mover]
            del of[left:]

    def begin_token(self) -> Tensor:
        """Prepare for one more token per row on this shelf, and return the tokens' positions."""
        at = torch.tensor(self.lengths, device=self._device)
        hidden = torch.arange(self.columns, device=self._device) > at[:, None]
        bias = torch.zeros(hidden.shape, device=self._device).masked_fill_(hidden, -torch.inf)
        self._bias = bias[:, None, None]  # (rows on this shelf, 1, 1, C)
        self._new = (torch.arange(len(at), device=self._device), slice(None), at)
        self.lengths = [length + 1 for length in self.lengths]
        return at

    def attend(self, layer: int, query: Tensor, new_keys: Tensor, new_values: Tensor) -> Tensor:
        """Compute attention for one new token per row on this shelf, as `run_tokens` requires."""
        keys, values = self._storage[layer, :, : len(self.rows)]
        keys[self._new] = new_keys[:, 0]
        values[self._new] = new_values[:, 0]
        return attention(query, keys, values, self._bias)


class ShelvedCache:
    """The keys and values of the rows in a batch. The number of rows, A, is at most `places`."""

    def __init__(self, config: ModelConfig, columns: int, places: int, device: torch.device):
        """Set up a cache for at most `places` rows of at most `columns` tokens."""
        self._config, self._places, self._device = config, places, device
        self._shelves: dict[int, Shelf | None] = dict.fromkeys(shelf_columns(columns))
        self._count = 0  # A

    def prefill(
        self,
        model: TransformerLM,
        prompt_ids: Tensor,
        lengths: Sequence[int],
        fan_out: Sequence[int],
    ) -> Tensor:
        """Append rows to the batch, and return the hidden states (prompts, S, D) of their prompts.

        Args:
            model: The policy.
            prompt_ids: Prompts, (prompts, S), padded on the right.
            lengths: Number of tokens of each prompt.
            fan_out: Index of each new row's prompt.
        """
        computed: list[Tensor] = []
        hidden = run_prompts(
            model, prompt_ids, lambda _, keys, values: computed.append(torch.stack((keys, values)))
        )
        source = torch.stack(computed)
        fits: dict[int, list[int]] = {}
        for i, prompt in enumerate(fan_out):
            columns = next(c for c in self._shelves if c > lengths[prompt])
            fits.setdefault(columns, []).append(i)
        for columns, own in fits.items():
            prompts = [fan_out[i] for i in own]
            self._shelf(columns).add(
                [self._count + i for i in own],
                [lengths[prompt] for prompt in prompts],
                source,
                torch.tensor(prompts, device=self._device),
            )
        self._count += len(fan_out)
        return hidden

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only the rows at these indices of the batch, in this order."""
        new = {row: i for i, row in enumerate(rows)}
        for shelf in self._used():
            shelf.remove([place for place, row in enumerate(shelf.rows) if row not in new])
            shelf.rows = [new[row] for row in shelf.rows]
        self._count = len(rows)

    def clear(self) -> None:
        """Remove all rows."""
        self.keep([])

    def decode(self, model: TransformerLM, tokens: Tensor) -> Tensor:
        """Return the hidden states (A, D) after one more token per row, `tokens` (A,)."""
        self._move_up()
        shelves = self._used()
        order = torch.tensor([row for shelf in shelves for row in shelf.rows], device=self._device)
        positions = torch.cat([shelf.begin_token() for shelf in shelves])
        ends = accumulate((len(shelf.rows) for shelf in shelves), initial=0)
        parts = list(zip(shelves, pairwise(ends), strict=True))

        def attend(layer: int, *computed: Tensor) -> Tensor:
            mixed = [
                shelf.attend(layer, *(of[begin:end] for of in computed))
                for shelf, (begin, end) in parts
            ]
            return torch.cat(mixed)

        hidden = run_tokens(model, tokens[order, None], positions[:, None], attend)[:, 0]
        return torch.empty_like(hidden).index_copy_(0, order, hidden)

    def _move_up(self) -> None:
        """Move each row that has filled its shelf to the next shelf."""
        for columns, more in pairwise(self._shelves):
            shelf = self._shelves[columns]
            if shelf is None:
                continue
            full = [place for place, length in enumerate(shelf.lengths) if length == columns]
            if full:
                shelf.move(full, self._shelf(more))

    def _shelf(self, columns: int) -> Shelf:
        shelf = self._shelves[columns]
        if shelf is None:
            shelf = Shelf(self._config, columns, self._places, self._device)
            self._shelves[columns] = shelf
        return shelf

    def _used(self) -> list[Shelf]:
        return [shelf for shelf in self._shelves.values() if shelf is not None and shelf.rows]
