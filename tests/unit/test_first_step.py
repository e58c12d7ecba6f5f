"""At lag 0 the ratio of the first gradient step is exactly 1, whatever computed the samples."""

from __future__ import annotations

from typing import Any

import pytest
from first_steps import log_ratios
from policies import write_quick_policy

from grpo_trainable.config import GRPOConfig

pytestmark = pytest.mark.numerics


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_quick_policy(tmp_path_factory.mktemp("policy"))


def config_of(path: str, **values: Any) -> GRPOConfig:
    data: dict[str, Any] = {
        "model": {"path": path},
        "rollout": {"prompts": 4, "max_new_tokens": 10},
        "optim": {"microbatch": 3, "lr": 1e-2},
    }
    for name, value in values.items():
        data[name] = {**data[name], **value} if isinstance(data.get(name), dict) else value
    return GRPOConfig.from_dict(data)


STEPS = [
    {"k": 1},
    {"k": 3, "k_mode": "same_batch"},
    {"k": 2, "k_mode": "fresh_batches"},
    {"k": 2, "k_mode": "minibatches"},
]


@pytest.mark.parametrize("settings", STEPS, ids=str)
@pytest.mark.parametrize("monitor", [True, False])
@pytest.mark.parametrize("cap", [0, 2.0])
@pytest.mark.parametrize("sampler_dtype", ["float32", "bfloat16"])
def test_at_lag_0(path, monkeypatch, settings, monitor, cap, sampler_dtype):
    loss = {"kl_monitor": monitor, "importance_cap": cap}
    config = config_of(path, **settings, loss=loss)
    if sampler_dtype == "bfloat16":
        if not cap:
            pytest.skip("refused: what the sampler rounds off has to be corrected")
        config = config_of(
            path, **settings, loss=loss, model={"path": path, "sampler_dtype": sampler_dtype}
        )
    first, *later = log_ratios(config, monkeypatch)
    assert not any(part.any() for part in first)
    assert all(any(part.abs().max() > 1e-3 for part in step) for step in later)


def test_tokens_of_older_weights_are_compared_with_what_the_sampler_said(path, monkeypatch):
    config = config_of(path, placement="disaggregated", lag=1)
    (step,) = log_ratios(config, monkeypatch, lag=1)
    assert all(part.abs().max() > 1e-3 for part in step)
