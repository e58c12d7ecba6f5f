"""Ray actors made of plain classes, with method calls that can be awaited."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
import ray.util
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from grpo_trainable.config import ConfigError
from grpo_trainable.plugins import PluginError
from grpo_trainable.protocol.calls import (
    ActorFailed,
    ActorLost,
    DeliveryFailed,
    FailsAgain,
    OutOfBand,
)
from grpo_trainable.storage.ray_private import jobs
from grpo_trainable.telemetry.timers import now

ANY_BUNDLE = -1
# Maximum number of seconds between two calls of `RayRuntime`'s argument `look` during a wait. Ray
# itself divides each wait into intervals of this length, so calling `look` between two intervals
# interrupts no transfer.
LOOK_S = 1.0
# If an error reports a mistake in the settings or in the user's code, its text begins with one of
# these. If an actor's constructor raises such an error, Ray keeps only the error's text.
MISTAKES = tuple(f"{kind.__module__}.{kind.__qualname__}: " for kind in (ConfigError, PluginError))


@dataclass(frozen=True, slots=True)
class RayCall:
    """A submitted call to an actor's method, or to a function in its process."""

    actor: RayActor
    stage: str
    ref: Any


class RayActor:
    """An actor in the placement group of the Trainable that starts it.

    Each method that the actor's class lists in `CONCURRENT` runs in a separate thread. All other
    calls run in the order of submission.
    """

    def __init__(
        self,
        cls: type,
        name: str,
        *args: Any,
        num_cpus: float,
        num_gpus: float,
        bundle: int = ANY_BUNDLE,
        direct: bool = False,
    ) -> None:
        """Start the actor.

        Args:
            cls: The class of the actor.
            name: Name of the actor in messages.
            args: Arguments of the class's constructor.
            num_cpus: CPUs that the actor reserves.
            num_gpus: GPUs that the actor reserves.
            bundle: Index of the bundle in the placement group. ANY_BUNDLE lets Ray choose.
            direct: Allow tensors to bypass the object store.
        """
        self._name = name
        self._concurrent: Sequence[str] = getattr(cls, "CONCURRENT", ())
        # Without explicit resources, Ray would require a whole CPU for the actor. It is possible
        # that no bundle of the placement group has a whole CPU.
        options: dict[str, Any] = {"num_cpus": num_cpus, "num_gpus": num_gpus, "max_restarts": 0}
        if self._concurrent:
            options["concurrency_groups"] = dict.fromkeys(self._concurrent, 1)
        if direct:
            options["enable_tensor_transport"] = True
        group = ray.util.get_current_placement_group()
        if group is not None:
            # Helper actors that Ray starts, such as those for `nccl`, must run outside the trial's
            # group, which has no room for them.
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                group,
                placement_group_bundle_index=bundle,
                placement_group_capture_child_tasks=False,
            )
        self.handle = ray.remote(**options)(cls).remote(*args)

    @property
    def name(self) -> str:
        """Name of the actor in messages."""
        return self._name

    def submit(self, stage: str, method: str, *args: Any) -> RayCall:
        """Submit a call to a method, without waiting for it."""
        bound = getattr(self.handle, method)
        if method in self._concurrent:
            bound = bound.options(concurrency_group=method)
        parts: list[Any] = []
        for arg in args:
            out_of_band = isinstance(arg, OutOfBand)
            parts += (arg.described, arg.ref, arg.sent_at) if out_of_band else (arg,)
        return RayCall(self, stage, bound.remote(*parts))

    def submit_function(self, stage: str, function: Callable[..., Any], *args: Any) -> RayCall:
        """Submit a function to run in the actor's process, after the calls submitted earlier."""
        call = self.handle.__ray_call__.remote(lambda actor, *rest: function(*rest), *args)
        return RayCall(self, stage, call)

    def tensors(self, transport: str, method: str, *args: Any) -> Any:
        """Call a method and return a reference to the tensors that the method returns.

        The tensors are sent when the reference is passed to another actor.
        """
        return getattr(self.handle, method).options(tensor_transport=transport).remote(*args)

    def kill(self) -> None:
        """Kill the actor."""
        ray.kill(self.handle)  # pyright: ignore[reportArgumentType]


