"""Attention of Hugging Face models, in two cases for which torch's attention is unsuitable.

In the first case, rows are packed, and each row must attend only to its own tokens. In the second
case, bfloat16 rows are on a CPU, and their attention is computed in float32.

T tokens, B rows, S positions, N heads, K key-value heads, head size H.
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
# Arguments that request extra features of attention in some architectures.
UNKNOWN = ("sliding_window", "softcap", "s_aux", "position_bias")


def replace_attention(model: transformers.PreTrainedModel) -> None:
    """Make the layers of `model` use `_attention`.

    Raises:
        ValueError: The architecture has no attention that can be replaced.
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
    """Map queries (B, N, S, H), keys and values (B, K, …, H) to (B, S, N, H)."""
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
    """Return torch's attention, (B, S, N, H). On a CPU, compute bfloat16 in float32.

    On a CPU, bfloat16 kernels are several times slower than float32 kernels, even if the CPU has
    bfloat16 instructions.
    """
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
    """Return True if the attention of single queries is a plain softmax of products."""
    return (
        (mask is None or mask.dtype == torch.bool)
        and others.get("scaling") is not None
        and not others.get("dropout")
        and all(others.get(name) is None for name in UNKNOWN)
    )


def _one_query(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """Return the attention (B, 1, N, H) of single queries (B, N, 1, H).

    This takes two matrix products per key-value head.
    """
    rows, kv_heads, columns, size = key.shape
    grouped = query.float().view(rows, kv_heads, -1, size) * scale
    scores = grouped @ key.float().transpose(2, 3)  # (B, K, N / K, S)
    if mask is not None:
        scores = scores.masked_fill(~mask.expand(rows, 1, 1, columns), -torch.inf)
    mixed = scores.softmax(dim=-1) @ value.float()
    return mixed.to(query.dtype).view(rows, 1, -1, size)


def _to_rows(packing: Packing, x_1NTH: Tensor) -> Tensor:
    """Spread packed tokens over rows, (B, N, S, H)."""
    _, heads, _, size = x_1NTH.shape
    rows_BSD = packing.to_rows(x_1NTH[0].transpose(0, 1).flatten(1))
    return rows_BSD.unflatten(2, (heads, size)).transpose(1, 2)
