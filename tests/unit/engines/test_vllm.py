"""The parts of the vLLM engine that do not need vLLM; tests/vllm covers the rest."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_trainable.config import GRPOConfig, resources
from grpo_trainable.config.engine_catalog import ENGINES
from grpo_trainable.engines.engine import EngineSetup
from grpo_trainable.engines.selection import chosen_engine
from grpo_trainable.engines.vllm.build import _cache_bytes, _workers
from grpo_trainable.engines.vllm.process import (
    EXTENSION,
    CacheShape,
    llm_arguments,
    refuse_other_build,
)
from grpo_trainable.engines.vllm.transfer import load_snapshot, send_weights, untied
from grpo_trainable.models.directory import policy_tokenizer
from grpo_trainable.models.sampling import response_seed
from grpo_trainable.models.shape import PolicyShape
from grpo_trainable.models.store import build_policy
from grpo_trainable.protocol.checksums import storage_checksum
from grpo_trainable.protocol.rollout import PolicyWeights

TENSORS = {"model.embed_tokens.weight": torch.ones(4, 2), "model.norm.weight": torch.zeros(2)}


class Model:
    """A model with the given parameter names."""

    def __init__(self, *names: str) -> None:
        self._names = names
        self.got: dict[str, torch.Tensor] = {}

    def named_parameters(self):
        return [(name, None) for name in self._names]

    def load_weights(self, weights) -> set[str]:
        self.got = dict(weights)
        return set(self.got) & set(self._names)


class Updates:
    """A vLLM that records the calls of its weight-transfer API."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def start_weight_update(self) -> None:
        self.sent.append("start")

    def update_weights(self, request: Any) -> None:
        self.sent.append(request["update_info"])

    def finish_weight_update(self, weight_version: str) -> None:
        self.sent.append(weight_version)


def snapshot(**changes) -> PolicyWeights:
    values = {"version": 3, "round": 1, "checksum": storage_checksum(TENSORS), "tensors": TENSORS}
    return PolicyWeights(**{**values, **changes})


def test_a_tied_head_is_sent_as_one_of_its_own():
    model = Model(*TENSORS, "lm_head.weight")
    load_snapshot(model, snapshot(), dict)
    assert model.got.keys() == {*TENSORS, "lm_head.weight"}
    assert model.got["lm_head.weight"] is TENSORS["model.embed_tokens.weight"]
    own = {**TENSORS, "lm_head.weight": torch.full((4, 2), 7.0)}
    assert untied(own)["lm_head.weight"] is own["lm_head.weight"]
    with pytest.raises(
        ValueError, match=r"^the model has neither lm_head\.weight nor model\.embed"
    ):
        untied({"transformer.wte.weight": torch.ones(4, 2)})


def test_torn_weights_and_weights_with_a_gap_are_refused():
    llm = Updates()
    with pytest.raises(RuntimeError, match="weights version 3 arrived corrupted: checksum"):
        send_weights(llm, snapshot(checksum="0" * 16), dict)  # pyright: ignore
    assert llm.sent == []
    with pytest.raises(RuntimeError, match=r"weights version 3 have no value for model\.more"):
        load_snapshot(Model(*TENSORS, "model.more"), snapshot(), dict)


@pytest.mark.parametrize("leaves_process", [False, True])
def test_weights_go_through_vllms_weight_transfer_api(leaves_process):
    llm, weights = Updates(), snapshot()
    send_weights(llm, weights, dict, leaves_process=leaves_process)  # pyright: ignore
    begun, update, version = llm.sent
    assert (begun, version, update["renamed"]) == ("start", "3", dict)
    assert (update["weights"] is weights) == (not leaves_process)
    assert all(tensor.device.type == "cpu" for tensor in update["weights"].tensors.values())


# ---- On GPUs -----------------------------------------------------------------------------------

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
ARGUMENTS: dict[str, Any] = {
    "dtype": "bfloat16",
    "longest": 100,
    "rows": 8,
    "cache_bytes": 4096,
    "overrides": {},
}


