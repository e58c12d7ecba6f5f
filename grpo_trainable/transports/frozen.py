"""Separate transport of frozen tensors, which are sent only once.

The configured transport sends the trained tensors of every snapshot.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from grpo_trainable.protocol.rollout import LiveWeights, PolicyWeights
from grpo_trainable.protocol.weight_transfer import WeightReceiver, WeightSender
from grpo_trainable.transports.chunks import StoredParts
from grpo_trainable.transports.object_store import (
    ObjectStoreReceiver,
    ObjectStoreSender,
    StoredWeights,
)


@dataclass(frozen=True, slots=True)
class Apart:
    """The handle of a snapshot: a handle of its trained tensors, and one of its frozen tensors.

    If no tensors are frozen, `frozen` is None.
    """

    trained: Any
    frozen: StoredWeights | StoredParts | None


class FrozenApartSender:
    """Wraps the sender of a transport, and puts the frozen tensors into Ray's object store.

    A generator that replaces another generator also fetches the frozen tensors from the store.
    """

    def __init__(self, trained: WeightSender, far_machines: int = 0) -> None:
        """Wrap the sender `trained`.

        Args:
            trained: Sender of the trained tensors.
            far_machines: Number of machines that fetch weights, not counting this one.
        """
        self._trained = trained
        self._store = ObjectStoreSender(far_machines)
        self._names: frozenset[str] = frozenset()
        self._frozen: StoredWeights | StoredParts | None = None

    def publish(self, weights: LiveWeights, frozen: Collection[str] = ()) -> Apart:
        """Publish a snapshot. `frozen` tensors must be unchanged since the previous snapshot."""
        names = frozenset(frozen)
        if names != self._names:
            self._names, self._frozen = names, None
        if names and self._frozen is None:
            still = {name: weights.tensors[name] for name in names}
            self._frozen = self._store.publish(replace(weights, tensors=still))
        return Apart(trained=self._trained.publish(weights, names), frozen=self._frozen)

    def staged(self, round_: int) -> list[Tensor]:
        """Return the tensors of this round's snapshot, so that Ray can send them."""
        return self._trained.staged(round_)  # type: ignore[attr-defined]

    def release(self, before_round: int) -> None:
        """Release trained tensors of rounds before `before_round`."""
        self._trained.release(before_round)

    def close(self) -> None:
        """Drop every snapshot."""
        self._trained.close()
        self._names, self._frozen = frozenset(), None


class FrozenApartReceiver:
    """Wraps the receiver of a transport, and adds the frozen tensors, which it fetches once."""

    def __init__(
        self, trained: WeightReceiver, name: str, deadline_s: float, first: float = 0.0
    ) -> None:
        """Wrap the receiver `trained`.

        Args:
            trained: Receiver of the trained tensors.
            name: Name of the transport, used if the receiver has no name.
            deadline_s: Seconds within which frozen tensors must arrive.
            first: As in `ObjectStoreReceiver`.
        """
        self._name = name
        self._trained = trained
        self._store = ObjectStoreReceiver(deadline_s, first=first)
        self._frozen: tuple[Any, dict[str, Tensor]] = (None, {})  # (handle, tensors)

    @property
    def name(self) -> str:
        """Name of the wrapped receiver, or of its transport if the receiver has no name.

        A user-defined receiver need not have a name.
        """
        return getattr(self._trained, "name", self._name)

    def fetch(self, handle: Apart, received: Any = None) -> PolicyWeights:
        """Return the snapshot behind `handle`, with its frozen tensors."""
        weights = self._trained.fetch(handle.trained, received)
        if handle.frozen is None:
            return weights
        if self._frozen[0] != handle.frozen:
            self._frozen = (handle.frozen, self._store.fetch(handle.frozen).tensors)
        return replace(weights, tensors={**self._frozen[1], **weights.tensors})

    def release(self, before_round: int) -> None:
        """Release trained tensors of rounds before `before_round`."""
        self._trained.release(before_round)

    def close(self) -> None:
        """Release everything that was fetched."""
        self._trained.close()
        self._frozen = (None, {})
