"""Hands snapshots over as they are: learner and generator are one process."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from grpo_trainable.protocol.checksums import copy_with_checksum
from grpo_trainable.protocol.rollout import LiveWeights, PolicyWeights


class InProcess:
    """Sender and receiver in one. The handle is the version, and only the newest one is kept."""

    name = "in_process"

    def __init__(self) -> None:
        self._newest: PolicyWeights | None = None

    def publish(self, weights: LiveWeights, frozen: Collection[str] = ()) -> int:
        copies = {name: torch.empty_like(tensor) for name, tensor in weights.tensors.items()}
        self._newest = PolicyWeights(
            version=weights.version,
            round=weights.round,
            checksum=copy_with_checksum(weights.tensors, copies),
            tensors=copies,
        )
        return weights.version

    def release(self, before_round: int) -> None:
        """Does nothing: who uses a snapshot keeps it."""

    def fetch(self, handle: int, received: Any = None) -> PolicyWeights:
        assert self._newest is not None
        assert self._newest.version == handle
        return self._newest

    def close(self) -> None:
        self._newest = None
