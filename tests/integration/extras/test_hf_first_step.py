"""First gradient steps of a Hugging Face model, in float32 and bfloat16.

tests/unit/learner/test_first_step.py contains the same tests for our own models.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from first_steps import log_ratios
from hf_models import write_hf_model

from grpo_trainable.config import GRPOConfig

pytestmark = pytest.mark.numerics


@pytest.mark.parametrize("steps", [{"k": 1}, {"k": 2, "k_mode": "minibatches"}], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_at_lag_0_no_token_of_a_hugging_face_model_is_clipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, steps: dict[str, object]
) -> None:
    config = GRPOConfig.from_dict(
        {
            "model": {"path": write_hf_model(tmp_path), "dtype": dtype},
            "rollout": {"prompts": 4, "max_new_tokens": 10},
            "optim": {"microbatch": 3, "lr": 1e-2},
            "loss": {"type": "gspo"},
            **steps,
        }
    )
    first, *_ = log_ratios(config, monkeypatch)
    assert not any(part.any() for part in first)
