"""Clocks for the stages of an actor's work, all on one time line."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from grpo_trainable.telemetry.stages import IDLE

_START = time.time() - time.perf_counter()


def now() -> float:
    """Seconds since 1970 that never run backwards within a process."""
    return _START + time.perf_counter()


@dataclass(frozen=True, slots=True)
class Span:
    """What an actor did from `start` to `end`, in seconds since 1970."""

    stage: str
    start: float
    end: float
    concurrent: bool = False  # another thread did it than the one that works through the calls

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def earlier(self, seconds: float) -> Span:
        """The same, by a clock that is so many seconds behind."""
        if not seconds:
            return self
        return replace(self, start=self.start - seconds, end=self.end - seconds)


class StageClock:
    """Spans of one actor, taken inside it. Time between two of its calls is the stage `idle`.

    `synchronize` waits for the device, so that a span ends when its work has.
    """

    def __init__(self, synchronize: Callable[[], None] = lambda: None) -> None:
        self.synchronize = synchronize
        self._concurrent = 0  # how many other threads work
        self.reset()

    def reset(self) -> None:
        """Forgets everything, as if no call had been made yet."""
        self._spans: list[Span] = []
        self._last_end: float | None = None
        self._stage: str | None = None  # the stage that runs, since `_since`
        self._since = 0.0

    @contextmanager
    def call(self, stage: str = IDLE, since: float = math.inf) -> Iterator[float]:
        """Surrounds one call of the actor, and yields the seconds that it waited for it.

        `since`: when the wait for this call began, in seconds since 1970. Time in which the actor
        had nothing else to do counts as `stage` from then on, and as idle before.
        """
        start, last_end = now(), self._last_end  # another thread may move the latter meanwhile
        waiting = start if last_end is None else min(start, max(last_end, since))
        if last_end is not None:
            if not self._concurrent:
                self._spans.append(Span(IDLE, last_end, waiting))
            if waiting < start:
                self._spans.append(Span(stage, waiting, start))
        try:
            yield start - waiting
        finally:
            self._last_end = now()

    @contextmanager
    def concurrent(self) -> Iterator[None]:
        """Surrounds the work of another thread, during which the actor is not idle."""
        self._concurrent += 1
        try:
            yield
        finally:
            self._concurrent -= 1
            if self._last_end is not None:
                self._last_end = now()

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Times a stage. A stage within another interrupts it: every moment belongs to one."""
        interrupted = self._stage
        self._switch(stage)
        try:
            yield
        finally:
            self._switch(interrupted)

    def _switch(self, stage: str | None) -> None:
        if self._stage is not None:
            self.synchronize()
            self._spans.append(Span(self._stage, self._since, now()))
        self._stage, self._since = stage, now()

    def take(self) -> list[Span]:
        """Returns the spans since the last call, and forgets them."""
        spans, self._spans = self._spans, []
        return spans


def covered_seconds(spans: Iterable[Span], start: float, end: float) -> float:
    """Seconds between `start` and `end` in which at least one span ran."""
    total, reached = 0.0, start
    for span in sorted(spans, key=lambda span: span.start):
        low, high = max(span.start, reached), min(span.end, end)
        if high > low:
            total += high - low
            reached = high
    return total


class WallClock:
    """Measures wall-clock as tables and speed-ups quote it.

    From the start of the first round, before which every actor is warmed up, to the end of the
    last, the gaps that Tune leaves between two steps included, evaluation and checkpoints
    subtracted. Time during which the trial did not run (after a resume) is not counted.
    """

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self._last_end: float | None = None
        self._left_out_s = 0.0

    def leave_out(self, seconds: float) -> None:
        """Notes that a checkpoint or an evaluation since the last round took `seconds`."""
        self._left_out_s += seconds

    def round_ended(self, start: float, end: float, eval_s: float) -> float:
        """Adds a round, and returns its seconds since the end of the round before."""
        since = start if self._last_end is None else self._last_end
        gap_s = 0.0 if self._last_end is None else self._left_out_s
        seconds = end - since - gap_s - eval_s
        self._last_end, self._left_out_s = end, 0.0
        self.seconds += seconds
        return seconds
