"""What actors ask of a transport: a sender beside the learner, a receiver beside each generator."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

from torch import Tensor

from grpo_trainable.protocol.rollout import LiveWeights, PolicyWeights


class WeightSender(Protocol):
    """Takes snapshots of the learner's weights and keeps them until nobody needs them."""

    def publish(self, weights: LiveWeights, frozen: Collection[str] = ()) -> Any:
        """Takes a snapshot, with its checksum, and returns the handle that receivers fetch it by.

        The tensors given are the learner's own: they stay as they are during this call and change
        after it. A published snapshot never changes until it is released. The handle is small and
        travels through actor calls. Receivers already have the tensors named in `frozen`: these
        are part of the checksum, and need not travel.
        """
        ...

    def release(self, before_round: int) -> None:
        """Tells that nobody will fetch a snapshot of a round before `before_round` any more, or use
        what was fetched of one."""
        ...

    def close(self) -> None:
        """Drops every snapshot: nobody uses any, and the next one belongs to another history."""
        ...


class StagingSender(WeightSender, Protocol):
    """A sender whose snapshots travel when the driver says so."""

    def staged(self, round_: int) -> list[Tensor]:
        """The tensors of the snapshot of this round."""
        ...


class WeightReceiver(Protocol):
    """Fetches published snapshots into a generator's process."""

    @property
    def name(self) -> str:
        """The transport's name; its record gives it, so that a user's receiver need not."""
        ...

    def fetch(self, handle: Any, received: Any = None) -> PolicyWeights:
        """The snapshot behind `handle`; `received` is what came with it, where the transport has
        the learner send instead of the generator fetch.

        Its tensors may be shared with others and read-only. They stay as they are until the
        snapshot is released, which does not happen while a generator uses it, so nobody needs to
        copy them.
        """
        ...

    def release(self, before_round: int) -> None:
        """Tells that this generator no longer uses what it fetched of earlier rounds."""
        ...

    def close(self) -> None:
        """Lets go of everything that was fetched."""
        ...


class LocalTransport(WeightSender, WeightReceiver, Protocol):
    """Sender and receiver in one, for a learner and a generator in one process."""
