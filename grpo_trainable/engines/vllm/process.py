"""vLLM inside this process: its environment variables, import and start.

vLLM's engine usually runs in a separate process, which keeps sampling while new weights wait.
Inside this process, `LLMEngine.step()` computes one token for every row, and weights can be loaded
between two steps. On one GPU or on CPUs, the model is in this process too. On several GPUs, vLLM
starts a worker process for each GPU.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from grpo_trainable.text import plural

if TYPE_CHECKING:
    from vllm import LLM  # pyright: ignore

# Environment variables that vLLM needs, and defaults for variables that the user has not set.
MUST = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
UNLESS_SET = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # other actors share the cores
    "VLLM_LOGGING_LEVEL": "ERROR",  # vLLM warns about what we do on purpose
    # On GPUs, Triton would multiply float32 matrices in TF32. On an H100, log-probs then differed
    # from the learner's by 0.001 to 0.002 nats per token.
    "TRITON_F32_DEFAULT": "ieee",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # FlashInfer cannot return processed log-probs
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
# Packages that vLLM's CPU build imports if they are installed. They may have been built for a torch
# version other than the one that vLLM needs.
IN_ITS_WAY = "torchvision torchaudio torchcodec triton"
BACKEND = "grpo_trainable"  # our backend for vLLM's weight-transfer API
# Every process that holds a part of the model looks this class up. The lookup registers BACKEND
# (see worker.py).
EXTENSION = "grpo_trainable.engines.vllm.worker.WorkerExtension"
BLOCK_TOKENS = 32  # tokens in a block of the KV cache on CPUs
PREFILL_TOKENS = 4096  # maximum tokens per step of vLLM, unless a single row is longer


@dataclass(frozen=True, kw_only=True)
class CacheShape:
    """The size of one token in the KV cache."""

    layers: int
    heads: int  # number of key heads, and also of value heads
    head_dim: int
    itemsize: int  # bytes per component

    def bytes(self, rows: int, tokens: int) -> int:
        """Return the number of bytes needed for `rows` rows of `tokens` tokens each.

        Rows occupy whole blocks. The result includes the blocks that vLLM keeps for its own use.
        """
        blocks = rows * -(-tokens // BLOCK_TOKENS) + 2
        token = 2 * self.layers * self.heads * self.head_dim * self.itemsize
        return blocks * BLOCK_TOKENS * token


def import_vllm(threads: int, device: str) -> None:
    """Import vLLM. On CPUs, the import sets this process's number of threads for good.

    Raises:
        ValueError: vLLM cannot be imported, sets a number of threads other than `threads`, or is
            built for a kind of device other than `device` ("cpu" or "cuda").
    """
    os.environ.update(MUST)
    for name, value in UNLESS_SET.items():
        os.environ.setdefault(name, value)
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch warns about vLLM's own code
            import vllm  # noqa: F401  # pyright: ignore
            from vllm.platforms import current_platform  # pyright: ignore
    except Exception as error:  # other installed packages make the import fail in many ways
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ValueError(
            f"vLLM cannot be imported ({reason}); if a package was built for another torch version "
            f"than the one that vLLM needs, remove such packages: pip uninstall -y {IN_ITS_WAY}"
        ) from error
    if torch.get_num_threads() != threads:
        raise ValueError(
            f"vLLM has set this process to {plural(torch.get_num_threads(), 'thread')}, but "
            f"resources.generator_cpus asks for {plural(threads, 'thread')}; if your own code "
            "imports vllm, remove that import"
        )
    refuse_other_build(current_platform.device_type, device)


def refuse_other_build(built_for: str, device: str) -> None:
    """Refuse a build of vLLM that would not sample on `device` ("cpu" or "cuda").

    Args:
        built_for: Type of device that vLLM samples on, or "" for a GPU build that sees no GPU.
        device: Type of device that the trial or `launch/evaluate.py --device` samples on.

    Raises:
        ValueError: vLLM is built for another kind of device. The message is one line.
    """
    if built_for == device:
        return
    if device == "cuda" and not built_for:
        raise ValueError(
            "sampling needs a GPU here, but the installed vLLM sees none that it supports, "
            "although torch sees one; check that nvidia-smi works"
        )
    if device == "cuda":
        raise ValueError(
            f"sampling needs a GPU here, but the installed vLLM samples on {built_for}; in a "
            "separate environment, run: pip install -e '.[vllm-gpu]'"
        )
    raise ValueError(
        "sampling uses no GPU here, but the installed vLLM is not built for CPUs; set "
        "resources.generator_gpus=1 or resources.worker_gpus=1 (launch/evaluate.py: --device "
        "cuda), or install vLLM for CPUs in a separate environment: pip install -e '.[vllm]'"
    )


def llm_arguments(
    directory: str,
    *,
    dtype: str,
    longest: int,
    rows: int,
    cache_bytes: int | None,
    overrides: Mapping[str, Any],
    workers: int = 1,
    gpu_share: float | None = None,
    sleeps: bool = False,
) -> dict[str, Any]:
    """Return the arguments that start vLLM for the model whose config.json is in `directory`.

    The weights are random until some arrive through the weight-transfer API.

    Args:
        directory: Directory with config.json.
        dtype: Precision of the model's layers.
        longest: Maximum number of tokens of a prompt plus its response.
        rows: Maximum number of rows that are sampled together.
        cache_bytes: Size of the KV cache. None means that vLLM measures how much of its share of
            the memory is left. This works only while no other process uses the same GPU.
        overrides: Entries that override those of config.json.
        workers: Number of devices that the model is divided among.
        gpu_share: Share of the memory of each GPU to take. None means that vLLM runs on CPUs.
        sleeps: True if vLLM must be able to release its GPU memory for a while.
    """
    if gpu_share is None:
        on_device: dict[str, Any] = {
            "block_size": BLOCK_TOKENS,
            "enforce_eager": True,
        }
    else:
        on_device = {"gpu_memory_utilization": gpu_share, "enable_sleep_mode": sleeps}
    return {
        "model": directory,
        "dtype": dtype,
        "load_format": "dummy",  # every weight arrives through the weight-transfer API
        "skip_tokenizer_init": True,  # requests contain ids, and our code finds stop strings
        "trust_remote_code": False,
        "hf_overrides": dict(overrides),
        "generation_config": "vllm",  # ignore the sampling defaults of the directory
        "logprobs_mode": "processed_logprobs",  # log-probs of the distribution that is sampled
        "max_model_len": longest,
        "max_num_seqs": rows,
        "max_num_batched_tokens": max(PREFILL_TOKENS, longest),
        # On CPUs, vLLM cannot process a prompt in parts if the request has a seed: "CPU Generator
        # does not use offset".
        "enable_chunked_prefill": False,
        "enable_prefix_caching": True,  # responses to a prompt share the prompt's cache
        "async_scheduling": False,  # otherwise, a step returns the previous step's token
        "disable_log_stats": True,
        "seed": 0,
        "tensor_parallel_size": workers,
        # In a placement group of Ray, vLLM would by default run several workers as Ray actors, for
        # which the trial has reserved nothing.
        "distributed_executor_backend": "uni" if workers == 1 else "mp",
        "worker_extension_cls": EXTENSION,
        "kv_cache_memory_bytes": cache_bytes,
        **on_device,
    }


def start_llm(**arguments: Any) -> LLM:
    """Start vLLM with the arguments that `llm_arguments` returns."""
    from vllm import LLM  # pyright: ignore
    from vllm.config import WeightTransferConfig  # pyright: ignore

    return LLM(**arguments, weight_transfer_config=WeightTransferConfig(backend=BACKEND))
