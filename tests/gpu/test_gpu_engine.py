"""The engine `torch` on a GPU."""

from __future__ import annotations

import pytest
import torch

from grpo_trainable.config import GRPOConfig
from grpo_trainable.engines.engine import EngineSetup
from grpo_trainable.engines.torch_engine import build_torch_engine
from grpo_trainable.models.directory import read_tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


def test_a_sampler_in_bfloat16_agrees_with_the_learner_on_the_same_gpu() -> None:
    """Building the engine fails if the log-probs of sampler and learner differ too much."""
    config = GRPOConfig.from_dict({"model": {"sampler_dtype": "bfloat16"}})
    device = torch.device("cuda")
    setup = EngineSetup(config=config, tokenizer=read_tokenizer(None), device=device)
    engine = build_torch_engine(setup)
    assert engine.model.head_weight.device.type == "cuda"
