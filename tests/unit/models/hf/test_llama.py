"""This project's transformer under Llama's weight names."""

from __future__ import annotations

import torch

from grpo_trainable.models.hf.llama import llama_tensors
from grpo_trainable.models.model_config import ModelConfig
from grpo_trainable.models.transformer import TransformerLM

CONFIG = ModelConfig(
    vocab_size=50, context_length=16, d_model=8, num_layers=2, num_heads=2, d_ff=12, tied_head=False
)


def test_every_parameter_has_a_place_and_only_two_kinds_are_cut():
    model = TransformerLM(CONFIG)
    theirs = llama_tensors(model.weights())
    assert len(theirs) == 3 + 2 * 9
    assert sum(tensor.numel() for tensor in theirs.values()) == sum(
        tensor.numel() for tensor in model.weights().values()
    )
    block, layer = model.blocks[1], "model.layers.1."
    qkv, gate_up = block.attention.qkv.weight, block.mlp.gate_up.weight
    for place, name in enumerate("qkv"):
        rows = qkv[8 * place : 8 * (place + 1)]
        assert torch.equal(theirs[f"{layer}self_attn.{name}_proj.weight"], rows)
    assert torch.equal(theirs[f"{layer}mlp.gate_proj.weight"], gate_up[:12])
    assert torch.equal(theirs[f"{layer}mlp.up_proj.weight"], gate_up[12:])
    for name, parameter in (
        ("model.embed_tokens", model.embedding.weight),
        ("model.norm", model.final_norm.weight),
        ("lm_head", model.head.weight),
        (f"{layer}input_layernorm", block.attention_norm.weight),
        (f"{layer}post_attention_layernorm", block.mlp_norm.weight),
        (f"{layer}self_attn.o_proj", block.attention.out.weight),
        (f"{layer}mlp.down_proj", block.mlp.down.weight),
    ):
        assert torch.equal(theirs[f"{name}.weight"], parameter)


def test_a_tied_head_is_there_once():
    model = TransformerLM(ModelConfig(**{**CONFIG.to_dict(), "tied_head": True}))
    assert "lm_head.weight" not in llama_tensors(model.weights())
