"""The calls that a pipeline has submitted but not yet collected."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from grpo_trainable.pipeline.liveness import Watch
from grpo_trainable.protocol.calls import Actor, ActorFailed, ActorLost, Call, Runtime, no_answer

Record = TypeVar("Record")


class OpenCalls(Generic[Record]):
    """Open calls, each with a record of its purpose."""

    def __init__(self, runtime: Runtime, deadline_s: float) -> None:
        """Create an empty collection.

        Args:
            runtime: Waits for calls.
            deadline_s: Maximum number of seconds for which an actor with an unanswered call may be
                silent.
        """
        self._runtime = runtime
        self._deadline_s = deadline_s
        self._watch = Watch(runtime, deadline_s)
        self._open: dict[Call, Record] = {}

    def __len__(self) -> int:
        return len(self._open)

    def add(self, call: Call, record: Record) -> None:
        """Add a call with its record."""
        self._open[call] = record

    def records_of(self, actor: Actor) -> list[Record]:
        """Return the records of an actor's calls, in the order in which they were submitted."""
        return [record for call, record in self._open.items() if call.actor is actor]

    def arrivals(self) -> Iterator[tuple[Record, Any]]:
        """Wait until at least one answer arrives, and yield every answer that has arrived.

        Yields:
            The record of a call, and its answer. The answer is an `ActorLost` if the actor died or
            was silent for too long.

        Raises:
            ActorFailed: A call raised an exception in its actor.
        """
        done, silent = self._watch.wait(list(self._open))
        for actor in silent:
            calls = [call for call in self._open if call.actor is actor]
            yield self._open[calls[0]], no_answer(calls, self._deadline_s)
        for call in done:
            # The handler of an earlier answer may have dropped this actor and its calls.
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
        """Forget an actor that was killed, and return the records of its open calls."""
        self._watch.forget(actor)
        return [self._open.pop(call) for call in list(self._open) if call.actor is actor]

    def abandon(self, awaited: Callable[[Record], bool]) -> None:
        """Wait for the calls whose records satisfy `awaited`, and then forget all calls."""
        for call, record in self._open.items():
            if awaited(record):
                with contextlib.suppress(ActorFailed):
                    self._watch.result(call)
        self._open = {}
