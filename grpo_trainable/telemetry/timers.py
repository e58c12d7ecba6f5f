"""Clocks for the stages of an actor's work, all in seconds since 1970."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from grpo_trainable.telemetry.stages import IDLE

_START = time.time() - time.perf_counter()


def now() -> float:
    """Return the seconds since 1970; the value never decreases within a process."""
    return _START + time.perf_counter()


@dataclass(frozen=True, slots=True)
class Span:
    """An actor's work on one stage from `start` to `end`, in seconds since 1970."""

    stage: str
    start: float
    end: float
    concurrent: bool = False  # done by a thread other than the one that runs the actor's calls

    @property
    def seconds(self) -> float:
        """Length of the span in seconds."""
        return self.end - self.start

    def earlier(self, seconds: float) -> Span:
        """Return this span with its times converted to a clock that is slow by `seconds`."""
        if not seconds:
            return self
        return replace(self, start=self.start - seconds, end=self.end - seconds)


class StageClock:
    """Records the spans of one actor, in the actor's process.

    Time between two calls to the actor belongs to the stage `idle`. At the end of a span, the clock
    calls `synchronize` to wait for the device, so the span ends when its work has ended.
    """

    def __init__(self, synchronize: Callable[[], None] = lambda: None) -> None:
        self.synchronize = synchronize
        self._concurrent = 0  # number of other threads that are working
        self.reset()

    def reset(self) -> None:
        """Forget all spans, as if no call had been made yet."""
        self._spans: list[Span] = []
        self._last_end: float | None = None
        self._stage: str | None = None  # the stage that has run since `_since`
        self._since = 0.0

    @contextmanager
    def call(self, stage: str = IDLE, since: float = math.inf) -> Iterator[float]:
        """Time one call to the actor, and yield how many seconds the actor waited for the call.

        Args:
            stage: the stage to which the time from `since` until the call starts belongs.
            since: the moment when the wait for this call began, in seconds since 1970. Time
                between the last call and this moment counts as idle.
        """
        start, last_end = now(), self._last_end  # read once: another thread may change _last_end
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
        """Do not count the actor as idle during the block, in which another thread works."""
        self._concurrent += 1
        try:
            yield
        finally:
            self._concurrent -= 1
            if self._last_end is not None:
                self._last_end = now()

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Time a stage. An inner stage interrupts the outer one, so two stages never overlap."""
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
        """Return the spans recorded since the last call to this method, and forget them."""
        spans, self._spans = self._spans, []
        return spans


def covered_seconds(spans: Iterable[Span], start: float, end: float) -> float:
    """Return the seconds between `start` and `end` in which at least one span ran."""
    total, reached = 0.0, start
    for span in sorted(spans, key=lambda span: span.start):
        low, high = max(span.start, reached), min(span.end, end)
        if high > low:
            total += high - low
            reached = high
    return total


class WallClock:
    """Measures the wall-clock time on which tables and speed-ups are based.

    The clock runs from the start of the first round to the end of the last round, but not during
    evaluations and checkpoints. Actors warm up before the clock starts. The gaps that Tune leaves
    between two steps are included. The time between the trial's stop and a resume is not included.
    """

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self._last_end: float | None = None
        self._left_out_s = 0.0

    def leave_out(self, seconds: float) -> None:
        """Leave out `seconds` that a checkpoint or an evaluation took after the last round."""
        self._left_out_s += seconds

    def round_ended(self, start: float, end: float, eval_s: float) -> float:
        """Add a round, and return the seconds that it adds to the wall-clock time.

        The time is counted from the end of the previous round, or from `start` if there was no
        previous round. Seconds that were left out do not count, and neither does `eval_s`.

        Args:
            start: start of the round, in seconds since 1970.
            end: end of the round.
            eval_s: seconds of the round's evaluation.
        """
        since = start if self._last_end is None else self._last_end
        gap_s = 0.0 if self._last_end is None else self._left_out_s
        seconds = end - since - gap_s - eval_s
        self._last_end, self._left_out_s = end, 0.0
        self.seconds += seconds
        return seconds
