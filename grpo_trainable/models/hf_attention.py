"""The attention of packed rows in models of transformers: each row attends to its own tokens.

T tokens, B rows, S positions, N heads, H head size.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from grpo_trainable.models.packing import Packing

NAME = "grpo_trainable_rows"
# What the attention of some architectures does besides, by the arguments that say so.
UNKNOWN = ("sliding_window", "softcap", "s_aux", "position_bias")


def attend_by_rows(model: transformers.PreTrainedModel) -> None:
    """Has the layers of `model` use `_attention`, which without a `packing` is that of torch.

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
    """Queries, keys and values (1, N, T, H) to (1, T, N, H)."""
    if packing is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **others)
    for name in UNKNOWN:
        if others.get(name) is not None:
            raise ValueError(f"its attention has {name}")
    query, key, value = (_to_rows(packing, x) for x in (query, key, value))
    others["is_causal"] = True
    out_BSNH, _ = sdpa_attention_forward(module, query, key, value, None, **others)
    out_TD = packing.from_rows(out_BSNH.flatten(2))
    return out_TD.view(1, -1, *out_BSNH.shape[2:]), None


def _to_rows(packing: Packing, x_1NTH: Tensor) -> Tensor:
    """(B, N, S, H)."""
    _, heads, _, size = x_1NTH.shape
    rows_BSD = packing.to_rows(x_1NTH[0].transpose(0, 1).flatten(1))
    return rows_BSD.unflatten(2, (heads, size)).transpose(1, 2)
