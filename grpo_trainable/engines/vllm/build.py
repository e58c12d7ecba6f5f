"""Build the engine vLLM for a trial, and compare it with the policy that it samples from."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_trainable.config import GRPOConfig, resources, schedule, threads
from grpo_trainable.engines.agreement import probes, refuse_disagreement
from grpo_trainable.engines.engine import EngineSetup
from grpo_trainable.engines.vllm.engine import VLLMEngine
from grpo_trainable.engines.vllm.process import (
    CacheShape,
    import_vllm,
    llm_arguments,
    start_llm,
)
from grpo_trainable.models.directory import policy_directory
from grpo_trainable.models.hf.llama import llama_config, llama_tensors
from grpo_trainable.models.policy import Policy
from grpo_trainable.models.store import build_policy
from grpo_trainable.models.tokenizer import Tokenizer
from grpo_trainable.models.transformer import TransformerLM
from grpo_trainable.protocol.checksums import storage_checksum
from grpo_trainable.protocol.rollout import PolicyWeights
from grpo_trainable.tasks.prompts import Prompts, build_task

# Maximum number of training prompts whose length is measured. Measuring all of them takes a few
# seconds.
MAX_PROMPTS = 1 << 16


def build_vllm_engine(setup: EngineSetup) -> VLLMEngine:
    """Build the engine of a trial, and compare it with the policy that its config names.

    Raises:
        ValueError: vLLM cannot be imported, is built for another device, does not know the model,
            or computes log-probs that differ from the policy's. The message is one line.
    """
    config, tokenizer, device = setup.config, setup.tokenizer, setup.device.type
    import_vllm(threads(resources.generator_cpus(config)), device)
    policy, _ = build_policy(config.model, config.seed)
    dtype = "bfloat16" if config.model.sampler_dtype == "bfloat16" else config.model.dtype
    precision: torch.dtype = getattr(torch, dtype)
    workers = _workers(setup)
    prompts = Prompts(config, build_task(config), tokenizer)
    longest, rows = _longest(config, prompts), schedule.most_rows(config)
    with tempfile.TemporaryDirectory() as written:
        llm = start_llm(
            **llm_arguments(
                _directory(config, policy, tokenizer, Path(written)),
                dtype=dtype,
                longest=longest,
                rows=rows,
                cache_bytes=_cache_bytes(setup, policy, precision, longest=longest, rows=rows),
                overrides=_overrides(config, dtype),
                workers=workers,
                gpu_share=resources.vllm_memory_share(config) if device == "cuda" else None,
                sleeps=config.placement == "colocated",
            )
        )
    engine = VLLMEngine(
        llm,
        tokenizer,
        renamed=llama_tensors if isinstance(policy, TransformerLM) else _as_they_are,
        vocab_size=policy.vocab_size,
        longest=longest,
        rows=rows,
        seed=config.seed,
        recompute=config.weight_update == "interrupt_recompute",
        workers=workers,
    )
    engine.load(_snapshot(policy))
    limits = prompts.request("train", 0).limits
    requests = probes(limits, policy.vocab_size, longest)
    refuse_disagreement(engine, policy, requests, tokenizer.pad_id, precision=precision)
    return engine


def _workers(setup: EngineSetup) -> int:
    """Return the number of GPUs that vLLM divides the model among, or 1 on CPUs.

    Raises:
        ValueError: This process sees too few GPUs. The message is one line.
    """
    if setup.device.type != "cuda":
        return 1
    reserved, seen = max(1, int(resources.sampling_gpus(setup.config))), torch.cuda.device_count()
    if seen < reserved:
        raise ValueError(f"{reserved} GPUs are reserved for sampling, but torch sees {seen}")
    return reserved


def _snapshot(policy: Policy) -> PolicyWeights:
    """Return the policy's tensors in the form that the learner publishes, without copying them."""
    tensors = {name: tensor.detach() for name, tensor in policy.weights().items()}
    return PolicyWeights(version=0, round=0, checksum=storage_checksum(tensors), tensors=tensors)


def _longest(config: GRPOConfig, prompts: Prompts) -> int:
    """Return the length of the longest prompt plus the maximum response length, in tokens."""
    asked = {
        "train": min(prompts.train_count, MAX_PROMPTS),
        "eval": schedule.held_out_prompts(config, final=True),
    }
    lengths = (
        len(prompts.request(stream, index).prompt_ids)
        for stream, first in asked.items()
        for index in range(first)
    )
    return max(lengths) + config.rollout.max_new_tokens


def _directory(config: GRPOConfig, policy: Policy, tokenizer: Tokenizer, written: Path) -> str:
    """Return the directory that contains the model's config.json.

    For a policy of this package, first write a config.json that describes it as a Llama.
    """
    if not isinstance(policy, TransformerLM):
        return str(policy_directory(config.model))
    content = llama_config(policy.config, tokenizer, torch.float32)
    (written / "config.json").write_text(json.dumps(content), encoding="utf-8")
    return str(written)


def _overrides(config: GRPOConfig, dtype: str) -> dict[str, Any]:
    """Return the entries that override those of config.json in vLLM, which computes in `dtype`."""
    untie: dict[str, Any] = {"tie_word_embeddings": False}  # see `transfer.untied`
    wide = dtype == "bfloat16" and config.model.head_fp32
    return untie | ({"head_dtype": "float32"} if wide else {})


def _cache_bytes(
    setup: EngineSetup, policy: Policy, dtype: torch.dtype, *, longest: int, rows: int
) -> int | None:
    """Return the size of the KV cache, or None if vLLM has a whole GPU, whose memory it measures.

    On CPUs and on a fraction of a GPU, the cache has room for all rows of a call. On a fraction of
    a GPU, the cache also has to fit into vLLM's share of the memory, beside the weights. vLLM's own
    measurement would be wrong there, because other actors take and release memory at the same time.

    Raises:
        ValueError: The weights leave no room for a cache. The message is one line.
    """
    config, shape = setup.config, _cache_shape(policy, dtype)
    wanted = shape.bytes(rows, longest)
    if setup.device.type != "cuda":
        return wanted
    if not 0 < resources.sampling_gpus(config) < 1:
        return None
    share = resources.vllm_memory_share(config)
    memory = share * torch.cuda.get_device_properties(setup.device).total_memory
    weights = dtype.itemsize * sum(tensor.numel() for tensor in policy.weights().values())
    least = weights + shape.bytes(1, longest)
    if memory < least:
        raise ValueError(
            f"resources.vllm_memory_share={share:g} is {memory / 1e9:.3g} GB, but the weights and "
            f"the KV cache of one row take {least / 1e9:.3g} GB"
        )
    return min(wanted, int(memory - weights))


def _cache_shape(policy: Policy, dtype: torch.dtype) -> CacheShape:
    itemsize = dtype.itemsize
    if isinstance(policy, TransformerLM):
        c = policy.config
        return CacheShape(
            layers=c.num_layers, heads=c.num_heads, head_dim=c.head_dim, itemsize=itemsize
        )
    theirs: Any = policy.model
    c = theirs.config.get_text_config()
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    return CacheShape(
        layers=c.num_hidden_layers,
        heads=getattr(c, "num_key_value_heads", None) or c.num_attention_heads,
        head_dim=head_dim,
        itemsize=itemsize,
    )


def _as_they_are(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return tensors
