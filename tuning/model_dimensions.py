"""Sizes of a policy's parts, which determine how much memory the policy needs.

This module imports neither torch nor transformers, so the launcher can use it before anything
starts.

D is the hidden size, F the width of the MLP, V the size of the vocabulary and r the rank of LoRA.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_trainable.models.hf.directory import ALL_LINEAR, names_in, weight_shapes

# Our name for a size -> its names in the configs of different architectures.
NAMES = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "inner": ("intermediate_size", "n_inner", "d_ff"),
    "vocab": ("vocab_size",),
    "context": ("max_position_embeddings", "n_positions", "context_length"),
}
# Architectures whose parameters can all be counted -> two flags. The first is True if query, key
# and value have biases, and the second if query and key have norms.
COUNTED = {
    "llama": (False, False),
    "mistral": (False, False),
    "qwen2": (True, False),
    "qwen3": (False, True),
}
# The parts of config.json on which memory depends, for models that presets name. So the size of a
# model is known without its files and without network access. Qwen2.5-Math-1.5B is made from
# Qwen2.5-1.5B and has the same width, layers, heads and vocabulary (arXiv 2412.15115 and
# 2409.12122). Its context is 4,096 tokens.
KNOWN: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-Math-1.5B": {
        "model_type": "qwen2",
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "max_position_embeddings": 4096,
        "num_attention_heads": 12,
        "num_hidden_layers": 28,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "vocab_size": 151936,
    },
}


@dataclass(frozen=True, kw_only=True)
class Dimensions:
    """Sizes of a decoder-only transformer with a gated MLP."""

    hidden: int  # D
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int  # F
    vocab: int  # V
    context: int  # tokens
    parameters: int  # a tied head counts once
    ours: bool  # True: a policy of this package; False: a `transformers` model
    normed_heads: bool = False  # queries and keys are normalised

    @property
    def queries(self) -> int:
        """Size of a token's queries in one layer."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Size of a token's keys in one layer. The token's values have the same size."""
        return self.kv_heads * self.head_dim

    def adapter_parameters(self, rank: int, targets: str) -> int:
        """Return the number of parameters of LoRA adapters: r (inputs + outputs) for each target.

        Args:
            rank: r.
            targets: The setting `model.lora_targets`.
        """
        d, f, q, k = self.hidden, self.inner, self.queries, self.keys
        layers = {
            "q_proj": d + q,
            "k_proj": d + k,
            "v_proj": d + k,
            "o_proj": q + d,
            "gate_proj": d + f,
            "up_proj": d + f,
            "down_proj": f + d,
        }
        names = names_in(targets)
        chosen = (
            layers.values()
            if names == [ALL_LINEAR]
            # A name may include its module: self_attn.q_proj.
            else (layers.get(name.rpartition(".")[2], 0) for name in names)
        )
        return rank * self.layers * sum(chosen)


def dimensions_of(config: Mapping[str, Any]) -> Dimensions | None:
    """Return the sizes in the config.json of a `transformers` model, or None if a size is missing.

    `parameters` is 0 if the architecture is not in `COUNTED`.
    """
    found = {
        ours: next((config[name] for name in theirs if type(config.get(name)) is int), None)
        for ours, theirs in NAMES.items()
    }
    if found["inner"] is None and found["hidden"] is not None:
        found["inner"] = 4 * found["hidden"]  # GPT-2's rule
    known = {name: size for name, size in found.items() if size is not None and size > 0}
    if len(known) < len(NAMES):
        return None
    heads, hidden = known["heads"], known["hidden"]
    read = Dimensions(
        **known,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        parameters=0,
        ours=False,
    )
    biases, norms = COUNTED.get(str(config.get("model_type")), (None, False))
    if biases is None:
        return read
    read = replace(read, normed_heads=norms)
    tied = bool(config.get("tie_word_embeddings", False))
    return replace(read, parameters=_count(read, tied=tied, biases=biases))


def _count(size: Dimensions, *, tied: bool, biases: bool) -> int:
    d, q, k = size.hidden, size.queries, size.keys
    attention = 2 * d * q + 2 * d * k
    if biases:
        attention += q + 2 * k
    if size.normed_heads:
        attention += 2 * size.head_dim
    layer = attention + 3 * d * size.inner + 2 * d
    return size.layers * layer + d + size.vocab * d * (1 if tied else 2)


def stored_parameters(directory: Path) -> int:
    """Return the number of parameters in the safetensors files of a `transformers` model.

    Only the headers of the files are read.

    Raises:
        ValueError: A file is missing, cut short, or not a safetensors file.
    """
    return sum(math.prod(shape) for shape in weight_shapes(directory).values())
