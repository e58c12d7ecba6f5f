"""Shared memory on the learner's machine, combined with the object store on other machines."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import ray

from grpo_trainable.protocol.rollout import LiveWeights, PolicyWeights
from grpo_trainable.transports.chunks import StoredParts
from grpo_trainable.transports.object_store import (
    ObjectStoreReceiver,
    ObjectStoreSender,
    StoredWeights,
)
from grpo_trainable.transports.shm import SharedWeights, ShmReceiver, ShmSender


def machine() -> str:
    """Return Ray's id of this machine. Two containers on one host have different ids."""
    return ray.get_runtime_context().get_node_id()


@dataclass(frozen=True, slots=True, kw_only=True)
class NearAndFar:
    """The handle of a snapshot that was put both into shared memory and into the object store."""

    machine: str  # the machine that published the snapshot
    near: SharedWeights
    far: StoredWeights | StoredParts


class ByMachineSender:
    """Publishes snapshots both in shared memory and in the object store.

    The replacement for a generator can therefore run on any machine.
    """

    def __init__(self, far_machines: int = 0) -> None:
        """Set up a sender for shared memory and one for the object store.

        Args:
            far_machines: Number of machines that fetch weights, not counting this one.
        """
        self._near, self._far = ShmSender(), ObjectStoreSender(far_machines)

    def publish(self, weights: LiveWeights, frozen: Collection[str] = ()) -> NearAndFar:
        """Publish a snapshot, without `frozen` tensors, over both transports. Return its handle."""
        return NearAndFar(
            machine=machine(),
            near=self._near.publish(weights, frozen),
            far=self._far.publish(weights, frozen),
        )

    def release(self, before_round: int) -> None:
        """Release snapshots of rounds before `before_round`."""
        self._near.release(before_round)
        self._far.release(before_round)

    def close(self) -> None:
        """Drop every snapshot."""
        self._near.close()
        self._far.close()


class ByMachineReceiver:
    """Uses shared memory on the learner's machine, and the object store on other machines.

    `name` is the name of the transport that was used last.
    """

    def __init__(self, deadline_s: float, device: str = "cpu", first: float = 0.0) -> None:
        """Set up a receiver for shared memory and one for the object store.

        The arguments are the same as for `ObjectStoreReceiver`.
        """
        self._near = ShmReceiver(deadline_s, device)
        self._far = ObjectStoreReceiver(deadline_s, device, first)
        self._machine = machine()
        self.name = "by_machine"

    def fetch(self, handle: NearAndFar, received: object = None) -> PolicyWeights:
        """Return the snapshot behind `handle`."""
        if handle.machine == self._machine:
            self.name = self._near.name
            return self._near.fetch(handle.near)
        self.name = self._far.name
        return self._far.fetch(handle.far)

    def release(self, before_round: int) -> None:
        """Release snapshots of rounds before `before_round`."""
        self._near.release(before_round)
        self._far.release(before_round)

    def close(self) -> None:
        """Release everything that was fetched."""
        self._near.close()
        self._far.close()
