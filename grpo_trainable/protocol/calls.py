"""What an actor and a call are, to code that imports no Ray: submit, wait, and know what failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol


class ActorFailed(RuntimeError):
    """An actor died, raised or did not answer; the message names stage and actor.

    Never Ray's own `RayActorError`: leaving `step()`, Tune would take that for the death of the
    Trainable itself and skip its `cleanup()`.
    """


class ActorLost(ActorFailed):
    """The actor died, stayed silent, or weights do not reach it. Another actor in its place may do
    better, unlike after an exception that the work itself raised."""


class DeliveryFailed(RuntimeError):
    """Raised in an actor that data does not reach. Another actor in its place may get it."""


@dataclass(frozen=True, slots=True)
class OutOfBand:
    """Tensors that travel past the object store: an argument that becomes three of the call."""

    described: Any  # what the receiver has to know of them
    ref: Any  # the reference by which it gets them
    sent_at: float  # when they could begin to travel, in seconds since 1970

    def later(self, seconds: float) -> OutOfBand:
        """The same by a clock that is so many seconds ahead."""
        return replace(self, sent_at=self.sent_at + seconds)


class Call(Protocol):
    """A submitted call that has not been collected yet."""

    @property
    def actor(self) -> Actor: ...

    @property
    def stage(self) -> str: ...


class Actor(Protocol):
    """Works through its calls in the order they were submitted.

    Its method `progress` is answered at once, whatever the actor is at, with a number that changes
    while it works.
    """

    @property
    def name(self) -> str: ...

    def submit(self, stage: str, method: str, *args: Any) -> Call: ...

    def kill(self) -> None: ...


class Runtime(Protocol):
    """Waits for calls, and tells the time."""

    def now(self) -> float:
        """Seconds on a clock that never runs backwards."""
        ...

    def wait(self, calls: Sequence[Any], timeout_s: float) -> list[Any]:
        """Waits for the first of `calls`, at most `timeout_s`. Returns those that are done."""
        ...

    def share(self, value: Any) -> Any:
        """An argument for calls of several actors, which is stored once for all of them."""
        ...

    def result(self, call: Any) -> Any:
        """The value of a call that is done.

        Raises:
            ActorFailed: the call raised, or its value is gone.
            ActorLost: its actor is gone.
        """
        ...


def await_call(runtime: Runtime, call: Any, deadline_s: float) -> Any:
    """The value of one call.

    Raises:
        ActorLost: it took longer than `deadline_s`; the message names stage and actor.
        ActorFailed: as `Runtime.result`.
    """
    if not runtime.wait([call], deadline_s):
        raise no_answer([call], deadline_s)
    return runtime.result(call)


def no_answer(calls: Sequence[Call], deadline_s: float) -> ActorLost:
    """The error for calls of one or more actors that stayed silent."""
    waiting = ", ".join(sorted({f"{call.actor.name} ({call.stage})" for call in calls}))
    return ActorLost(f"no answer within resources.deadline_s={deadline_s:g} s from {waiting}")
