"""The seam between generation and everything else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from grpo_trainable.rollout import PolicyWeights, Request, RolloutGroup


class Engine(Protocol):
    """Samples responses under weights it was last given.

    Ours owns model and cache; others (Hugging Face, vLLM) may own neither.
    """

    @property
    def version(self) -> int:
        """Gradient steps of the weights now in use."""
        ...

    @property
    def round(self) -> int:
        """Rounds of the weights now in use."""
        ...

    def load(self, weights: PolicyWeights) -> None:
        """Takes `weights` over, by copy, and checks that they arrived whole."""
        ...

    def generate(
        self, requests: Sequence[Request], between_tokens: Callable[[], None]
    ) -> list[RolloutGroup]:
        """One unscored group a request, in order. Calls `between_tokens` before every token."""
        ...
