"""Policies that sample in bfloat16: products by hand, incoming weights, sampling distribution."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from policies import Pieces, sharpened
from torch import Tensor, nn

from grpo_trainable.config import ConfigError, GRPOConfig
from grpo_trainable.config.engine_catalog import ENGINES
from grpo_trainable.engines.agreement import mean_difference, probes, refuse_disagreement
from grpo_trainable.engines.engine import EngineSetup
from grpo_trainable.engines.selection import chosen_engine
from grpo_trainable.engines.torch_engine import TorchEngine, build_torch_engine
from grpo_trainable.models.model_config import ModelConfig
from grpo_trainable.models.narrow import NarrowEmbedding, NarrowLinear, narrow
from grpo_trainable.models.store import build_policy
from grpo_trainable.models.transformer import TransformerLM
from grpo_trainable.protocol.checksums import storage_checksum
from grpo_trainable.protocol.rollout import PolicyWeights, SamplingLimits

pytestmark = pytest.mark.numerics

CONFIG = ModelConfig(
    vocab_size=50, context_length=32, d_model=32, num_layers=2, num_heads=4, d_ff=40
)
LIMITS = SamplingLimits(min_new_tokens=1, max_new_tokens=12, temperature=1.0, end_ids=(0,))
TOKENS: Any = Pieces([*"abcdefgh"] * 6)
NARROW: dict[str, Any] = {"model": {"sampler_dtype": "bfloat16"}}


def narrowed(seed: int = 0, config: ModelConfig = CONFIG) -> TransformerLM:
    model = sharpened(config, seed)
    narrow(model)
    return model


def snapshot(model: TransformerLM, dtype: torch.dtype) -> PolicyWeights:
    tensors = {name: tensor.detach().to(dtype) for name, tensor in model.weights().items()}
    return PolicyWeights(version=3, round=2, tensors=tensors, checksum=storage_checksum(tensors))


# ---- Modules -----------------------------------------------------------------------------------


def linear(*rows: list[float]) -> nn.Linear:
    module = nn.Linear(len(rows[0]), len(rows), bias=False)
    module.weight.data = torch.tensor(rows)
    return module


def test_a_product_has_factors_of_eight_bits_and_adds_up_in_more():
    """Check that factors are rounded to bfloat16's 8 significant bits and that sums are not.

    1 + 2^-8 is halfway between two bfloat16 numbers and rounds to the even number, 1. 1 + 2^-7 is
    exact. 256 + 1 + 1 = 258 needs a sum with more than 8 bits. With 8 bits, it would stay at 256.
    """
    module = NarrowLinear(linear([1 + 2**-8, 0.0, 0.0], [256.0, 1.0, 1.0]), widens=True)
    assert module.weight.dtype == torch.bfloat16
    found = module(torch.tensor([[1.0, 1.0, 1.0], [1 + 2**-7, 0.0, 0.0]]))
    assert found.dtype == torch.float32
    assert found.tolist() == [[1.0, 258.0], [1 + 2**-7, 258.0]]  # 256 (1 + 2^-7) = 258


def test_a_product_that_is_not_widened_is_bfloat16():
    module = NarrowLinear(linear([1.0, 2**-8]), widens=False)
    found = module(torch.tensor([1.0, 1.0]))
    assert (found.dtype, found.tolist()) == (torch.bfloat16, [1.0])


@pytest.mark.slow
def test_rows_of_the_embedding_are_float32():
    table = nn.Embedding(2, 1)
    table.weight.data = torch.tensor([[1 + 2**-9], [3.0]])
    found = NarrowEmbedding(table)(torch.tensor([1, 0]))
    assert (found.dtype, found.tolist()) == (torch.float32, [[3.0], [1.0]])


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_names_and_shapes_stay_and_only_matrices_are_narrow(tied: bool):
    config = ModelConfig(**{**vars(CONFIG), "tied_head": tied})
    wide, model = sharpened(config, 0), narrowed(0, config)
    weights = model.weights()
    assert {n: t.shape for n, t in weights.items()} == {
        n: t.shape for n, t in wide.weights().items()
    }
    for name, tensor in weights.items():
        assert tensor.dtype == (torch.bfloat16 if tensor.ndim == 2 else torch.float32), name
    assert (model.head.weight is model.embedding.weight) == tied


# ---- Incoming weights --------------------------------------------------------------------------


def test_weights_that_travel_in_bfloat16_are_used_where_they_lie():
    engine = TorchEngine(narrowed(1), TOKENS, seed=1)
    sent = snapshot(sharpened(CONFIG, 0), torch.bfloat16)
    engine.load(sent)
    own = engine.model.weights()
    for name, tensor in sent.tensors.items():
        assert (own[name].data_ptr() == tensor.data_ptr()) == (tensor.ndim == 2), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_arrive_in_either_precision_and_torn_ones_are_refused(dtype: torch.dtype):
    engine = TorchEngine(narrowed(1), TOKENS, seed=1)
    sent = snapshot(sharpened(CONFIG, 0), dtype)
    engine.load(sent)
    assert (engine.version, engine.round) == (3, 2)
    for name, tensor in engine.model.weights().items():
        assert torch.equal(tensor, sent.tensors[name].to(tensor.dtype)), name
    sent.tensors["blocks.0.mlp.down.weight"][0, 0] += 1
    with pytest.raises(RuntimeError, match="weights version 3 arrived corrupted"):
        engine.load(sent)


# ---- The sampling distribution -----------------------------------------------------------------


def test_log_probs_are_those_of_the_learner_but_for_rounding():
    requests = probes(LIMITS, 50, 32)
    engine = TorchEngine(narrowed(), TOKENS, seed=1)
    learner = sharpened(CONFIG, 0)
    found = mean_difference(engine, learner, requests, TOKENS.pad_id)
    assert 1e-4 < found < 0.1  # in float32, the difference is below 1e-4
    refuse_disagreement(engine, learner, requests, TOKENS.pad_id, precision=torch.bfloat16)
    with pytest.raises(ValueError, match="differ from the learner's"):
        refuse_disagreement(
            engine, sharpened(CONFIG, 5), requests, TOKENS.pad_id, precision=torch.bfloat16
        )


@pytest.mark.parametrize("slots", [None, 3])
def test_asked_again_it_samples_the_same_bits(slots: int | None):
    def tensors() -> list[Tensor]:
        engine = TorchEngine(narrowed(), TOKENS, seed=1, slots=slots)
        groups = engine.generate(probes(LIMITS, 50, 32), lambda: None)
        return [t for g in groups for t in (g.response_ids, g.behaviour_log_probs)]

    first, second = tensors(), tensors()
    assert all(map(torch.equal, first, second))
    assert all(bool(torch.isfinite(log_probs).all()) for log_probs in first[1::2])


@pytest.mark.slow
def test_the_engine_of_a_trial_is_narrow_and_compared():
    config = GRPOConfig.from_dict(NARROW)
    _, tokenizer = build_policy(config.model, config.seed)
    setup = EngineSetup(config=config, tokenizer=tokenizer, device=torch.device("cpu"))
    engine = build_torch_engine(setup)
    assert engine.model.head_weight.dtype == torch.bfloat16


# ---- The setting -------------------------------------------------------------------------------


def test_the_correction_is_on_unless_it_is_set_and_cannot_be_turned_off():
    assert GRPOConfig.from_dict(NARROW).loss.importance_cap == 2.0
    assert GRPOConfig.from_dict(NARROW | {"loss": {"importance_cap": 5}}).loss.importance_cap == 5.0
    with pytest.raises(ConfigError, match=r"^loss.importance_cap=0.0: must be above 0 with model"):
        GRPOConfig.from_dict(NARROW | {"loss": {"importance_cap": 0}})


def test_what_the_engine_promises_is_less():
    assert ENGINES["torch"].promise.endswith("within 0.0001 of the learner's")
    assert chosen_engine(GRPOConfig.from_dict(NARROW)).promise == (
        "repeats bit for bit, log-probs compared with the learner's at the start"
    )


def test_engines_of_others_are_refused_by_name(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"^model.sampler_dtype=bfloat16: must be float32 with"):
        GRPOConfig.from_dict(NARROW | {"engine": "my_engine.py:Mine"})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    model = {"path": str(tmp_path), "sampler_dtype": "bfloat16"}
    with pytest.raises(ValueError, match=r"^model.sampler_dtype=bfloat16: hf, which samples") as e:
        chosen_engine(GRPOConfig.from_dict({"model": model}))
    assert "\n" not in str(e.value)
