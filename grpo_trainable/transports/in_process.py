"""Weight transport within one process, which is both learner and generator."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from grpo_trainable.protocol.checksums import copy_with_checksum
from grpo_trainable.protocol.rollout import LiveWeights, PolicyWeights


class InProcess:
    """Sender and receiver in one object, which keeps only the newest snapshot.

    The handle of a snapshot is its version.
    """

    name = "in_process"

    def __init__(self) -> None:
        self._newest: PolicyWeights | None = None

    def publish(self, weights: LiveWeights, frozen: Collection[str] = ()) -> int:
        """Copy the weights, and return their version."""
        copies = {name: torch.empty_like(tensor) for name, tensor in weights.tensors.items()}
        self._newest = PolicyWeights(
            version=weights.version,
            round=weights.round,
            checksum=copy_with_checksum(weights.tensors, copies),
            tensors=copies,
        )
        return weights.version

    def release(self, before_round: int) -> None:
        """Do nothing: a snapshot is freed when nothing refers to it any more."""

    def fetch(self, handle: int, received: Any = None) -> PolicyWeights:
        """Return the newest snapshot, which must have the version `handle`."""
        assert self._newest is not None
        assert self._newest.version == handle
        return self._newest

    def close(self) -> None:
        """Drop the snapshot."""
        self._newest = None
