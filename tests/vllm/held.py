"""The exact weights that vLLM computes with.

vLLM packs matrices into a form that cannot be read. But a packed matrix times the unit vectors is
the matrix itself, because x · 1 + 0 · … is exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# Names of vLLM's fused layers -> the layers that they consist of, in order.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@torch.no_grad()
def held_weights(llm: Any) -> dict[str, Tensor]:
    """Return copies of the weights in vLLM's model, under vLLM's names."""
    (found,) = llm.apply_model(_read)
    return found


def _read(model: Any) -> dict[str, Tensor]:
    found = {}
    for name, module in model.named_modules():
        for kind, parameter in module.named_parameters(recurse=False):
            packed = kind == "weight" and hasattr(module, "cpu_linear") and "embed" not in name
            value = _unpacked(module, model.config) if packed else parameter.data
            found[f"{name}.{kind}"] = value.clone()
    return found


def _unpacked(module: Any, config: Any) -> Tensor:
    columns = getattr(module, "input_size", config.hidden_size)
    rows = module.cpu_linear(torch.eye(columns), module.weight, None).t()
    return rows[: getattr(module, "org_vocab_size", len(rows))].contiguous()


def as_fused(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return transformers' tensors, fused and renamed as in vLLM's model."""
    parts = {part: whole for whole, listed in FUSED.items() for part in listed}
    found: dict[str, list[Tensor]] = {}
    for name in sorted(tensors, key=_place):
        *stem, leaf, kind = name.split(".")
        found.setdefault(".".join((*stem, parts.get(leaf, leaf), kind)), []).append(tensors[name])
    return {name: torch.cat(listed) for name, listed in found.items()}


def _place(name: str) -> int:
    """Return the position of a layer in its fused layer, or 0 if it is not fused."""
    leaf = name.split(".")[-2]
    return next((parts.index(leaf) for parts in FUSED.values() if leaf in parts), 0)
