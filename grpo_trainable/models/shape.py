"""What is known of a policy before its weights are read. Only the standard library is imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

# Probabilities that scoring holds at a time, 256 MiB in float32. What is more is computed twice.
HELD = 1 << 26


class PolicySettings(Protocol):
    """Which policy a trial starts from, and how it is held and trained: `config.model`."""

    @property
    def preset(self) -> str: ...
    @property
    def path(self) -> str | None: ...
    @property
    def env(self) -> str | None: ...
    @property
    def dtype(self) -> str: ...
    @property
    def head_fp32(self) -> bool: ...
    @property
    def gradient_checkpointing(self) -> bool: ...
    @property
    def packing(self) -> bool: ...
    @property
    def lora_rank(self) -> int | None: ...
    @property
    def lora_alpha(self) -> float | None: ...
    @property
    def lora_targets(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class PolicyShape:
    """What a prompt must fit, and how many tokens can be sampled."""

    context_length: int  # tokens of a prompt and its response together, at most
    vocab_size: int
