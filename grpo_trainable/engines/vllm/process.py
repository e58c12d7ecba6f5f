"""vLLM inside this process: what must be set before it is imported, and how it is started.

Its engine usually runs in a process of its own, which samples on while weights wait. Inside this
one, `LLMEngine.step()` is one token of every row, and weights can be loaded between two of them.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm import LLM  # pyright: ignore

# What vLLM must be told, and what it is told where the user has said nothing.
MUST = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
UNLESS_SET = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # other actors share the cores
    "VLLM_LOGGING_LEVEL": "ERROR",  # its warnings are about what is done on purpose here
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
# Packages that vLLM's CPU build imports where they are, in builds that do not suit its torch.
IN_ITS_WAY = "torchvision torchaudio torchcodec triton"
BLOCK_TOKENS = 32  # tokens in a block of the KV cache
PREFILL_TOKENS = 4096  # tokens that one step may compute at least; other rows wait for the next


@dataclass(frozen=True, kw_only=True)
class CacheShape:
    """What one token takes in the KV cache."""

    layers: int
    heads: int  # heads of keys, and as many of values
    head_dim: int
    itemsize: int  # bytes of a number

    def bytes(self, rows: int, tokens: int) -> int:
        """Memory for `rows` of `tokens` each, in whole blocks, and what vLLM keeps for itself."""
        blocks = rows * -(-tokens // BLOCK_TOKENS) + 2
        token = 2 * self.layers * self.heads * self.head_dim * self.itemsize
        return blocks * BLOCK_TOKENS * token


def import_vllm(threads: int) -> None:
    """Imports vLLM, which from then on keeps this process at its present number of threads.

    Raises:
        ValueError: it cannot be imported, or this process cannot compute with `threads`.
    """
    os.environ.update(MUST)
    for name, value in UNLESS_SET.items():
        os.environ.setdefault(name, value)
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch warns of vLLM's own code
            import vllm  # noqa: F401  # pyright: ignore
    except Exception as error:  # what else is installed makes it fail in many ways
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ValueError(
            f"vLLM cannot be imported ({reason}); where these are not built for its torch this "
            f"helps: pip uninstall -y {IN_ITS_WAY}"
        ) from error
    if torch.get_num_threads() != threads:
        raise ValueError(
            f"vLLM keeps this process at {torch.get_num_threads()} threads, {threads} are asked for"
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
    """vLLM with random weights for the model whose config.json lies in `directory`.

    `longest`: tokens of a prompt and its response together. `rows`: that are sampled at once.
    `backend`: the registered name of the engine that will bring weights. `overrides`: what of
    config.json is to be otherwise.
    """
    from vllm import LLM  # pyright: ignore
    from vllm.config import WeightTransferConfig  # pyright: ignore

    return LLM(
        model=directory,
        dtype=dtype,
        load_format="dummy",  # every weight comes by the weight-transfer API
        skip_tokenizer_init=True,  # requests are ids, and stop strings are found by us
        trust_remote_code=False,
        hf_overrides=dict(overrides),
        generation_config="vllm",  # not the directory's own defaults of sampling
        logprobs_mode="processed_logprobs",  # log-probs of the law that tokens are drawn from
        max_model_len=longest,
        max_num_seqs=rows,
        max_num_batched_tokens=max(PREFILL_TOKENS, longest),
        # A seeded prompt that is computed in parts ends in "CPU Generator does not use offset".
        enable_chunked_prefill=False,
        enable_prefix_caching=True,  # the responses to one prompt share its cache
        block_size=BLOCK_TOKENS,
        kv_cache_memory_bytes=cache.bytes(rows, longest),  # vLLM's default is nearly all there is
        async_scheduling=False,  # a step would return the token before
        enforce_eager=True,
        disable_log_stats=True,
        seed=0,
        weight_transfer_config=WeightTransferConfig(backend=backend),
    )
