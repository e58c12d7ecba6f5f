from __future__ import annotations

import json
import math
import re

import pytest
import torch

from grpo_trainable.config import GRPOConfig
from grpo_trainable.models.directory import read_config
from grpo_trainable.models.model_config import PRESETS, ModelConfig
from grpo_trainable.models.parameters import copy_parameters, unique_parameters
from grpo_trainable.models.store import build_policy, load_policy, save_policy
from grpo_trainable.models.tokenizer import Tokenizer
from grpo_trainable.models.transformer import (
    RMS_EPS,
    RMSNorm,
    SwiGLU,
    TransformerLM,
    rope_tables,
    rotate,
)

pytestmark = pytest.mark.numerics


def tiny_config(**changes) -> ModelConfig:
    shape = {"vocab_size": 50, "context_length": 24, "d_model": 16, "num_layers": 2}
    return ModelConfig(**{**shape, "num_heads": 2, "d_ff": 20, **changes})


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(50, (3, 12), generator=torch.Generator().manual_seed(0))


# ---- Building blocks -------------------------------------------------------------------------


def test_rms_norm_divides_by_the_root_of_the_mean_square():
    norm = RMSNorm(2)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, 2.0]))
    rms = math.sqrt((3**2 + 4**2) / 2 + RMS_EPS)
    expected = torch.tensor([[3 / rms, 2 * 4 / rms]])
    torch.testing.assert_close(norm(torch.tensor([[3.0, 4.0]])), expected)


def test_rope_turns_pairs_by_position_times_frequency():
    # With head size 4, pairs (0, 2) have frequency 1 and pairs (1, 3) have 1 / sqrt(theta).
    cos, sin = rope_tables(tiny_config(d_model=8, rope_theta=100.0))
    turned = rotate(torch.tensor([1.0, 1.0, 0.0, 0.0]), cos[3], sin[3])
    expected = [math.cos(3), math.cos(0.3), math.sin(3), math.sin(0.3)]
    torch.testing.assert_close(turned, torch.tensor(expected))
    second = rotate(torch.tensor([0.0, 0.0, 1.0, 0.0]), cos[3], sin[3])
    torch.testing.assert_close(second, torch.tensor([-math.sin(3), 0, math.cos(3), 0]))


def test_rope_products_depend_on_the_distance_alone():
    cos, sin = rope_tables(tiny_config())
    query, key = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    products = [
        rotate(query, cos[p + 5], sin[p + 5]) @ rotate(key, cos[p], sin[p]) for p in range(19)
    ]
    torch.testing.assert_close(torch.stack(products), products[0].expand(19))
    nearer = rotate(query, cos[4], sin[4]) @ rotate(key, cos[0], sin[0])
    assert abs(float(nearer - products[0])) > 1e-3


def test_swiglu_gates_the_up_projection():
    mlp = SwiGLU(tiny_config(d_model=4, d_ff=1))
    with torch.no_grad():
        mlp.gate_up.weight.copy_(torch.tensor([[1.0, 0, 0, 0], [0, 1.0, 0, 0]]))
        mlp.down.weight.copy_(torch.tensor([[1.0], [2.0], [0.0], [0.0]]))
    silu = 2 / (1 + math.exp(-2))
    expected = torch.tensor([3 * silu, 6 * silu, 0, 0])
    torch.testing.assert_close(mlp(torch.tensor([2.0, 3.0, 7.0, 7.0])), expected)


# ---- The model -------------------------------------------------------------------------------


def test_a_later_token_never_changes_an_earlier_logit(ids):
    model = TransformerLM(tiny_config(), seed=1)
    changed = ids.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 50
    with torch.no_grad():
        before, after = model(ids), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.isclose(before[:, 7:], after[:, 7:]).all(dim=-1).any()


