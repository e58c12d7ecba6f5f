"""The weights that an engine in its own process samples with."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_trainable.models.parameters import adopt_parameters
from grpo_trainable.models.policy import NamedWeights
from grpo_trainable.protocol.checksums import storage_checksum
from grpo_trainable.protocol.rollout import PolicyWeights


class LoadedWeights:
    """Puts published weights into a policy, and knows which they are."""

    def __init__(self, policy: NamedWeights) -> None:
        policy.requires_grad_(False)
        self._weights = policy.weights()  # live: what is loaded takes their place
        self._loads = 0
        self._version = 0
        self._round = 0

    @property
    def version(self) -> int:
        return self._version

    @property
    def round(self) -> int:
        return self._round

    @property
    def device(self) -> torch.device:
        return next(iter(self._weights.values())).device

    def load(self, weights: PolicyWeights) -> None:
        """Samples with the snapshot from now on.

        It is not copied where it lies in the right memory, so it must stay as it is until the next
        one is loaded.

        Raises:
            RuntimeError: what stands in the model afterwards has another checksum.
        """
        source = f"weights version {weights.version}"
        adopt_parameters(self._weights, weights.tensors, source=source)
        arrived = storage_checksum(
            {name: self._standing(name, sent) for name, sent in weights.tensors.items()}
        )
        if arrived != weights.checksum:
            raise RuntimeError(
                f"{source} arrived torn: checksum {arrived}, published {weights.checksum}"
            )
        self._version, self._round = weights.version, weights.round
        self._loads += 1

    def _standing(self, name: str, sent: Tensor) -> Tensor:
        """What stands in the model of a tensor, as it was sent; of one that was rounded, what came
        to be rounded."""
        own = self._weights[name]
        return sent if own.dtype.itemsize < sent.dtype.itemsize else own.to(sent.dtype)
