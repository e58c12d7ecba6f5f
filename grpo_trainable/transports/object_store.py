"""Weight transport through Ray's object store. One `put` serves all generators on all machines."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import GetTimeoutError, RayError
from torch import Tensor

from grpo_trainable.protocol.checksums import storage_checksum
from grpo_trainable.protocol.rollout import LiveWeights, PolicyWeights
from grpo_trainable.transports.chunks import (
    Assembly,
    StoredParts,
    TimeLeft,
    cut,
    in_turn,
    parts_for,
)
from grpo_trainable.transports.packing import Packed, layout_for
from grpo_trainable.transports.transport import TransportError, read_only_is_fine


def get_in_time(
    ref: Any, deadline_s: float, transport: str, left_s: Callable[[], float] | None = None
) -> Any:
    """Return the object behind `ref`.

    Args:
        ref: Ray's reference.
        deadline_s: The deadline in seconds, as error messages state it.
        transport: Name of the transport for error messages.
        left_s: Returns the seconds left until the deadline. None: all of `deadline_s` is left.

    Raises:
        TransportError: The object does not arrive in time, or is lost.
    """
    try:
        return ray.get(ref, timeout=deadline_s if left_s is None else left_s())
    except GetTimeoutError as error:
        raise TransportError(
            f"transport={transport}: weights did not arrive within "
            f"resources.deadline_s={deadline_s:g} s"
        ) from error
    except (RayError, RuntimeError, ValueError) as error:
        # Ray Direct Transport raises RuntimeError or ValueError, not RayError.
        reason = " ".join(str(error).split())[:200]
        raise TransportError(f"transport={transport}: weights are lost ({reason})") from error


def _as_array(tensor: Tensor) -> tuple[np.ndarray, torch.dtype]:
    """Return a tensor's bits as integers (numpy has no bfloat16), and the tensor's dtype."""
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.cpu().view(whole[tensor.element_size()]).numpy(), tensor.dtype


@dataclass(frozen=True)
class StoredWeights:
    """The handle of stored weights. Ray does not resolve a `ref` inside a handle."""

    ref: Any


class ObjectStoreSender:
    """Puts a copy of the weights into the store, as numpy arrays that receivers map.

    The arrays are in a dict. Putting torch tensors instead would take three to five times as long.
    If several other machines fetch weights, the sender puts the weights into the store in parts,
    and each receiver assembles the parts in one piece of memory.
    """

    def __init__(self, far_machines: int = 0) -> None:
        """Set up a sender.

        Args:
            far_machines: Number of machines that fetch weights, not counting this one.
        """
        self._in_parts = far_machines > 1

    def publish(
        self, weights: LiveWeights, frozen: Collection[str] = ()
    ) -> StoredWeights | StoredParts:
        """Put the weights into the store, without the `frozen` tensors, and return the handle."""
        checksum = storage_checksum(weights.tensors)
        if self._in_parts:
            return _put_parts(weights, checksum, frozen)
        arrays = {
            name: _as_array(tensor)
            for name, tensor in weights.tensors.items()
            if name not in frozen
        }
        return StoredWeights(ray.put((weights.version, weights.round, checksum, arrays)))

    def release(self, before_round: int) -> None:
        """Do nothing: Ray frees an object once nothing refers to it or its memory."""

    def close(self) -> None:
        """Do nothing."""


def _put_parts(weights: LiveWeights, checksum: str, frozen: Collection[str]) -> StoredParts:
    layout = layout_for(weights.tensors, frozen)
    packed = Packed(version=weights.version, round=weights.round, checksum=checksum, layout=layout)
    parts = cut(weights.tensors, layout, parts_for(layout))
    return StoredParts(packed=packed, refs=tuple(map(ray.put, parts)))


class ObjectStoreReceiver:
    """Maps the arrays from the store, read-only and shared with every other reader on the machine.

    If the sender has put the weights into the store in parts, the receiver copies these parts.
    """

    name = "object_store"

    def __init__(self, deadline_s: float, device: str = "cpu", first: float = 0.0) -> None:
        """Set up a receiver.

        Args:
            deadline_s: Seconds within which weights must arrive.
            device: Ignored. The engine moves the tensors.
            first: Index of the part to begin with, divided by the number of parts; in [0, 1).
                Receivers begin with different parts, so that they can take parts from one another.
        """
        self.deadline_s = deadline_s
        self._first = first

    def fetch(self, handle: StoredWeights | StoredParts, received: Any = None) -> PolicyWeights:
        """Return the snapshot behind `handle`."""
        read_only_is_fine()
        return self._assembled(handle) if isinstance(handle, StoredParts) else self._mapped(handle)

    def _assembled(self, handle: StoredParts) -> PolicyWeights:
        left_s = TimeLeft(self.deadline_s)
        assembly = Assembly(handle.packed.layout, len(handle.refs))
        for part in in_turn(len(handle.refs), self._first):
            arrays = get_in_time(handle.refs[part], self.deadline_s, self.name, left_s)
            assembly.put(part, arrays)
        return handle.packed.unpacked(assembly.buffer)

    def _mapped(self, handle: StoredWeights) -> PolicyWeights:
        version, round_, checksum, arrays = get_in_time(handle.ref, self.deadline_s, self.name)
        tensors = {
            name: torch.from_numpy(array).view(dtype) for name, (array, dtype) in arrays.items()
        }
        return PolicyWeights(version=version, round=round_, checksum=checksum, tensors=tensors)

    def release(self, before_round: int) -> None:
        """Do nothing: Ray frees an object once nothing refers to it or its memory."""

    def close(self) -> None:
        """Do nothing."""
