"""Virtual time: waiting advances the clock, and the work of actors takes only virtual time."""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_trainable.protocol.calls import ActorFailed, ActorLost

MAX_WAITS = 20_000  # after more waits than this, a pipeline is assumed to wait forever
TICK = 1 / 64  # the unit of durations in tests; sums of ticks are exact in floating point

Durations = Callable[[str, str], float]  # (actor, stage) -> seconds


def constant_durations(**ticks: int) -> Durations:
    """Return durations: the given number of ticks for each named stage, one tick for the others."""
    return lambda actor, stage: ticks.get(stage, 1) * TICK


_END = operator.attrgetter("end")


@dataclass(eq=False)
class VirtualCall:
    """A call to a virtual actor. The end of the call is known when the call is submitted."""

    actor: VirtualActor
    stage: str
    start: float
    end: float
    value: Any = None
    error: str | None = None
    lost: bool = False  # True if the call's actor is dead
    later: Callable[[], Any] | None = None  # computes the value after the call has ended


class VirtualRuntime:
    """A clock that `wait` advances to the next answer.

    `wait` returns the answers that are ready, in random order, and sometimes only some of them.
    """

    def __init__(self, *, seed: int = 0, latency: float = 0.0, max_waits: int = MAX_WAITS) -> None:
        self.time = 0.0
        self.latency = latency  # seconds from a call's submission to its earliest start
        self.uncollected: set[VirtualCall] = set()
        self.kills: list[tuple[str, float]] = []  # (actor, time of the kill)
        self.hangs: list[tuple[str, float]] = []  # (actor, time from which it hangs)
        self._ends: list[tuple[float, int, VirtualCall]] = []
        self._numbers = itertools.count()
        self._rng = random.Random(seed)
        self._waits_left = max_waits

    def now(self) -> float:
        """Return the virtual time in seconds."""
        return self.time

    def wait(self, calls: Sequence[VirtualCall], timeout_s: float) -> list[VirtualCall]:
        """Advance the clock to the first answer, but by no more than `timeout_s`.

        Return finished calls.
        """
        self._waits_left -= 1
        assert self._waits_left > 0, "the pipeline waits forever"
        assert calls, "the pipeline waits without a call to wait for"
        everything = len(calls) == len(self.uncollected)
        first = self._next_end() if everything else min(map(_END, calls))
        if first > self.time + timeout_s:
            self.time += timeout_s
            return []
        self.time = max(self.time, first)
        ready = [call for call in calls if call.end <= self.time]
        return self._rng.sample(ready, self._rng.randint(1, len(ready)))

    def submitted(self, call: VirtualCall) -> None:
        """Record a submitted call."""
        self.uncollected.add(call)
        self.moved(call)

    def moved(self, call: VirtualCall) -> None:
        """Record the end of a new call, or the new end of a call that now ends earlier."""
        heapq.heappush(self._ends, (call.end, next(self._numbers), call))

    def _next_end(self) -> float:
        """Return the earliest end of any uncollected call. This is fast even for many calls."""
        while self._ends[0][2] not in self.uncollected:
            heapq.heappop(self._ends)
        return self._ends[0][0]

    def share(self, value: Any) -> Any:
        """Return `value` itself, because virtual actors share memory."""
        return value

    def result(self, call: VirtualCall) -> Any:
        """Return the value of a call that is done, or raise its error.

        Raises:
            ActorLost: The actor died.
            ActorFailed: The call failed.
        """
        assert call.end <= self.time, "the answer is collected before the call is done"
        self.uncollected.remove(call)
        if call.lost:
            raise ActorLost(f"{call.stage}: {call.actor.name} died (killed)")
        if call.error is not None:
            raise ActorFailed(f"{call.stage}: {call.actor.name} failed with {call.error}")
        return call.value if call.later is None else call.later()


@dataclass(eq=False)
class _Queued:
    """A call whose value is not known yet, because an earlier call may still be cancelled."""

    call: VirtualCall
    method: str
    args: tuple[Any, ...]
    earliest: float  # earliest start of the call
    worked: list[float]  # start and end of the call, for `progress`


