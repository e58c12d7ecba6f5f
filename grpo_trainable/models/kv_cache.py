"""A preallocated key-value cache for batched decoding, and the forward passes that use it.

B rows, N heads, H head size, C columns laid out now: prompt columns first, then one column a
sampled token.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from grpo_trainable.models.transformer import TransformerLM, rotate

# Columns are laid out in steps of this many. A batched product over contiguous matrices is three
# times as fast as one over slices of longer ones, and empty columns cost work.
STEP = 16


class KVCache:
    """Keys and values of every layer and row; columns fill left to right.

    The storage for all `columns` is taken once. Only the columns in use, rounded up to `STEP`, are
    laid out in it, contiguously; `bias` hides those that hold no token.
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
        self.columns = columns
        self._shape = (num_layers, rows, num_heads, head_dim)
        size = num_layers * rows * num_heads * columns * head_dim
        # Zeros: a column without a token has weight 0, and 0 x NaN would still be NaN.
        self._storage = torch.zeros(2, size, device=device)
        self.keys = self.values = self._lay_out(0)  # (layers, B, N, C, H)
        self.bias = torch.zeros(rows, 1, 1, 0, device=device)  # 0 for a token, -inf for none

    def _lay_out(self, capacity: int) -> Tensor:
        num_layers, rows, num_heads, head_dim = self._shape
        used = num_layers * rows * num_heads * capacity * head_dim
        return self._storage[:, :used].view(2, num_layers, rows, num_heads, capacity, head_dim)

    def reserve(self, columns: int) -> None:
        """Lays out room for at least `columns` columns, keeping what is there."""
        held = self.bias.shape[-1]
        if columns <= held:
            return
        capacity = min(self.columns, math.ceil(columns / STEP) * STEP)
        before = self._lay_out(held).clone()
        after = self._lay_out(capacity)
        after[..., held:, :] = 0
        after[..., :held, :] = before
        self.keys, self.values = after
        more = self.bias.new_full((*self.bias.shape[:-1], capacity - held), -torch.inf)
        self.bias = torch.cat((self.bias, more), dim=-1)

    def fill(self, layer: int, keys_BNSH: Tensor, values_BNSH: Tensor) -> None:
        """Writes the prompt's columns of one layer."""
        columns = keys_BNSH.shape[2]
        self.keys[layer, :, :, :columns] = keys_BNSH
        self.values[layer, :, :, :columns] = values_BNSH

    def append(self, layer: int, column: int, keys_BNH: Tensor, values_BNH: Tensor) -> None:
        """Writes one column of one layer."""
        self.keys[layer, :, :, column] = keys_BNH
        self.values[layer, :, :, column] = values_BNH

    def keep(self, rows: Tensor) -> None:
        """Forgets all rows but `rows`."""
        capacity = self.bias.shape[-1]
        kept = self._lay_out(capacity)[:, :, rows]
        num_layers, _, num_heads, head_dim = self._shape
        self._shape = (num_layers, len(rows), num_heads, head_dim)
        after = self._lay_out(capacity)
        after.copy_(kept)
        self.keys, self.values = after
        self.bias = self.bias[rows]


def prefill(
    model: TransformerLM,
    prompt_ids: Tensor,
    prompt_lengths: Tensor,
    fan_out: Tensor,
    columns: int,
) -> tuple[Tensor, KVCache]:
    """Runs each distinct prompt once: hidden states (prompts, S, D) and a cache of fanned-out rows.

    `prompt_ids` (prompts, S) is padded on the right to the longest of `prompt_lengths`; `fan_out`
    (B,) says which prompt a row has; the cache has room for `columns`, of which S are taken.
    """
    config = model.config
    length = prompt_ids.shape[1]
    cos, sin = model.cos[:length], model.sin[:length]
    cache = KVCache(
        config.num_layers, len(fan_out), config.num_heads, config.head_dim, columns, fan_out.device
    )
    cache.reserve(length)
    inside = torch.arange(length, device=fan_out.device) < prompt_lengths[fan_out, None]
    cache.bias[:, 0, 0, :length].masked_fill_(inside, 0.0)
    x = model.embedding(prompt_ids)
    for layer, block in enumerate(model.blocks):
        qk, values = block.attention.project(block.attention_norm(x), cos, sin)
        cache.fill(layer, qk[1][fan_out], values[fan_out])
        x = x + block.attention.attend(qk, values)
        x = x + block.mlp(block.mlp_norm(x))
    return model.final_norm(x), cache


def decode(
    model: TransformerLM, tokens: Tensor, positions: Tensor, cache: KVCache, column: int
) -> Tensor:
    """Hidden states (B, D) after one more token a row, which is written to `column` of the cache.

    `tokens` and `positions` are (B,): a row's position counts its own tokens, its column those of
    the longest prompt.
    """
    config = model.config
    rows = len(tokens)
    scale = 1 / math.sqrt(config.head_dim)
    cache.reserve(column + 1)
    cache.bias[..., column] = 0.0
    cos, sin = model.cos[positions, None, None], model.sin[positions, None, None]
    x = model.embedding(tokens)
    for layer, block in enumerate(model.blocks):
        qkv = block.attention.qkv(block.attention_norm(x))
        qkv = qkv.view(rows, 3, config.num_heads, config.head_dim)
        qk = rotate(qkv[:, :2], cos, sin)
        cache.append(layer, column, qk[:, 1], qkv[:, 2])
        query = qk[:, 0, :, None] * scale  # (B, N, 1, H)
        scores = (query @ cache.keys[layer].transpose(2, 3)).add_(cache.bias)
        mixed = scores.softmax(dim=-1) @ cache.values[layer]
        x = x + block.attention.out(mixed.view(rows, config.d_model))
        x = x + block.mlp(block.mlp_norm(x))
    return model.final_norm(x)
