"""vLLM inside this process: its environment variables, import and start.

vLLM's engine usually runs in a separate process, which keeps sampling while new weights wait.
Inside this process, `LLMEngine.step()` computes one token for every row, and weights can be loaded
between two steps.
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
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
# Packages that vLLM's CPU build imports if installed. They may have been built for a different
# torch version than vLLM needs.
IN_ITS_WAY = "torchvision torchaudio torchcodec triton"
BLOCK_TOKENS = 32  # tokens in a block of the KV cache
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


def import_vllm(threads: int) -> None:
    """Import vLLM. The import sets this process's number of threads for good.

    Raises:
        ValueError: vLLM cannot be imported, or sets a number of threads other than `threads`.
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
    except Exception as error:  # other installed packages make the import fail in many ways
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ValueError(
            f"vLLM cannot be imported ({reason}); if the cause is a package built for a different "
            f"torch version than vLLM needs, remove such packages: pip uninstall -y {IN_ITS_WAY}"
        ) from error
    if torch.get_num_threads() != threads:
        raise ValueError(
            f"vLLM has set this process to {plural(torch.get_num_threads(), 'thread')}, but "
            f"resources.generator_cpus asks for {plural(threads, 'thread')}; if your own code "
            "imports vllm, remove that import"
        )


def start_llm(
    directory: str,
    *,
    backend: str,
    dtype: str,
    longest: int,
    rows: int,
    cache: CacheShape,
    overrides: Mapping[str, Any],
) -> LLM:
    """Start vLLM with random weights for the model whose config.json is in `directory`.

    Args:
        directory: Directory with config.json.
        backend: Registered name of the weight-transfer engine, which delivers the weights.
        dtype: Precision of the model's layers.
        longest: Maximum number of tokens of a prompt plus its response.
        rows: Maximum number of rows that are sampled together.
        cache: Size of a token in the KV cache.
        overrides: Entries that override those of config.json.
    """
    from vllm import LLM  # pyright: ignore
    from vllm.config import WeightTransferConfig  # pyright: ignore

    return LLM(
        model=directory,
        dtype=dtype,
        load_format="dummy",  # every weight arrives through the weight-transfer API
        skip_tokenizer_init=True,  # requests contain ids, and we find stop strings
        trust_remote_code=False,
        hf_overrides=dict(overrides),
        generation_config="vllm",  # ignore the sampling defaults of the directory
        logprobs_mode="processed_logprobs",  # log-probs under which tokens are drawn
        max_model_len=longest,
        max_num_seqs=rows,
        max_num_batched_tokens=max(PREFILL_TOKENS, longest),
        # Computing a seeded prompt in parts fails: "CPU Generator does not use offset".
        enable_chunked_prefill=False,
        enable_prefix_caching=True,  # responses to a prompt share the prompt's cache
        block_size=BLOCK_TOKENS,
        kv_cache_memory_bytes=cache.bytes(rows, longest),  # the default takes nearly all memory
        async_scheduling=False,  # otherwise, a step returns the previous step's token
        enforce_eager=True,
        disable_log_stats=True,
        seed=0,
        weight_transfer_config=WeightTransferConfig(backend=backend),
    )
