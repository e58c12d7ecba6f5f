"""Learner and generator in one process: the snapshot is handed over as it is."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from grpo_trainable.rollout import PolicyWeights


class InProcess:
    """Sender and receiver in one. The handle is the version; only the newest one is kept."""

    name = "in_process"

    def __init__(self) -> None:
        self._newest: PolicyWeights | None = None

    def publish(self, weights: PolicyWeights, frozen: Collection[str] = ()) -> int:
        tensors = {name: tensor.clone() for name, tensor in weights.tensors.items()}
        self._newest = replace(weights, tensors=tensors)
        return weights.version

    def release(self, before_round: int) -> None:
        """What is used is kept by its user."""

    def fetch(self, handle: int, received: Any = None) -> PolicyWeights:
        assert self._newest is not None
        assert self._newest.version == handle
        return self._newest

    def close(self) -> None:
        self._newest = None
