"""The one interface: a sender in the learner's process, a receiver in each generator's."""

from __future__ import annotations

from typing import Any, Protocol

from grpo_trainable.rollout import PolicyWeights


class Sender(Protocol):
    def publish(self, weights: PolicyWeights) -> Any:
        """Makes the snapshot available and returns the handle that receivers fetch it by.

        The handle is small and travels through actor calls. What is published never changes.
        """
        ...


class Receiver(Protocol):
    def fetch(self, handle: Any) -> PolicyWeights:
        """The snapshot behind `handle`. Its tensors may be shared and read-only: copy them."""
        ...
