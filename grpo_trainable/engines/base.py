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
        """Samples with `weights` from now on and checks that they arrived whole. They stay as they
        are until the next were loaded: an engine may use them where they are."""
        ...

    def generate(
        self, requests: Sequence[Request], between_tokens: Callable[[], None]
    ) -> list[RolloutGroup]:
        """One unscored group a request, in order. Calls `between_tokens` before every token."""
        ...
