"""The interface of a transport: a sender in the learner, a receiver in each generator."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

from torch import Tensor

from grpo_trainable.protocol.rollout import LiveWeights, PolicyWeights


class WeightSender(Protocol):
    """Takes snapshots of the learner's weights and keeps them until nobody needs them."""

    def publish(self, weights: LiveWeights, frozen: Collection[str] = ()) -> Any:
        """Take a snapshot with its checksum, and return the handle with which receivers fetch it.

        A published snapshot does not change before it is released. The handle is small and is
        passed as an argument of actor calls.

        Args:
            weights: the learner's own tensors, which do not change during this call. The next
                gradient step changes them.
            frozen: names of tensors that receivers already have. These tensors are part of the
                checksum but need not be sent.
        """
        ...

    def release(self, before_round: int) -> None:
        """Release the snapshots of all rounds before `before_round`.

        This method is called when no receiver fetches these snapshots any more, and no generator
        uses weights that were fetched from them.
        """
        ...

    def close(self) -> None:
        """Drop every snapshot. The trial ends or starts over, so no snapshot is in use."""
        ...


class StagingSender(WeightSender, Protocol):
    """A sender whose snapshots are sent when the trial's process starts the transfer."""

    def staged(self, round_: int) -> list[Tensor]:
        """Return the tensors of this round's snapshot."""
        ...


class WeightReceiver(Protocol):
    """Fetches published snapshots into a generator's process."""

    @property
    def name(self) -> str:
        """Name of the transport.

        The transport's record (`config/transport_catalog.py`) also contains the name, so a user's
        receiver need not define this property.
        """
        ...

    def fetch(self, handle: Any, received: Any = None) -> PolicyWeights:
        """Return the snapshot behind `handle`.

        The snapshot's tensors may be read-only and shared with other processes. The tensors do not
        change before the snapshot is released, and a snapshot is not released while a generator
        uses it. So the caller need not copy the tensors.

        Args:
            handle: the value that `publish` returned.
            received: the data that arrived with the handle. There is such data only if the learner
                sends the weights and the generator does not fetch them.
        """
        ...

    def release(self, before_round: int) -> None:
        """Release fetched weights of rounds before `before_round`, which are no longer in use."""
        ...

    def close(self) -> None:
        """Release everything that was fetched."""
        ...


class LocalTransport(WeightSender, WeightReceiver, Protocol):
    """Sender and receiver in one object, for a learner and a generator in one process."""
