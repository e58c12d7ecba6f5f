"""Facts about a policy that are known before its weights are read.

This module imports only the standard library.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

# Maximum number of probabilities that scoring keeps in memory, 256 MiB in float32. If there are
# more probabilities, scoring computes all of them twice.
HELD = 1 << 26


class PolicySettings(Protocol):
    """Settings of the policy that a trial starts from: `config.model`."""

    @property
    def preset(self) -> str:
        """Name of the preset that defines the policy, if `path` is None."""
        ...

    @property
    def path(self) -> str | None:
        """Directory or hub id of the policy."""
        ...

    @property
    def env(self) -> str | None:
        """Environment that the policy acts in."""
        ...

    @property
    def dtype(self) -> str:
        """Precision of the body."""
        ...

    @property
    def head_fp32(self) -> bool:
        """True to compute the head in float32."""
        ...

    @property
    def gradient_checkpointing(self) -> bool:
        """True to recompute activations in the backward pass."""
        ...

    @property
    def packing(self) -> bool:
        """True to process a token only once if several rows share it."""
        ...

    @property
    def adapter(self) -> str | None:
        """Directory of the adapters to start from; None to start without adapters."""
        ...

    @property
    def lora_rank(self) -> int | None:
        """Rank of the adapters; None without adapters."""
        ...

    @property
    def lora_alpha(self) -> float | None:
        """Numerator of the adapters' scale; None for the default."""
        ...

    @property
    def lora_targets(self) -> str:
        """Layers with adapters."""
        ...


@dataclass(frozen=True, kw_only=True)
class PolicyShape:
    """Sizes of a policy that limit prompts, sampled tokens and the number of GPUs."""

    context_length: int  # maximum number of tokens of a prompt plus its response
    vocab_size: int
    heads: int | None = None  # attention heads of a layer; None if not known
    kv_heads: int | None = None  # heads of keys and values in a layer; None if not known
