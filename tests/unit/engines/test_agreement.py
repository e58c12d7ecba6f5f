"""The comparison of an engine's log-probs with those that the learner computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from policies import Pieces, sharpened

from grpo_trainable.engines.agreement import mean_difference, probes, refuse_disagreement
from grpo_trainable.engines.torch_engine import TorchEngine
from grpo_trainable.models.model_config import ModelConfig
from grpo_trainable.protocol.rollout import SamplingLimits

pytestmark = pytest.mark.numerics

CONFIG = ModelConfig(
    vocab_size=50, context_length=32, d_model=32, num_layers=2, num_heads=4, d_ff=40
)
LIMITS = SamplingLimits(
    min_new_tokens=5, max_new_tokens=30, temperature=0.7, end_ids=(0,), stop_strings=("a",)
)
TOKENS: Any = Pieces([*"abcdefgh"] * 6)


@pytest.mark.parametrize("longest", [2, 3, 10, 16, 200])
def test_probes_fit_and_reach_over_the_vocabulary(longest: int):
    requests = probes(LIMITS, 50, longest)
    for request in requests:
        assert len(request.prompt_ids) >= 1
        assert len(request.prompt_ids) + request.limits.max_new_tokens <= longest
        assert request.limits.min_new_tokens <= request.limits.max_new_tokens
        assert request.limits.stop_strings == ()
    if longest >= 16:
        assert requests[0].prompt_ids[0] == 0
        assert requests[0].prompt_ids[-1] == 49
        assert len({len(request.prompt_ids) for request in requests}) == 2


@pytest.mark.slow
def test_an_engine_of_the_same_weights_agrees_and_one_of_others_is_refused():
    requests = probes(LIMITS, 50, 32)
    engine = TorchEngine(sharpened(CONFIG, 0), TOKENS, seed=1)
    refuse_disagreement(engine, sharpened(CONFIG, 0), requests, TOKENS.pad_id)
    other = sharpened(CONFIG, 1)
    found = mean_difference(engine, other, requests, TOKENS.pad_id)
    assert found > 0.1
    with pytest.raises(
        ValueError, match=rf"^the engine's log-probs differ from the learner's by {found:.2g}"
    ):
        refuse_disagreement(engine, other, requests, TOKENS.pad_id)


def test_log_probs_that_are_no_numbers_are_refused():
    policy = sharpened(CONFIG, 0)
    engine = TorchEngine(sharpened(CONFIG, 0), TOKENS, seed=1)
    with torch.no_grad():
        policy.head_weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="differ from the learner's by nan nats"):
        refuse_disagreement(engine, policy, probes(LIMITS, 50, 32), TOKENS.pad_id)