def setup_of(device: torch.device, **settings: Any) -> EngineSetup:
    apart = {"placement": "disaggregated", "engine": "vllm"}
    config = GRPOConfig.from_dict(apart | settings)
    return EngineSetup(config=config, tokenizer=policy_tokenizer(config.model), device=device)


def test_arguments_on_a_gpu_and_on_cpus_differ_only_in_memory_graphs_and_parallelism():
    on_cpus = llm_arguments("model", **ARGUMENTS)
    on_gpus = llm_arguments("model", **ARGUMENTS, workers=2, gpu_share=0.8, sleeps=True)
    only_cpus = {"block_size", "enforce_eager"}
    assert on_cpus.keys() - on_gpus.keys() == only_cpus
    differing = {key for key in on_gpus if on_gpus[key] != on_cpus.get(key)}
    assert {key: on_gpus[key] for key in differing} == {
        "gpu_memory_utilization": 0.8,
        "enable_sleep_mode": True,
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "mp",
    }
    assert on_cpus["distributed_executor_backend"] == "uni"
    assert on_gpus["dtype"] == "bfloat16"
    assert on_gpus["worker_extension_cls"] == EXTENSION


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ({"resources": {"generator_gpus": 1}}, 0.8),
        ({"resources": {"generator_gpus": 2}}, 0.8),
        ({"resources": {"generator_gpus": 0.5}}, 0.4),
        ({"placement": "colocated", "resources": {"worker_gpus": 1}}, 0.4),
        ({"placement": "colocated", "resources": {"worker_gpus": 0.5}}, 0.2),
        ({"resources": {"generator_gpus": 0.5, "vllm_memory_share": 0.3}}, 0.3),
        ({}, 0.8),  # `launch/evaluate.py --device cuda`, for a trial that sampled on CPUs
    ],
)
def test_vllm_takes_the_share_of_memory_that_its_actor_reserves(settings, share):
    assert resources.vllm_memory_share(setup_of(CUDA, **settings).config) == share


def test_a_cache_on_a_part_of_a_gpu_is_not_measured_and_fits_into_its_share(monkeypatch):
    def cache_bytes(device: torch.device, rows: int = 8, **settings: Any) -> int | None:
        setup = setup_of(device, **settings)
        return _cache_bytes(setup, policy, torch.float32, longest=100, rows=rows)

    def part_of(bytes_: float) -> dict[str, Any]:
        total = SimpleNamespace(total_memory=int(bytes_))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: total)
        return {"resources": {"generator_gpus": 0.5, "vllm_memory_share": 0.5}}

    policy = build_policy(GRPOConfig().model, 0)[0]
    weights = 4 * sum(tensor.numel() for tensor in policy.weights().values())
    wanted = cache_bytes(CPU)
    assert wanted is not None
    assert cache_bytes(CUDA, resources={"generator_gpus": 1}) is None
    assert cache_bytes(CUDA, **part_of(8e9)) == wanted
    assert cache_bytes(CUDA, **part_of(2 * weights + wanted)) == wanted // 2
    with pytest.raises(ValueError, match=r"^resources\.vllm_memory_share=0\.5 is .* the weights"):
        cache_bytes(CUDA, **part_of(2 * weights))


def test_the_model_is_divided_among_the_gpus_of_a_generator(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for gpus, workers in ((0.5, 1), (1, 1), (2, 2)):
        assert _workers(setup_of(CUDA, resources={"generator_gpus": gpus})) == workers
    assert _workers(setup_of(CPU, resources={"generator_gpus": 2})) == 1
    with pytest.raises(ValueError, match=r"^4 GPUs are reserved for sampling, but torch sees 2$"):
        _workers(setup_of(CUDA, resources={"generator_gpus": 4}))


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"resources": {"generator_gpus": 3}}, "generator_gpus"),
        ({"placement": "colocated", "resources": {"worker_gpus": 3}}, "worker_gpus"),
    ],
)
def test_gpus_that_cannot_share_the_heads_equally_are_refused_before_the_start(
    monkeypatch, settings, key
):
    installed = replace(ENGINES["vllm"], libraries=())
    monkeypatch.setitem(ENGINES, "vllm", installed)
    with pytest.raises(ValueError, match=rf"^resources\.{key}=3: .* the 4 attention heads") as told:
        chosen_engine(setup_of(CUDA, **settings).config)
    assert str(told.value).endswith("use a divisor of 4")
    assert chosen_engine(setup_of(CUDA, resources={"generator_gpus": 2}).config) is installed


