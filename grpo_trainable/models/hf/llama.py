"""A policy of this package as a Hugging Face Llama: the same computation under other names.

Llama has separate matrices for query, key and value, and for gate and up. A policy of this package
has one matrix for each of these two groups.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from grpo_trainable.models.model_config import ModelConfig
from grpo_trainable.models.tokenizer import END_OF_TEXT, PAD, Tokenizer
from grpo_trainable.models.transformer import RMS_EPS

# Our names without `.weight` -> Llama's names, for the whole model and for one of its layers.
OF_MODEL = {"embedding": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}
OF_LAYER = {
    "attention_norm": ("input_layernorm",),
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.out": ("self_attn.o_proj",),
    "mlp_norm": ("post_attention_layernorm",),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
}


def llama_tensors(ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return views of a `TransformerLM`'s parameters under Llama's names.

    A tied head appears once.
    """
    return {
        theirs: part for name, tensor in ours.items() for theirs, part in _renamed(name, tensor)
    }


def _renamed(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    stem = name.removesuffix(".weight")
    if stem in OF_MODEL:
        return [(f"{OF_MODEL[stem]}.weight", tensor)]
    _, layer, stem = stem.split(".", 2)  # blocks.3.attention.qkv
    parts = OF_LAYER[stem]
    return [
        (f"model.layers.{layer}.{part}.weight", rows)
        for part, rows in zip(parts, tensor.chunk(len(parts)), strict=True)
    ]


def llama_config(config: ModelConfig, tokenizer: Tokenizer, dtype: torch.dtype) -> dict[str, Any]:
    """Return the content of the config.json that describes the policy as a Llama."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": str(dtype).removeprefix("torch."),
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_length,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": RMS_EPS,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tied_head,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.pad_id,
    }


def write_llama(
    directory: Path,
    config: ModelConfig,
    parameters: Mapping[str, Tensor],
    tokenizer: Tokenizer,
    dtype: torch.dtype,
) -> None:
    """Write a directory that `transformers` and vLLM can load.

    Args:
        directory: An existing directory.
        config: Shape of the policy.
        parameters: Parameters of a `TransformerLM` of this shape, under our names.
        tokenizer: Tokenizer of the policy.
        dtype: Precision of the stored weights.
    """
    tensors = {
        name: tensor.detach().to(device="cpu", dtype=dtype).contiguous()
        for name, tensor in llama_tensors(parameters).items()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(directory / "tokenizer.json")
    ends = {"eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
    contents = {
        "config.json": llama_config(config, tokenizer, dtype),
        "generation_config.json": ends,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END_OF_TEXT,
            "pad_token": PAD,
            "model_max_length": config.context_length,
            # As in our tokenizer, a special token that a text spells out becomes plain characters.
            "split_special_tokens": True,
            "clean_up_tokenization_spaces": False,
        },
    }
    for name, content in contents.items():
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