def driver_pid() -> int | None:
    """Return the pid of this job's driver, or None if the driver is on another machine."""
    job = ray.get_runtime_context().get_job_id()
    for entry in jobs():
        here = entry["DriverIPAddress"] == ray.util.get_node_ip_address()
        if entry["JobID"] == job and here:
            return entry["DriverPid"]
    return None


class RayRuntime:
    """Waits for calls to `RayActor`s, and turns Ray's errors into this package's errors."""

    def __init__(
        self, fetch_s: float | None = None, look: Callable[[], None] | None = None
    ) -> None:
        """Create the runtime.

        Args:
            fetch_s: Time limit in seconds for fetching a finished answer from another machine. None
                means no limit.
            look: Called about every `LOOK_S` seconds during waits. An exception from `look` ends
                the wait without affecting the calls.
        """
        self._fetch_s = fetch_s
        self._look = look
        self._next_look = 0.0

    def now(self) -> float:
        """Return the time in seconds, from a clock that never runs backwards."""
        return now()

    def wait(self, calls: Sequence[RayCall], timeout_s: float) -> list[RayCall]:
        """Wait up to `timeout_s` seconds for a call to finish, and return all finished calls."""
        by_ref = {call.ref: call for call in calls}
        done, end = [], self.now() + timeout_s
        while not done:
            interval_s = self._look_if_due(end - self.now())
            done, _ = ray.wait(list(by_ref), num_returns=1, timeout=interval_s, fetch_local=True)
            if self.now() >= end:
                break
        if done and len(by_ref) > 1:
            # One answer has arrived. Other answers may have arrived too.
            done, _ = ray.wait(list(by_ref), num_returns=len(by_ref), timeout=0, fetch_local=True)
        return [by_ref[ref] for ref in done]

    def _look_if_due(self, left_s: float) -> float:
        """Call `look` if it is due. Return the seconds until the next call or the wait's end."""
        if self._look is None:
            return max(0.0, left_s)
        if self.now() >= self._next_look:
            self._next_look = self.now() + LOOK_S
            self._look()
        return max(0.0, min(left_s, self._next_look - self.now()))

    def share(self, value: Any) -> Any:
        """Store a value once and return a reference that several calls can take as an argument."""
        return ray.put(value)

    def result(self, call: RayCall) -> Any:
        """Return the answer to a call that is done.

        Raises:
            FailsAgain: The actor could not start because of a mistake in the settings or in the
                user's code, or the call raised ConfigError.
            ActorLost: The actor died, data did not reach the actor, or its answer cannot be
                fetched.
            ActorFailed: The call raised an exception.
        """
        try:
            return ray.get(call.ref, timeout=self._fetch_s)
        except RayActorError as error:
            # The last line is the reason. If the actor never started, a traceback precedes it.
            reason = str(error).strip().splitlines()[-1]
            if error.actor_init_failed and reason.startswith(MISTAKES):
                mistake = reason.partition(": ")[2]
                raise FailsAgain(f"{call.actor.name} cannot start: {mistake}") from error
            raise ActorLost(
                f"{call.stage}: {call.actor.name} died ({_one_line(reason)})"
            ) from error
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else error
            failure = ActorLost if isinstance(cause, DeliveryFailed) else ActorFailed
            if isinstance(cause, ConfigError):
                failure = FailsAgain
            raise failure(
                f"{call.stage}: {call.actor.name} failed with {type(cause).__name__}: "
                f"{_one_line(str(cause))}"
            ) from error
        except GetTimeoutError as error:
            raise ActorLost(
                f"{call.stage}: the answer from {call.actor.name} could not be fetched within "
                f"resources.deadline_s={self._fetch_s:g} s"
            ) from error
        except RayError as error:  # the machine that holds the answer may be gone
            raise ActorLost(
                f"{call.stage}: the answer from {call.actor.name} is lost ({_one_line(str(error))})"
            ) from error


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]