@pytest.mark.parametrize(
    ("gpus", "heads", "kv_heads", "refused"),
    [
        (4, 12, 2, None),  # two GPUs hold the same head
        (2, 12, 6, None),
        (6, 12, 4, "the 4 key and value heads"),
        (3, 12, 2, "the 2 key and value heads"),
        (2, 12, None, None),
    ],
)
def test_gpus_must_share_the_key_and_value_heads_equally_too(
    monkeypatch, gpus, heads, kv_heads, refused
):
    shape = PolicyShape(context_length=64, vocab_size=64, heads=heads, kv_heads=kv_heads)
    monkeypatch.setattr("grpo_trainable.engines.selection.policy_shape", lambda model: shape)
    monkeypatch.setitem(ENGINES, "vllm", replace(ENGINES["vllm"], libraries=()))
    config = setup_of(CUDA, resources={"generator_gpus": gpus}).config
    if refused is None:
        chosen_engine(config)
        return
    with pytest.raises(ValueError, match=rf"^resources\.generator_gpus={gpus}: .* {refused}"):
        chosen_engine(config)


@pytest.mark.parametrize(
    ("built_for", "device", "told"),
    [
        ("cpu", "cuda", r"samples on cpu; in .* run: pip install -e '\.\[vllm-gpu\]'$"),
        ("", "cuda", r"the installed vLLM sees none .*; check that nvidia-smi works$"),
        ("cuda", "cpu", r"resources\.worker_gpus=1 .*evaluate\.py: --device cuda.*\[vllm\]'$"),
        ("", "cpu", r"the installed vLLM is not built for CPUs; .*\[vllm\]'$"),
    ],
)
def test_vllm_of_another_device_is_refused(built_for, device, told):
    refuse_other_build(device, device)
    with pytest.raises(ValueError, match=told):
        refuse_other_build(built_for, device)


def test_the_cache_holds_whole_blocks_of_every_row():
    shape = CacheShape(layers=4, heads=2, head_dim=32, itemsize=4)
    # The 33 tokens of a row need two blocks of 32. vLLM takes two more blocks for all rows
    # together. Each token stores keys and values.
    assert shape.bytes(rows=3, tokens=33) == (3 * 2 + 2) * 32 * (2 * 4 * 2 * 32 * 4)


def test_seeds_differ_by_everything_that_names_a_draw():
    keys = [
        (seed, stream, prompt, response)
        for seed in (0, 1)
        for stream in ("train", "eval")
        for prompt in (0, 1, 9)
        for response in (0, 1, 2)
    ]
    seeds = {response_seed(*key) for key in keys}
    assert len(seeds) == len(keys)
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert response_seed(5, "train", 3, 1) == response_seed(5, "train", 3, 1)


def test_an_engine_that_is_not_installed_names_the_line_that_installs_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    missing = ENGINES["vllm"].missing()
    assert missing is not None
    assert missing.startswith("the library vllm is not installed; run: pip install -e '.[vllm]'")


def test_what_vllm_promises_is_less_than_what_our_own_engines_do():
    promises = {name: (record.same_bits, record.log_prob_error) for name, record in ENGINES.items()}
    ours = dict.fromkeys(("torch", "hf", "control"), (True, 1e-4))
    assert promises == {**ours, "vllm": (False, None)}
    assert ENGINES["vllm"].promise == (
        "different tokens after a resume, log-probs compared with the learner's at the start"
    )
