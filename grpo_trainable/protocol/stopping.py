"""Requests to stop a trial: their effect on the round in progress, and the trial's answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from grpo_trainable.telemetry.timers import now

MEASURED_ROUNDS = 4  # number of latest rounds whose durations serve to estimate the time left


@dataclass(frozen=True, kw_only=True)
class Finishing:
    """A trial's answer during the gradient steps of a round: the round will be finished first."""

    round: int
    # Estimated seconds until the round ends. 0 if this round has already taken longer than earlier
    # rounds did. None if there is no earlier round.
    left_s: float | None


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """A trial's last answer: the trial has stopped and waits for its experiment to end."""

    round: int  # number of finished rounds
    saved: bool  # False if `round` is 0, or if the checkpoint could not be written
    lost_s: float  # seconds spent on a round that was abandoned
    checkpoint: str | None = None  # path of the checkpoint that was written for this request
    notes: list[str] = field(default_factory=list)  # one line for each problem with the checkpoint


class StopRequest(Protocol):
    """A request to stop a trial, as the trial sees the request."""

    @property
    def made(self) -> bool:
        """True once the trial must stop."""
        ...

    def say(self, answer: Finishing | Stopped) -> None:
        """Answer the request."""
        ...


class RoundAbandoned(Exception):
    """Raised if a request to stop ends a round before the round's gradient steps.

    The learner has not changed since the last finished round.
    """

    def __init__(self, round_: int, lost_s: float) -> None:
        super().__init__(f"round {round_} was abandoned after {lost_s:.1f} s")
        self.lost_s = lost_s


class StoppableRounds:
    """Decides how a request to stop affects the round in progress.

    If the gradient steps of the round have not begun, `RoundAbandoned` is raised. Once the steps
    have begun, the round ends as usual, and the answer to the request estimates the time left. If
    the request comes between two rounds, the next round is abandoned at its start.
    """

    def __init__(
        self, request: StopRequest | None = None, clock: Callable[[], float] = now
    ) -> None:
        """Create the object for all rounds of a trial.

        Args:
            request: The request to obey. None: nobody can stop the trial.
            clock: Returns the time in seconds.
        """
        self.request = request
        self.stopped = False  # True once a round was abandoned
        self._clock = clock
        self._round: int | None = None  # the round in progress
        self._start = 0.0
        self._training_since: float | None = None
        self._evaluates = False  # True if an evaluation follows the round's gradient steps
        self._answered = False  # True if the trial has answered that it will finish the round
        # For each of the latest rounds, the seconds from the start of its gradient steps to the end
        # of the round, without the evaluation.
        self._training_s: deque[float] = deque(maxlen=MEASURED_ROUNDS)
        self._evaluation_s = 0.0  # seconds of the latest evaluation

    @contextmanager
    def round(self, number: int) -> Iterator[None]:
        """Run the block as a round.

        Raises:
            RoundAbandoned: A stop has already been requested.
        """
        self._round, self._start = number, self._clock()
        self._training_since, self._answered = None, False
        try:
            self.look()
            yield
        finally:
            self._round = None

    def look(self) -> None:
        """Obey a request, if there is one. Call this often while a round waits for its actors.

        Raises:
            RoundAbandoned: A stop has been requested, and the gradient steps have not begun.
        """
        if self._round is None or self.request is None or self._answered or not self.request.made:
            return
        if self._training_since is None:
            self.stopped = True
            raise RoundAbandoned(self._round, self._clock() - self._start)
        self._answered = True
        self.request.say(Finishing(round=self._round, left_s=self._left_s()))

    def training_begins(self, *, evaluates: bool) -> None:
        """Record that the gradient steps of the round begin.

        Args:
            evaluates: True if an evaluation follows the steps in the same round.

        Raises:
            RoundAbandoned: A stop has been requested.
        """
        self.look()
        self._training_since, self._evaluates = self._clock(), evaluates

    def training_ended(self, evaluations: int, eval_s: float) -> None:
        """Record the time from the start of the gradient steps to the end of the round.

        Args:
            evaluations: Number of evaluations in the round, including any before the steps.
            eval_s: Seconds that all these evaluations took.
        """
        assert self._training_since is not None
        seconds = self._clock() - self._training_since
        if evaluations:
            self._evaluation_s = eval_s / evaluations
        if self._evaluates:
            seconds -= self._evaluation_s
        self._training_s.append(max(0.0, seconds))

    def _left_s(self) -> float | None:
        if not self._training_s:
            return None
        assert self._training_since is not None
        expected_s = sum(self._training_s) / len(self._training_s)
        if self._evaluates:
            expected_s += self._evaluation_s
        return max(0.0, expected_s - (self._clock() - self._training_since))
