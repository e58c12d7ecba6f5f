"""Ray, applied once: plain classes become actors, method calls become calls that can be awaited."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError


class ActorFailed(RuntimeError):
    """An actor died, raised or did not answer; the message names stage and actor.

    Never Ray's own `RayActorError`: leaving `step()`, Tune would take that for the death of the
    Trainable itself and skip its `cleanup()`.
    """


class Call(Protocol):
    """A submitted call that has not been collected yet."""

    @property
    def actor(self) -> str: ...

    @property
    def stage(self) -> str: ...


class Actor(Protocol):
    """Something that works through its calls in the order they were submitted."""

    @property
    def name(self) -> str: ...

    def submit(self, stage: str, method: str, *args: Any) -> Call: ...

    def kill(self) -> None: ...


class Runtime(Protocol):
    """How calls are awaited."""

    def wait(self, calls: Sequence[Any], timeout_s: float) -> list[Any]:
        """Those of `calls` that are done, at least one unless the time is over; never waits longer
        than until the first."""
        ...

    def result(self, call: Any) -> Any:
        """The value of a call that is done. ActorFailed when there is none."""
        ...


@dataclass(frozen=True, slots=True)
class RayCall:
    actor: str
    stage: str
    ref: Any


class RayActor:
    """An actor in the placement group of the Trainable that starts it."""

    def __init__(self, cls: type, name: str, *args: Any, num_cpus: float, num_gpus: float) -> None:
        self._name = name
        # Explicit resources, or Ray looks for a whole CPU that the placement group does not have.
        options = {"num_cpus": num_cpus, "num_gpus": num_gpus, "max_restarts": 0}
        self._handle = ray.remote(**options)(cls).remote(*args)

    @property
    def name(self) -> str:
        return self._name

    def submit(self, stage: str, method: str, *args: Any) -> RayCall:
        return RayCall(self._name, stage, getattr(self._handle, method).remote(*args))

    def kill(self) -> None:
        ray.kill(self._handle)


class RayRuntime:
    def wait(self, calls: Sequence[RayCall], timeout_s: float) -> list[RayCall]:
        by_ref = {call.ref: call for call in calls}
        done, _ = ray.wait(list(by_ref), num_returns=1, timeout=timeout_s, fetch_local=True)
        if done:
            # Whatever else is ready by now is taken along.
            done, _ = ray.wait(list(by_ref), num_returns=len(by_ref), timeout=0, fetch_local=True)
        return [by_ref[ref] for ref in done]

    def result(self, call: RayCall) -> Any:
        try:
            return ray.get(call.ref, timeout=60.0)
        except RayActorError as error:
            raise ActorFailed(f"{call.stage}: {call.actor} died ({_one_line(error)})") from error
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else error
            raise ActorFailed(
                f"{call.stage}: {call.actor} failed with {type(cause).__name__}: {_one_line(cause)}"
            ) from error
        except GetTimeoutError as error:
            raise ActorFailed(
                f"{call.stage}: the answer of {call.actor} could not be fetched in 60 s"
            ) from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def await_call(runtime: Runtime, call: Any, deadline_s: float) -> Any:
    """The value of one call. ActorFailed names stage and actor when it takes too long."""
    if not runtime.wait([call], deadline_s):
        raise no_answer([call], deadline_s)
    return runtime.result(call)


def no_answer(calls: Sequence[Call], deadline_s: float) -> ActorFailed:
    waiting = ", ".join(sorted({f"{call.actor} ({call.stage})" for call in calls}))
    return ActorFailed(f"no answer within resources.deadline_s={deadline_s:g} s from {waiting}")
