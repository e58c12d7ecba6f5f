"""The sizes of a policy's parts, from which its memory follows. Neither torch nor transformers is
imported, so that the launcher can ask before anything starts.

D hidden size, F width of the MLP, V vocabulary, r rank of LoRA.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_trainable.models.hf.directory import ALL_LINEAR, names_in, weight_shapes

# What configs of different architectures call the same thing.
NAMES = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "inner": ("intermediate_size", "n_inner", "d_ff"),
    "vocab": ("vocab_size",),
    "context": ("max_position_embeddings", "n_positions", "context_length"),
}
# The architectures of which every parameter can be counted: biases of query, key and value; norms
# of query and key.
COUNTED = {
    "llama": (False, False),
    "mistral": (False, False),
    "qwen2": (True, False),
    "qwen3": (False, True),
}
# The config.json of models that presets name, as far as memory depends on it: a model that is not
# here can be sized without the network. Width, layers, heads and vocabulary are those of
# Qwen2.5-1.5B, which the Math model is made from (arXiv 2412.15115 and 2409.12122); its context is
# 4,096 tokens.
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
    """The sizes of a decoder-only transformer with a gated MLP."""

    hidden: int  # D
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int  # F
    vocab: int  # V
    context: int  # tokens
    parameters: int  # a tied head once
    ours: bool  # a policy of this package, else one of transformers
    normed_heads: bool = False  # whether queries and keys are normalised

    @property
    def queries(self) -> int:
        """Numbers of a token's queries in one layer."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Numbers of a token's keys in one layer, as many as of its values."""
        return self.kv_heads * self.head_dim

    def adapter_parameters(self, rank: int, targets: str) -> int:
        """Parameters of LoRA adapters on these layers: r (inputs + outputs) for each."""
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
            # A name may lead to its module: self_attn.q_proj.
            else (layers.get(name.rpartition(".")[2], 0) for name in names)
        )
        return rank * self.layers * sum(chosen)


def dimensions_of(config: Mapping[str, Any]) -> Dimensions | None:
    """The sizes that a config.json of transformers tells; None where it names some otherwise.

    `parameters` is 0 where the architecture is not in `COUNTED`.
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
    """How many numbers the safetensors files of a model of transformers hold: only their headers
    are read.

    Raises:
        ValueError: a file is missing, torn, or is none of safetensors.
    """
    return sum(math.prod(shape) for shape in weight_shapes(directory).values())
