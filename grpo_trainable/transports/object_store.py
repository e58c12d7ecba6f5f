"""Ray's object store: one put a version serves every generator, on any node."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import GetTimeoutError, RayError
from torch import Tensor

from grpo_trainable.checksums import storage_checksum
from grpo_trainable.rollout import LiveWeights, PolicyWeights
from grpo_trainable.transports.base import TransportError, read_only_is_fine


def get_in_time(ref: Any, deadline_s: float, transport: str) -> Any:
    """The object behind `ref`.

    Raises:
        TransportError: it does not arrive in time, or never will.
    """
    try:
        return ray.get(ref, timeout=deadline_s)
    except GetTimeoutError as error:
        raise TransportError(
            f"transport={transport}: weights did not arrive within "
            f"resources.deadline_s={deadline_s:g} s"
        ) from error
    except (RayError, RuntimeError, ValueError) as error:  # Direct Transport raises plain errors
        reason = " ".join(str(error).split())[:200]
        raise TransportError(f"transport={transport}: weights are lost ({reason})") from error


def _as_array(tensor: Tensor) -> tuple[np.ndarray, torch.dtype]:
    """The tensor's bits as integers of the same width, since numpy has no bfloat16."""
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.cpu().view(whole[tensor.element_size()]).numpy(), tensor.dtype


@dataclass(frozen=True)
class StoredWeights:
    """The handle. The reference is nested, so that Ray passes it on instead of resolving it."""

    ref: Any


class ObjectStoreSender:
    """Puts the weights as a dict of numpy arrays: the put makes the copy, which Ray maps.

    Torch tensors take three to five times as long.
    """

    def publish(self, weights: LiveWeights, frozen: Collection[str] = ()) -> StoredWeights:
        checksum = storage_checksum(weights.tensors)
        arrays = {
            name: _as_array(tensor)
            for name, tensor in weights.tensors.items()
            if name not in frozen
        }
        return StoredWeights(ray.put((weights.version, weights.round, checksum, arrays)))

    def release(self, before_round: int) -> None:
        """Does nothing: Ray frees an object with the last reference to it and to its memory."""

    def close(self) -> None:
        pass


class ObjectStoreReceiver:
    """Maps the arrays out of the store: read-only, shared with every other reader on the node."""

    name = "object_store"

    def __init__(self, deadline_s: float, device: str = "cpu") -> None:
        self.deadline_s = deadline_s

    def fetch(self, handle: StoredWeights, received: Any = None) -> PolicyWeights:
        read_only_is_fine()
        version, round_, checksum, arrays = get_in_time(handle.ref, self.deadline_s, self.name)
        tensors = {
            name: torch.from_numpy(array).view(dtype) for name, (array, dtype) in arrays.items()
        }
        return PolicyWeights(version=version, round=round_, checksum=checksum, tensors=tensors)

    def release(self, before_round: int) -> None:
        """Does nothing: Ray counts references."""

    def close(self) -> None:
        pass
