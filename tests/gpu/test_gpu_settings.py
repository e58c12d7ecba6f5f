"""A worker on a GPU with many settings, without Ray: ratios begin at 1, and a resume is exact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_trainable.cluster.colocated import Colocated
from grpo_trainable.config import GRPOConfig
from grpo_trainable.models.directory import policy_tokenizer
from grpo_trainable.protocol.messages import Sampled, Updated
from grpo_trainable.protocol.rollout import RolloutGroup
from grpo_trainable.tasks.prompts import Prompts, build_task
from grpo_trainable.transports.in_process import InProcess

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

BASE: dict[str, Any] = {
    "placement": "colocated",
    "rollout": {"prompts": 4, "group_size": 4, "max_new_tokens": 16},
    "eval": {"prompts": 4},
    "optim": {"lr": 1e-3},
    "resources": {"worker_gpus": 1.0},
}
FOUR_STEPS = {"k": 4, "k_mode": "minibatches"}
PPO = {"type": "ppo", "advantage": "gae", "aggregation": "token_mean"}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    **{
        name: {**FOUR_STEPS, "loss": {"type": name}}
        for name in (
            "cispo",
            "gspo",
            "gmpo",
            "sapo",
            "topr",
            "dppo_tv",
            "m2po",
            "clip_cov",
            "kl_cov",
        )
    },
    **{name: {"loss": {"advantage": name}} for name in ("group_mean", "rloo", "batch", "maxrl")},
    "critic": {"loss": PPO},
    "critic_of_the_policy": {"loss": PPO, "critic": {"body": "shared"}},
    "vine": {"loss": {**PPO, "advantage": "vine"}, "vine": {"samples": 2}},
    "kl_in_the_reward": {"loss": {"kl_coef": 0.05, "kl_in": "reward"}},
    "importance": {**FOUR_STEPS, "loss": {"importance_cap": 2.0}},
    "monitor_sample": {"loss": {"kl_monitor_responses": 4}},
    "monitor_all": {"loss": {"kl_monitor_responses": "all"}},
    "packing": {"model": {"packing": True, "gradient_checkpointing": True}},
    "sampler_bfloat16": {"model": {"sampler_dtype": "bfloat16"}},
    "slots": {"rollout": {"slots": 5, "min_new_tokens": 4}},
    "stop_strings": {"rollout": {"stop": ["the", "."]}},
    "episodes": {"task": {"name": "calculator"}},
    "control": {"task": {"name": "control"}, "rollout": {"max_new_tokens": 40}},
}
FAMILIES = {"llama": "float32", "qwen2": "bfloat16", "qwen3": "bfloat16"}  # family -> precision
LORA = {None: "all_weights", 4: "lora"}


def worker_of(settings: Mapping[str, Any]) -> tuple[GRPOConfig, Colocated, Prompts]:
    data = {**BASE}
    for key, value in settings.items():
        data[key] = {**data.get(key, {}), **value} if isinstance(value, dict) else value
    config = GRPOConfig.from_dict(data)
    prompts = Prompts(config, build_task(config), policy_tokenizer(config.model))
    return config, Colocated(config, InProcess()), prompts


def trained(
    worker: Colocated, prompts: Prompts, config: GRPOConfig, round_: int
) -> tuple[list[RolloutGroup], Updated]:
    """Run a round with made-up rewards that differ within each group, to give it a signal."""
    worker.load(worker.publish().handle)
    count = config.rollout.prompts
    unit = worker.generate([prompts.request("train", round_ * count + i) for i in range(count)])
    scored = worker.score(unit.number) if isinstance(unit, Sampled) else unit
    groups = [
        replace(group, rewards=torch.linspace(0, 1, len(group.response_ids)), uses=1)
        for group in scored.groups
    ]
    return groups, worker.update([groups])


def check(settings: Mapping[str, Any]) -> None:
    config, worker, prompts = worker_of(settings)
    other = worker_of(settings)[1]
    try:
        for round_ in range(2):
            _, updated = trained(worker, prompts, config, round_)
            assert updated.steps[0].ratio_max == 1.0
            assert updated.skipped_steps == 0
        state = worker.state()
        other.load_state(state)
        (ours, _), (theirs, _) = (trained(one, prompts, config, 2) for one in (worker, other))
        for a, b in zip(ours, theirs, strict=True):
            assert a.response_ids.equal(b.response_ids)
            assert a.behaviour_log_probs.equal(b.behaviour_log_probs)
        after = other.state().policy
        for name, tensor in worker.state().policy.items():
            assert tensor.equal(after[name]), name
        weights = worker._learner.policy.weights()
        assert {tensor.device.type for tensor in weights.values()} == {"cuda"}
    finally:
        worker.close()
        other.close()


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_first_steps_have_ratio_1_and_a_resumed_round_has_equal_bits(settings) -> None:
    if settings.get("task") == {"name": "control"}:
        pytest.importorskip("gymnasium")
    check(settings)


@pytest.mark.parametrize("rank", LORA, ids=LORA.get)
@pytest.mark.parametrize("family", FAMILIES)
def test_so_do_those_of_hugging_face_models(family: str, rank: int | None, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from hf_models import write_hf_model

    write_hf_model(tmp_path / family, family)
    model = {"path": str(tmp_path / family), "dtype": FAMILIES[family], "lora_rank": rank}
    check({"model": model})
