"""Ray's object store: one put a version serves every generator."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import ray
import torch

from grpo_trainable.rollout import PolicyWeights


@dataclass(frozen=True)
class StoredWeights:
    """The handle. The reference is nested, so that Ray passes it on instead of resolving it."""

    ref: Any


class ObjectStoreSender:
    """Puts the snapshot as a dict of numpy arrays, which Ray maps without copying.

    Torch tensors take three to five times as long.
    """

    def publish(self, weights: PolicyWeights) -> StoredWeights:
        arrays = {name: tensor.cpu().numpy() for name, tensor in weights.tensors.items()}
        return StoredWeights(ray.put((weights.version, weights.round, weights.checksum, arrays)))


class ObjectStoreReceiver:
    """Maps the arrays out of the store: read-only, shared with every other reader on the node."""

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        # The engine only copies from the arrays. For the whole process: filters are its own, and
        # weights may be fetched by two threads.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)

    def fetch(self, handle: StoredWeights) -> PolicyWeights:
        version, round_, checksum, arrays = ray.get(handle.ref, timeout=self.deadline_s)
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return PolicyWeights(version=version, round=round_, checksum=checksum, tensors=tensors)
