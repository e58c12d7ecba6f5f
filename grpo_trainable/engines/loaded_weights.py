"""The weights of an engine that samples in its own process."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_trainable.models.parameters import adopt_parameters
from grpo_trainable.models.policy import NamedWeights
from grpo_trainable.protocol.checksums import storage_checksum
from grpo_trainable.protocol.rollout import PolicyWeights


class LoadedWeights:
    """Loads published weights into a policy, and records their version and round."""

    def __init__(self, policy: NamedWeights) -> None:
        policy.requires_grad_(False)
        self._weights = policy.weights()  # live parameters, to be replaced by loaded tensors
        self._loads = 0
        self._version = 0
        self._round = 0

    @property
    def version(self) -> int:
        """Number of gradient steps that produced the weights now in use."""
        return self._version

    @property
    def round(self) -> int:
        """Number of training rounds that produced the weights now in use."""
        return self._round

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(iter(self._weights.values())).device

    def load(self, weights: PolicyWeights) -> None:
        """Load a snapshot and sample with it from now on.

        Tensors that already have the right type, device and alignment are not copied. The snapshot
        must therefore stay unchanged until the next snapshot is loaded.

        Raises:
            RuntimeError: The checksum of the loaded tensors differs from the snapshot's checksum.
        """
        source = f"weights version {weights.version}"
        adopt_parameters(self._weights, weights.tensors, source=source)
        arrived = storage_checksum(
            {name: self._standing(name, sent) for name, sent in weights.tensors.items()}
        )
        if arrived != weights.checksum:
            raise RuntimeError(
                f"{source} arrived corrupted: checksum {arrived}, published {weights.checksum}"
            )
        self._version, self._round = weights.version, weights.round
        self._loads += 1

    def _standing(self, name: str, sent: Tensor) -> Tensor:
        """Return the model's tensor, converted to the precision of the sent tensor.

        If loading rounded the tensor, return the sent tensor itself.
        """
        own = self._weights[name]
        return sent if own.dtype.itemsize < sent.dtype.itemsize else own.to(sent.dtype)
