"""Actors and calls for code that does not import Ray: submit, wait, and report failures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol


class ActorFailed(RuntimeError):
    """An actor died, raised an exception or did not answer.

    The message names the stage and the actor.

    Ray's own `RayActorError` must never leave `step()`: Tune would treat that error as the death of
    the Trainable and skip the Trainable's `cleanup()`.
    """


class FailsAgain(ActorFailed):
    """A failure that a retry of the trial would only repeat."""


class ActorLost(ActorFailed):
    """The actor died or stayed silent, or weights did not reach it.

    A replacement for the actor may succeed. If the actor's work raised an exception, the
    error is only an `ActorFailed`, because a replacement would raise the same exception.
    """


class DeliveryFailed(RuntimeError):
    """Raised in an actor that cannot get the weights. A replacement for the actor may get them."""


@dataclass(frozen=True, slots=True)
class OutOfBand:
    """Tensors that bypass Ray's object store. A call passes the three fields as three arguments."""

    described: Any  # a description of the tensors, for the receiver
    ref: Any  # the reference with which the receiver gets the tensors
    sent_at: float  # earliest time at which the tensors could be sent, in seconds since 1970

    def later(self, seconds: float) -> OutOfBand:
        """Return a copy with `sent_at` converted to a clock that is `seconds` ahead."""
        return replace(self, sent_at=self.sent_at + seconds)


class Call(Protocol):
    """A submitted call whose answer has not been collected yet."""

    @property
    def actor(self) -> Actor:
        """The actor that answers the call."""
        ...

    @property
    def stage(self) -> str:
        """The stage to which the call belongs."""
        ...


class Actor(Protocol):
    """An actor that works through its calls in the order in which they were submitted.

    An actor answers a call to its method `progress` immediately, even while another call runs. The
    answer is a number that changes while the actor works.
    """

    @property
    def name(self) -> str:
        """Name of the actor in messages and metrics."""
        ...

    def submit(self, stage: str, method: str, *args: Any) -> Call:
        """Submit a call to `method`, and return the call without waiting for it."""
        ...

    def kill(self) -> None:
        """Kill the actor."""
        ...


class Runtime(Protocol):
    """Waits for calls, and reads the clock."""

    def now(self) -> float:
        """Return the time in seconds, from a clock that never runs backwards."""
        ...

    def wait(self, calls: Sequence[Any], timeout_s: float) -> list[Any]:
        """Wait at most `timeout_s` until any of `calls` is done; return the calls that are done."""
        ...

    def share(self, value: Any) -> Any:
        """Store a value once, and return an argument that can be passed to several actors."""
        ...

    def result(self, call: Any) -> Any:
        """Return the value of a call that is done.

        Raises:
            ActorFailed: The call raised an exception, or its value is lost.
            ActorLost: The actor is lost.
        """
        ...


def await_call(runtime: Runtime, call: Any, deadline_s: float) -> Any:
    """Wait for one call, and return its value.

    Raises:
        ActorLost: The call took longer than `deadline_s`. The message names the stage and the
            actor.
        ActorFailed: `Runtime.result` raised this error.
    """
    if not runtime.wait([call], deadline_s):
        raise no_answer([call], deadline_s)
    return runtime.result(call)


def no_answer(calls: Sequence[Call], deadline_s: float) -> ActorLost:
    """Return the error for calls to one or more actors that did not answer."""
    waiting = ", ".join(sorted({f"{call.actor.name} ({call.stage})" for call in calls}))
    return ActorLost(f"no answer within resources.deadline_s={deadline_s:g} s from {waiting}")
