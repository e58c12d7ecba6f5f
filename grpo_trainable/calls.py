"""Calls of actors: submitted, worked through in order, awaited with a deadline. No Ray here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class ActorFailed(RuntimeError):
    """An actor died, raised or did not answer; the message names stage and actor.

    Never Ray's own `RayActorError`: leaving `step()`, Tune would take that for the death of the
    Trainable itself and skip its `cleanup()`.
    """


class ActorLost(ActorFailed):
    """It died, answers no more, or weights do not reach it. Another actor in its place may do
    better, unlike after an exception that the work itself raised."""


class Unreached(RuntimeError):
    """Raised in an actor: what it was to get does not reach it, and may well reach another."""


@dataclass(frozen=True, slots=True)
class OutOfBand:
    """Three arguments of a call: what describes some tensors, the reference by which an actor gets
    them, and since when they may travel (seconds since 1970)."""

    described: Any
    ref: Any
    sent_at: float


class Call(Protocol):
    """A submitted call that has not been collected yet."""

    @property
    def actor(self) -> Actor: ...

    @property
    def stage(self) -> str: ...


class Actor(Protocol):
    """Something that works through its calls in the order they were submitted.

    Its method `progress` is answered beside them, with a number that changes while it works.
    """

    @property
    def name(self) -> str: ...

    def submit(self, stage: str, method: str, *args: Any) -> Call: ...

    def kill(self) -> None: ...


class Runtime(Protocol):
    """How calls are awaited."""

    def now(self) -> float:
        """Seconds, of a clock that never runs backwards."""
        ...

    def wait(self, calls: Sequence[Any], timeout_s: float) -> list[Any]:
        """Those of `calls` that are done, at least one unless the time is over; never waits longer
        than until the first."""
        ...

    def result(self, call: Any) -> Any:
        """The value of a call that is done. ActorFailed when there is none, ActorLost when its
        actor is gone."""
        ...


def await_call(runtime: Runtime, call: Any, deadline_s: float) -> Any:
    """The value of one call. ActorFailed names stage and actor when it takes too long."""
    if not runtime.wait([call], deadline_s):
        raise no_answer([call], deadline_s)
    return runtime.result(call)


def no_answer(calls: Sequence[Call], deadline_s: float) -> ActorLost:
    waiting = ", ".join(sorted({f"{call.actor.name} ({call.stage})" for call in calls}))
    return ActorLost(f"no answer within resources.deadline_s={deadline_s:g} s from {waiting}")