class VirtualActor:
    """Works through its calls in the order in which they were submitted, one at a time.

    Calls to `deposit`, `score` and `cancel` are exceptions: they run beside the other calls.

    Args:
        runtime: the clock.
        name: name of the actor.
        role: an object with the methods of a real actor. Each method takes the call's start and end
            before its other arguments.
        durations: returns the seconds of a call.
        hangs: `hangs(stage, n)` is True if the actor never answers the n-th call of a stage. The
            actor works until the call would normally end, and hangs from then on.
        dies: `dies(stage, n)` is True if the actor dies during the n-th call of a stage.
        submitted: number of calls so far in each stage, including calls to actors that this actor
            replaces.
        step_s: seconds of a call that count as one step of progress.
        mute: True if an actor that hangs does not answer `progress` either.
        cancels: True if calls of `generate` can be cancelled.
    """

    def __init__(
        self,
        runtime: VirtualRuntime,
        name: str,
        role: Any,
        durations: Durations,
        hangs: Callable[[str, int], bool] = lambda stage, n: False,
        dies: Callable[[str, int], bool] = lambda stage, n: False,
        submitted: dict[str, int] | None = None,
        step_s: float = TICK,
        mute: bool = False,
        cancels: bool = False,
    ) -> None:
        self.name = name
        self.killed = False
        self._runtime = runtime
        self._role = role
        self._durations = durations
        self._hangs, self._dies = hangs, dies
        self._submitted = {} if submitted is None else submitted
        self._dead = False
        self._free_at = 0.0
        # `deposit` and `score` each have their own thread.
        self._thread_free_at = {"deposit": 0.0, "score": 0.0}
        self._step_s, self._mute = step_s, mute
        self._worked: list[list[float]] = []  # [start, end] of each call
        self._cancels = cancels
        self._queue: list[_Queued] = []  # calls in order; empty if none can be cancelled
        self._hangs_from = math.inf

    def submit(self, stage: str, method: str, *args: Any) -> VirtualCall:
        """Submit a call to `method`, and set the call's start and end in virtual time."""
        if method == "progress":
            return self._ask_progress()
        if method == "cancel":
            return self._cancel(*args)
        n = self._submitted[stage] = self._submitted.get(stage, 0) + 1
        concurrent = method in self._thread_free_at
        free_at = self._thread_free_at[method] if concurrent else self._free_at
        start = max(self._runtime.time + self._runtime.latency, free_at)
        seconds_of = functools.partial(self._durations, self.name)
        if method == "generate" and hasattr(self._role, "seconds"):
            end = start + self._role.seconds(seconds_of, stage, *args)
        else:
            end = start + seconds_of(stage)
        self._worked.append(worked := [start, end])
        if self._hangs(stage, n):
            self._hangs_from = min(end, self._hangs_from)
            self._runtime.hangs.append((self.name, end))
            end = math.inf
        if concurrent:
            self._thread_free_at[method] = end
        else:
            self._free_at = end
        call = VirtualCall(self, stage, start, end)
        if self._dead or self._dies(stage, n):
            self._dead = call.lost = True
        elif self._cancels and not concurrent and end < math.inf:
            earliest = self._runtime.time + self._runtime.latency
            self._queue.append(_Queued(call, method, args, earliest, worked))
            call.later = functools.partial(self._value, call)
        elif method == "generate" and getattr(self._role, "takes_deposits", False):
            # The value depends on weights that may be deposited before the call ends.
            call.later = functools.partial(getattr(self._role, method), start, end, *args)
        elif end < math.inf:
            # The answer depends only on the actor's own calls, so it can be computed now.
            try:
                call.value = getattr(self._role, method)(start, end, *args)
            except RuntimeError as error:
                call.error = f"{type(error).__name__}: {error}"
        self._runtime.submitted(call)
        return call

    def _value(self, call: VirtualCall) -> Any:
        """Return the value of a call, after computing the values of all earlier calls."""
        while any(queued.call is call for queued in self._queue):
            first = self._queue.pop(0)
            first.call.value = getattr(self._role, first.method)(
                first.call.start, first.call.end, *first.args
            )
        return call.value

    def _cancel(self, first_prompt: int) -> VirtualCall:
        """End a call of `generate` now, or at its start if it has not started.

        The calls after it start earlier than planned.
        """
        now = self._runtime.time + self._runtime.latency
        named = [
            place
            for place, queued in enumerate(self._queue)
            if queued.method == "generate" and queued.args[0][0].prompt_index == first_prompt
        ]
        if named and self._queue[named[0]].call.end > now:
            cancelled = self._queue[named[0]]
            cancelled.method = "cancelled"
            self._move(cancelled, cancelled.call.start, max(now, cancelled.call.start))
            for queued in self._queue[named[0] + 1 :]:
                start = max(self._free_at, queued.earliest)
                self._move(queued, start, start + queued.call.end - queued.call.start)
        answer = VirtualCall(self, "cancel", now, now, lost=self._dead)
        self._runtime.submitted(answer)
        return answer

    def _move(self, queued: _Queued, start: float, end: float) -> None:
        """Change the start and end of a call that has not been collected."""
        queued.call.start, queued.call.end = queued.worked[:] = start, end
        self._free_at = end
        self._runtime.moved(queued.call)

    def _ask_progress(self) -> VirtualCall:
        start = self._runtime.time
        end = start + self._runtime.latency
        if self._mute and end >= self._hangs_from:
            end = math.inf
        call = VirtualCall(self, "progress", start, end, lost=self._dead)
        call.value = sum(
            int((min(until, end) - since) / self._step_s)
            for since, until in self._worked
            if since < end < math.inf
        )
        self._runtime.submitted(call)
        return call

    def kill(self) -> None:
        """Kill the actor. Its remaining calls are never answered."""
        self.killed = True
        self._runtime.kills.append((self.name, self._runtime.time))
        # Nobody collects the answers of a killed actor.
        gone = {call for call in self._runtime.uncollected if call.actor is self}
        self._runtime.uncollected -= gone
