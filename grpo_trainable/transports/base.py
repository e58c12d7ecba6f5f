"""The one interface: a sender in the learner's process, a receiver in each generator's."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from typing import Any, Protocol

from grpo_trainable.calls import Unreached
from grpo_trainable.rollout import LiveWeights, PolicyWeights


class TransportError(Unreached):
    """Weights cannot travel this way; the message names the transport and what is missing."""


class Sender(Protocol):
    def publish(self, weights: LiveWeights, frozen: Collection[str] = ()) -> Any:
        """Takes a snapshot, with its checksum, and returns the handle that receivers fetch it by.

        The tensors given are the learner's own: they stay as they are during this call and change
        after it. What was published never does, until it is released. The handle is small and
        travels through actor calls. Receivers have the tensors named in `frozen` already: these are
        in the checksum, and need not travel.
        """
        ...

    def release(self, before_round: int) -> None:
        """Nobody fetches a snapshot of an earlier round any more, or uses what was fetched of
        one."""
        ...

    def close(self) -> None:
        """Nobody uses any; what is published next is of another history."""
        ...


class Receiver(Protocol):
    name: str  # of the transport

    def fetch(self, handle: Any, received: Any = None) -> PolicyWeights:
        """The snapshot behind `handle`; `received` is what came with it, where the transport has
        the learner send instead of the generator fetch.

        Its tensors may be shared with others and read-only. They stay as they are until the
        snapshot is released, which it is not while a generator uses it: nobody needs to copy.
        """
        ...

    def release(self, before_round: int) -> None:
        """What was fetched of earlier rounds is not used any more."""
        ...

    def close(self) -> None: ...


def read_only_is_fine() -> None:
    """Silences torch where tensors are made over memory that must not be written.

    For the whole process, which is the one that fetches: filters are its own, and weights may be
    fetched by two threads.
    """
    warnings.filterwarnings("ignore", "The given (NumPy array|buffer) is not writable", UserWarning)
