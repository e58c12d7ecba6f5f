"""A preallocated key-value cache for batched decoding, and the forward passes that use it.

B rows, N heads, H head size. C is the number of columns laid out so far: prompt columns first, then
one column per sampled token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grpo_trainable.models.transformer import TransformerLM, rotate

# The number of columns laid out grows in steps of this size. Columns are laid out contiguously,
# because a batched product over contiguous matrices is three times as fast as a product over slices
# of longer matrices. The steps are small, because computing with empty columns takes time.
STEP = 16

Attend: TypeAlias = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # see `run_tokens`


class KVCache:
    """Keys and values of every layer and row. Columns are filled from left to right.

    The storage of each layer has room for all `columns` from the start. Only the columns in use,
    rounded up to a multiple of `STEP`, are laid out contiguously in that storage. `bias` hides
    columns without a token.
    """

    def __init__(
        self,
        num_layers: int,
        rows: int,
        num_heads: int,
        head_dim: int,
        columns: int,
        device: torch.device,
    ) -> None:
        self._columns = columns
        self._num_heads, self._head_dim = num_heads, head_dim
        size = 2 * rows * num_heads * columns * head_dim
        self._storage = torch.empty(num_layers, size, device=device)
        self.bias = torch.zeros(rows, 1, 1, 0, device=device)  # 0 at tokens, -inf elsewhere
        self._lay_out()

    def _lay_out(self) -> None:
        """Make views of the storage for the rows and columns of `bias`."""
        rows, _, _, capacity = self.bias.shape
        shape = (2, rows, self._num_heads, capacity, self._head_dim)
        used = self._storage[:, : math.prod(shape)]
        self._layers = used.view(len(used), *shape)  # (layers, 2, B, N, C, H)

    def reserve(self, columns: int) -> None:
        """Lay out at least `columns` columns, and keep the content of existing columns."""
        held = self.bias.shape[-1]
        if columns <= held:
            return
        capacity = min(self._columns, math.ceil(columns / STEP) * STEP)
        before = self._layers
        self.bias = F.pad(self.bias, (0, capacity - held), value=-torch.inf)
        self._lay_out()
        for old, new in zip(before, self._layers, strict=True):
            new[..., :held, :] = old.clone()  # old and new use the same storage
            # An attention weight of 0 would not hide a NaN in an empty column: 0 x NaN is NaN.
            new[..., held:, :] = 0.0

    def keep(self, rows: Tensor) -> None:
        """Keep only the rows with the indices `rows`."""
        before = self._layers
        self.bias = self.bias[rows]
        self._lay_out()
        for old, new in zip(before, self._layers, strict=True):
            new.copy_(old[:, rows])

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of one layer, for reading and writing, each (B, N, C, H)."""
        keys, values = self._layers[index]
        return keys, values


def padded(sequences: Sequence[Tensor], pad_id: int) -> Tensor:
    """Stack sequences of any length as rows, padded on the right to the longest."""
    return pad_sequence(list(sequences), batch_first=True, padding_value=pad_id)


def prefill(
    model: TransformerLM,
    prompt_ids: Tensor,
    prompt_lengths: Tensor,
    fan_out: Tensor,
    columns: int,
) -> tuple[Tensor, KVCache]:
    """Run each distinct prompt once, and copy its keys and values to all rows with that prompt.

    Args:
        model: The policy.
        prompt_ids: Prompts, (prompts, S), padded on the right to the longest of `prompt_lengths`.
        prompt_lengths: Number of tokens of each prompt, (prompts,).
        fan_out: Index of each row's prompt, (B,).
        columns: Number of columns of the cache. The prompts use the first S columns.

    Returns:
        Hidden states (prompts, S, D), and the cache.
    """
    config = model.config
    length = prompt_ids.shape[1]
    cache = KVCache(
        config.num_layers, len(fan_out), config.num_heads, config.head_dim, columns, fan_out.device
    )
    cache.reserve(length)
    inside = torch.arange(length, device=fan_out.device) < prompt_lengths[fan_out, None]
    cache.bias[:, 0, 0, :length].masked_fill_(inside, 0.0)

    def write(layer: int, *computed: Tensor) -> None:
        for cached, of_prompts in zip(cache.layer(layer), computed, strict=True):
            cached[:, :, :length] = of_prompts[fan_out]

    return run_prompts(model, prompt_ids, write), cache