def test_every_earlier_token_reaches_the_last_logit(ids):
    model = TransformerLM(tiny_config(), seed=1)
    with torch.no_grad():
        before = model(ids)[:, -1]
        for position in range(12):
            changed = ids.clone()
            changed[:, position] = (changed[:, position] + 1) % 50
            assert not torch.equal(model(changed)[:, -1], before)


def test_a_tied_head_is_one_parameter():
    tied, untied = TransformerLM(tiny_config()), TransformerLM(tiny_config(tied_head=False))
    assert tied.head_weight is tied.embedding.weight
    assert "head.weight" not in unique_parameters(tied)
    assert "head.weight" in unique_parameters(untied)
    extra = sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in tied.parameters())
    assert extra == 50 * 16


def test_same_seed_same_weights_whatever_torch_has_drawn_before():
    first = TransformerLM(tiny_config(), seed=3)
    torch.randn(7)
    second, other = TransformerLM(tiny_config(), seed=3), TransformerLM(tiny_config(), seed=4)
    for name, parameter in unique_parameters(first).items():
        assert torch.equal(parameter, unique_parameters(second)[name])
    assert not torch.equal(first.embedding.weight, other.embedding.weight)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "count"),
    # The counts add up the embedding, the layers and the last norm. Each layer has 4 D² + 3 D F
    # parameters in matrices and 2 D in norms.
    [
        ("tiny", 2048 * 128 + 4 * (4 * 128**2 + 3 * 128 * 344 + 2 * 128) + 128),
        ("small", 4096 * 256 + 4 * (4 * 256**2 + 3 * 256 * 688 + 2 * 256) + 256),
    ],
)
def test_presets_have_their_documented_size(preset, count):
    config = PRESETS[preset]
    model = TransformerLM(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    matrices = sum(p.numel() for p in model.blocks.parameters() if p.ndim == 2)
    assert config.matmul_parameters == matrices
    assert TransformerLM(PRESETS["tiny"]).cos.shape == (128, 32)


def test_tiny_has_about_a_million_parameters():
    assert sum(p.numel() for p in TransformerLM(PRESETS["tiny"]).parameters()) == 1_053_824


def test_more_tokens_than_the_context_are_refused():
    model = TransformerLM(tiny_config())
    with torch.no_grad():
        model(torch.zeros(1, 24, dtype=torch.int64))
    with pytest.raises(ValueError, match="25 tokens do not fit the context of 24"):
        model(torch.zeros(1, 25, dtype=torch.int64))


@pytest.mark.parametrize("change", [{"num_layers": 0}, {"d_model": 18}, {"num_heads": 3}])
def test_impossible_shapes_are_refused_by_name(change):
    with pytest.raises(ValueError, match=rf"(d_model|{next(iter(change))})=\d+"):
        tiny_config(**change)


# ---- On disk ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["a story"], 258)


def saved(directory, tokenizer, **kwargs) -> TransformerLM:
    model = TransformerLM(tiny_config(vocab_size=260), seed=5)
    save_policy(directory, model, tokenizer, **kwargs)
    return model


def test_a_saved_policy_loads_with_the_same_bits(tmp_path, tokenizer):
    model = saved(tmp_path / "policy", tokenizer, dtype=torch.float32)
    loaded, its_tokenizer = load_policy(tmp_path / "policy")
    assert loaded.config == model.config
    assert its_tokenizer.encode("a story") == tokenizer.encode("a story")
    for name, parameter in unique_parameters(loaded).items():
        assert torch.equal(parameter, unique_parameters(model)[name])
    assert loaded.head_weight is loaded.embedding.weight


def test_a_policy_is_stored_in_float16_and_loaded_as_float32(tmp_path, tokenizer):
    model = saved(tmp_path, tokenizer)
    loaded, _ = load_policy(tmp_path)
    weight = loaded.embedding.weight
    assert weight.dtype == torch.float32
    assert torch.equal(weight, model.embedding.weight.half().float())


def one_line_error(directory) -> str:
    with pytest.raises(ValueError, match=re.escape(str(directory))) as caught:
        load_policy(directory)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", ["config.json", "policy.safetensors", "tokenizer.json"])
def test_a_missing_file_is_a_one_line_error(tmp_path, tokenizer, name):
    saved(tmp_path, tokenizer)
    (tmp_path / name).unlink()
    assert name.split(".")[0] in one_line_error(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "policy.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("damage", ["truncated", "foreign", "empty", "directory"])
def test_a_damaged_file_is_a_one_line_error(tmp_path, tokenizer, name, damage):
    saved(tmp_path, tokenizer)
    file = tmp_path / name
    content = file.read_bytes()
    file.unlink()
    if damage == "directory":
        file.mkdir()
    else:
        file.write_bytes(
            {"truncated": content[: len(content) // 2], "foreign": b"[1, 2]", "empty": b""}[damage]
        )
    assert name.split(".")[0] in one_line_error(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"d_model": 16.0},
        {"d_model": "16"},
        {"vocab_size": True},
        {"tied_head": "no"},
        {"rope_theta": -1},
        {"rope_theta": None},
    ],
)
def test_a_config_of_wrong_types_is_a_one_line_error(tmp_path, tokenizer, change):
    saved(tmp_path, tokenizer)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    assert next(iter(change)) in one_line_error(tmp_path)


def test_weights_of_another_shape_are_a_one_line_error(tmp_path, tokenizer):
    saved(tmp_path, tokenizer)
    config = read_config(tmp_path).to_dict()
    (tmp_path / "config.json").write_text(json.dumps({**config, "d_ff": 24}))
    assert "blocks.0.mlp.gate_up.weight has shape (40, 16)" in one_line_error(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_layers": 1}))
    assert "blocks.1" in one_line_error(tmp_path)


def test_a_tokenizer_larger_than_the_policy_is_a_one_line_error(tmp_path, tokenizer):
    save_policy(tmp_path, TransformerLM(tiny_config(vocab_size=257)), tokenizer)
    assert "258 tokens, but the policy has only 257" in one_line_error(tmp_path)


def test_copying_refuses_before_it_changes_anything():
    model = TransformerLM(tiny_config())
    before = {name: p.detach().clone() for name, p in unique_parameters(model).items()}
    tensors = {name: tensor + 1 for name, tensor in before.items()}
    last = list(tensors)[-1]
    tensors[last] = tensors[last][:-1]
    with pytest.raises(ValueError, match=f"snapshot: {last} has shape"):
        copy_parameters(unique_parameters(model), tensors, source="snapshot")
    for name, parameter in unique_parameters(model).items():
        assert torch.equal(parameter, before[name])


def test_presets_without_shipped_weights_are_drawn_from_the_seed(monkeypatch):
    monkeypatch.setitem(PRESETS, "small", tiny_config())
    (first, _), (second, _), (other, _) = (
        build_policy(GRPOConfig.from_dict({"model": {"preset": "small"}}).model, seed)
        for seed in (1, 1, 2)
    )
    assert torch.equal(first.head_weight, second.head_weight)
    assert not torch.equal(first.head_weight, other.head_weight)


@pytest.mark.slow
@pytest.mark.parametrize("tied_head", [True, False])
def test_gradient_checkpointing_gives_the_same_bits(tied_head):
    grads, losses = [], []
    for checkpointed in (False, True):
        model = TransformerLM(tiny_config(tied_head=tied_head), seed=1)
        if checkpointed:
            model.checkpoint_gradients()
        ids = torch.arange(12).view(2, 6) % model.vocab_size
        loss = model(ids).log_softmax(-1)[..., 0].sum()
        loss.backward()
        losses.append(loss.detach())
        grads.append([parameter.grad for parameter in model.parameters()])
    assert torch.equal(*losses)
    for plain, checkpointed in zip(*grads, strict=True):
        assert float(plain.norm()) > 0
        assert torch.equal(plain, checkpointed)
