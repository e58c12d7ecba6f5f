"""Learner and generator in one process: the snapshot is handed over as it is."""

from __future__ import annotations

from grpo_trainable.rollout import PolicyWeights


class InProcess:
    """Sender and receiver in one. The handle is the version; only the newest one is kept."""

    def __init__(self) -> None:
        self._newest: PolicyWeights | None = None

    def publish(self, weights: PolicyWeights) -> int:
        self._newest = weights
        return weights.version

    def fetch(self, handle: int) -> PolicyWeights:
        assert self._newest is not None
        assert self._newest.version == handle
        return self._newest