def run_prompts(
    model: TransformerLM, prompt_ids: Tensor, write: Callable[[int, Tensor, Tensor], None]
) -> Tensor:
    """Return the hidden states (prompts, S, D) of `prompt_ids` (prompts, S).

    `write` receives each layer's index with its keys and values, both (prompts, N, S, H).
    """
    length = prompt_ids.shape[1]
    cos, sin = model.cos[:length], model.sin[:length]
    x = model.embedding(prompt_ids)
    for layer, block in enumerate(model.blocks):
        qk, values = block.attention.project(block.attention_norm(x), cos, sin)
        write(layer, qk[1], values)
        x = x + block.attention.attend(qk, values)
        x = x + block.mlp(block.mlp_norm(x))
    return model.final_norm(x)


def decode(
    model: TransformerLM, tokens: Tensor, positions: Tensor, cache: KVCache, column: int
) -> Tensor:
    """Return the hidden states (B, T, D) after T more tokens per row.

    The tokens are written to the cache from `column` on.

    Args:
        model: The policy.
        tokens: Token ids, (B, T).
        positions: Positions of the tokens in their rows, (B, T). Padding does not count.
        cache: The cache.
        column: First column to write, the same for all rows. In every row, the first columns are
            reserved for the prompt. Their number is the length of the longest prompt.
    """
    count = tokens.shape[1]
    cache.reserve(column + count)
    written = slice(column, column + count)
    cache.bias[..., written] = 0.0
    bias = cache.bias
    if count > 1:  # a token sees itself and the tokens before it
        later = torch.full((count, count), -torch.inf, device=bias.device).triu(1)
        bias = bias.repeat(1, 1, count, 1)  # (B, 1, T, C)
        bias[..., written] = later

    def write(cached: Tensor, computed: Tensor) -> None:
        cached[:, :, written] = computed.transpose(1, 2)

    return run_tokens(model, tokens, positions, _on_cache(cache, bias, write))


def decode_in_place(
    model: TransformerLM, tokens: Tensor, positions: Tensor, cache: KVCache
) -> Tensor:
    """Return the hidden states (B, D) after one more token per row, `tokens` (B,).

    Each token is written to the column that equals its position, and may overwrite an earlier
    token. `positions` is (B,). Rows may have different numbers of tokens: a row sees the columns of
    its prompt and the columns that it has written.
    """
    rows = torch.arange(len(tokens), device=tokens.device)
    cache.reserve(int(positions.max()) + 1)
    cache.bias[rows, 0, 0, positions] = 0.0

    def write(cached: Tensor, computed: Tensor) -> None:
        cached[rows, :, positions] = computed[:, 0]

    attend = _on_cache(cache, cache.bias, write)
    return run_tokens(model, tokens[:, None], positions[:, None], attend)[:, 0]


def _on_cache(cache: KVCache, bias: Tensor, write: Callable[[Tensor, Tensor], None]) -> Attend:
    """Return the function that computes the attention of all rows over one cache.

    `bias` (B, 1, 1 or T, C) hides columns. `write` puts keys and values (B, T, N, H) into the
    cache (B, N, C, H).
    """

    def attend(layer: int, query: Tensor, *computed: Tensor) -> Tensor:
        keys, values = cache.layer(layer)
        for cached, new in zip((keys, values), computed, strict=True):
            write(cached, new)
        return attention(query, keys, values, bias)

    return attend


def attention(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
    """Return the attention of scaled queries (B, N, T, H) over keys and values (B, N, C, H)."""
    scores = (query @ keys.transpose(2, 3)).add_(bias)
    return scores.softmax(dim=-1) @ values


def run_tokens(model: TransformerLM, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
    """Return the hidden states (B, T, D) of tokens (B, T) at their positions.

    `attend` receives a layer's index, its scaled queries (B, N, T, H), and the keys and values of
    the tokens (B, T, N, H). `attend` stores these keys and values together with earlier keys
    and values, and returns the attention (B, N, T, H).
    """
    config = model.config
    rows, count = tokens.shape
    scale = 1 / math.sqrt(config.head_dim)
    cos, sin = model.cos[positions][:, :, None, None], model.sin[positions][:, :, None, None]
    # Flattened to (B T, D), because on a CPU a plain product is faster than a batched product.
    x = model.embedding(tokens.flatten())
    for layer, block in enumerate(model.blocks):
        qkv = block.attention.qkv(block.attention_norm(x))
        qkv = qkv.view(rows, count, 3, config.num_heads, config.head_dim)
        qk = rotate(qkv[:, :, :2], cos, sin)
        query = qk[:, :, 0].transpose(1, 2) * scale  # (B, N, T, H)
        mixed = attend(layer, query, qk[:, :, 1], qkv[:, :, 2])
        mixed = mixed.transpose(1, 2).reshape(rows * count, config.d_model)
        x = x + block.attention.out(mixed)
        x = x + block.mlp(block.mlp_norm(x))
    return model.final_norm(x).view(rows, count, config.d_model)
