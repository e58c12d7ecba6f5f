"""The calls that a pipeline has submitted and not yet collected."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from grpo_trainable.pipeline.liveness import Watch
from grpo_trainable.protocol.calls import Actor, ActorFailed, ActorLost, Call, Runtime, no_answer

Record = TypeVar("Record")


class OpenCalls(Generic[Record]):
    """Open calls, each with a record of what it was submitted for."""

    def __init__(self, runtime: Runtime, deadline_s: float) -> None:
        """`deadline_s`: how long an actor that owes an answer may be silent."""
        self._runtime = runtime
        self._deadline_s = deadline_s
        self._watch = Watch(runtime, deadline_s)
        self._open: dict[Call, Record] = {}

    def __len__(self) -> int:
        return len(self._open)

    def add(self, call: Call, record: Record) -> None:
        self._open[call] = record

    def arrivals(self) -> Iterator[tuple[Record, Any]]:
        """Waits until something arrives, and gives all that has: the record of a call and its
        answer, which is an `ActorLost` where the actor died or stayed silent too long.

        Raises:
            ActorFailed: a call raised in its actor.
        """
        done, silent = self._watch.wait(list(self._open))
        for actor in silent:
            calls = [call for call in self._open if call.actor is actor]
            yield self._open[calls[0]], no_answer(calls, self._deadline_s)
        for call in done:
            # Whoever handled an arrival before this one may have dropped the actor and its calls.
            if call in self._open:
                yield self._open[call], self._answer(call)

    def _answer(self, call: Call) -> Any:
        try:
            answer = self._runtime.result(call)
        except ActorLost as lost:
            return lost
        del self._open[call]
        return answer

    def drop(self, actor: Actor) -> list[Record]:
        """Forgets an actor that was killed. Returns the records of its open calls."""
        self._watch.forget(actor)
        return [self._open.pop(call) for call in list(self._open) if call.actor is actor]

    def abandon(self, awaited: Callable[[Record], bool]) -> None:
        """Forgets every call, after those `awaited` have ended."""
        for call, record in self._open.items():
            if awaited(record):
                with contextlib.suppress(ActorFailed):
                    self._watch.result(call)
        self._open = {}
