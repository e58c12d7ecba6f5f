"""Attention in models of transformers, where that of torch does not serve: rows that are packed
attend to their own tokens each, and a CPU computes bfloat16 rows in float32.

T tokens, B rows, S positions, N heads, K of them with keys and values of their own, H head size.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from grpo_trainable.models.packing import Packing

NAME = "grpo_trainable"
# What the attention of some architectures does besides, by the arguments that say so.
UNKNOWN = ("sliding_window", "softcap", "s_aux", "position_bias")


def replace_attention(model: transformers.PreTrainedModel) -> None:
    """Has the layers of `model` use `_attention`.

    Raises:
        ValueError: the architecture has no attention that can be replaced.
    """
    transformers.AttentionInterface.register(NAME, _attention)
    transformers.AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packing: Packing | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Queries (B, N, S, H), keys and values (B, K, …, H) to (B, S, N, H)."""
    if packing is None:
        return _rows_attention(module, query, key, value, attention_mask, **others), None
    for name in UNKNOWN:
        if others.get(name) is not None:
            raise ValueError(f"its attention has {name}")
    query, key, value = (_to_rows(packing, x) for x in (query, key, value))
    others["is_causal"] = True
    out_BSNH = _rows_attention(module, query, key, value, None, **others)
    out_TD = packing.from_rows(out_BSNH.flatten(2))
    return out_TD.view(1, -1, *out_BSNH.shape[2:]), None


def _rows_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    **others: Any,
) -> Tensor:
    """The attention of torch, (B, S, N, H), by float32 where a CPU has bfloat16: there its kernels
    for bfloat16 are several times slower, with and without instructions for it."""
    dtype = query.dtype
    if dtype != torch.bfloat16 or query.device.type != "cpu":
        return sdpa_attention_forward(module, query, key, value, mask, **others)[0]
    if query.shape[2] == 1 and _is_plain(mask, others):
        return _one_query(query, key, value, mask, others["scaling"])
    if mask is not None and mask.dtype == dtype:
        mask = mask.float()
    wide = sdpa_attention_forward(module, query.float(), key.float(), value.float(), mask, **others)
    return wide[0].to(dtype)


def _is_plain(mask: Tensor | None, others: dict[str, Any]) -> bool:
    """Whether the attention of single queries is softmax of products, and nothing besides."""
    return (
        (mask is None or mask.dtype == torch.bool)
        and others.get("scaling") is not None
        and not others.get("dropout")
        and all(others.get(name) is None for name in UNKNOWN)
    )


def _one_query(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """(B, 1, N, H) of single queries (B, N, 1, H), by two products of matrices a head with keys."""
    rows, kv_heads, columns, size = key.shape
    grouped = query.float().view(rows, kv_heads, -1, size) * scale
    scores = grouped @ key.float().transpose(2, 3)  # (B, K, N / K, S)
    if mask is not None:
        scores = scores.masked_fill(~mask.expand(rows, 1, 1, columns), -torch.inf)
    mixed = scores.softmax(dim=-1) @ value.float()
    return mixed.to(query.dtype).view(rows, 1, -1, size)


def _to_rows(packing: Packing, x_1NTH: Tensor) -> Tensor:
    """(B, N, S, H)."""
    _, heads, _, size = x_1NTH.shape
    rows_BSD = packing.to_rows(x_1NTH[0].transpose(0, 1).flatten(1))
    return rows_BSD.unflatten(2, (heads, size)).transpose(1, 2)
