"""The engine vLLM on GPUs, in an environment with the extra `vllm-gpu`.

On one H100 (vLLM 0.32.0, torch 2.11.0+cu130, Triton 3.6.0, transformers 5.17.0, Ray 2.60.0, without
FlashInfer), these tests passed: the trials shm, cuda_ipc and colocated, and the float32 policy in
bfloat16. Device time ran out before the tests of weights from either memory and of sleep finished.
The tests with two GPUs have not run.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_trainable.config import GRPOConfig
from grpo_trainable.engines.agreement import mean_difference, probes
from grpo_trainable.engines.engine import EngineSetup, build_engine
from grpo_trainable.models.directory import policy_tokenizer
from grpo_trainable.models.policy import Policy
from grpo_trainable.models.store import build_policy
from grpo_trainable.protocol.checksums import storage_checksum
from grpo_trainable.protocol.rollout import PolicyWeights, SamplingLimits

if not torch.cuda.is_available():
    pytest.skip("torch sees no CUDA device", allow_module_level=True)
pytest.importorskip("vllm", reason="vLLM is not installed: pip install -e '.[vllm-gpu]'")
pytestmark = pytest.mark.gpu
TUNE = Path(__file__).resolve().parents[2] / "launch" / "tune.py"
# vLLM may keep the memory of earlier tests, which run in the same process.
SMALL = {"vllm_memory_share": 0.1}


def built(
    placement: str = "disaggregated", gpus: float = 1.0, **settings: Any
) -> tuple[Any, Policy]:
    """Return an engine on GPUs, and the policy that it samples from, on the CPU.

    Building the engine fails if the log-probs of the two differ too much.
    """
    key = "worker_gpus" if placement == "colocated" else "generator_gpus"
    data = {"engine": "vllm", "placement": placement, "resources": {key: gpus, **SMALL}}
    config = GRPOConfig.from_dict({**data, **settings})
    tokenizer = policy_tokenizer(config.model)
    setup = EngineSetup(config=config, tokenizer=tokenizer, device=torch.device("cuda"))
    return build_engine(setup), build_policy(config.model, config.seed)[0]


def difference(engine: Any, policy: Policy) -> float:
    tokenizer = policy_tokenizer(GRPOConfig().model)
    limits = SamplingLimits(
        min_new_tokens=1, max_new_tokens=8, temperature=1.0, end_ids=tokenizer.end_ids
    )
    wanted = probes(limits, policy.vocab_size, 64)
    return mean_difference(engine, policy, wanted, tokenizer.pad_id)


@torch.no_grad()
def changed(policy: Policy, version: int, device: str) -> PolicyWeights:
    """Change the weights of the policy, and return them as a snapshot on the device."""
    generator = torch.Generator().manual_seed(version)
    tensors: dict[str, Tensor] = {}
    for name, tensor in policy.weights().items():
        tensor += 0.02 * torch.randn(tensor.shape, generator=generator)
        tensors[name] = tensor.detach().to(device, copy=True)
    checksum = storage_checksum(tensors)
    return PolicyWeights(version=version, round=version, checksum=checksum, tensors=tensors)


def test_weights_from_either_memory_reach_the_model() -> None:
    engine, policy = built()
    for version, device in enumerate(("cuda", "cpu", "cuda"), start=1):
        weights = changed(policy, version, device)
        assert difference(engine, policy) > 1e-2
        engine.load(weights)
        assert difference(engine, policy) < 1e-3


def test_a_float32_policy_is_sampled_in_bfloat16() -> None:
    engine, policy = built(model={"sampler_dtype": "bfloat16"})
    assert 0 < difference(engine, policy) < 0.1


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch sees only one CUDA device")
def test_a_model_divided_between_two_gpus_gets_every_snapshot() -> None:
    engine, policy = built(gpus=2.0)
    for version, device in enumerate(("cuda", "cpu"), start=1):
        engine.load(changed(policy, version, device))
        assert difference(engine, policy) < 1e-3


def test_sleep_releases_memory_until_the_next_call() -> None:
    engine, policy = built(placement="colocated")
    share = SMALL["vllm_memory_share"] * torch.cuda.mem_get_info()[1]
    for version in (1, 2):
        awake = torch.cuda.mem_get_info()[0]
        engine.sleep()
        assert torch.cuda.mem_get_info()[0] > awake + share / 2
        assert difference(engine, policy) < 1e-3
        engine.sleep()
        engine.load(changed(policy, version, "cuda"))
        assert difference(engine, policy) < 1e-3


SHARED = ("resources.generator_gpus=0.5", "resources.learner_gpus=0.5")
OWN = ("resources.generator_gpus=1", "resources.learner_gpus=1", "transport=nccl")
TRIALS = {
    "shm": ("arm=async_k1", *SHARED, "transport=shm"),
    "cuda_ipc": ("arm=async_k1", *SHARED, "transport=cuda_ipc"),
    "nccl": ("arm=async_k1", *OWN),
    "colocated": ("arm=colocated_k1", "resources.worker_gpus=1"),
}


@pytest.mark.parametrize("name", TRIALS)
def test_a_trial_samples_with_the_weights_of_its_learner(name: str, tmp_path: Path) -> None:
    if name == "nccl":
        pytest.importorskip("cupy")
        if torch.cuda.device_count() < 2:
            pytest.skip("torch sees only one CUDA device")
    settings = ("engine=vllm", "resources.vllm_memory_share=0.2", *TRIALS[name])
    given = [part for setting in settings for part in ("--set", setting)]
    few = ("--iterations", "4", "--set", "eval.prompts=8", "--set", "rollout.max_new_tokens=24")
    command = [sys.executable, str(TUNE), "--space", "async_vs_sync", *given, *few]
    done = subprocess.run(
        [*command, "--name", name, "--storage", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=900,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = (tmp_path / name).glob("*/result.json")
    rows = [json.loads(line) for line in result.read_text().splitlines()]
    assert len(rows) == 4
    assert all(row["count/dropped"] == 0 for row in rows)
    # In the first round, the learner's own weights sampled all tokens.
    assert rows[0]["kl/sampler_mismatch_nats"] < 1e-5
    if name == "colocated":
        assert all(row["kl/sampler_mismatch_nats"] < 1e-5 for row in rows)
