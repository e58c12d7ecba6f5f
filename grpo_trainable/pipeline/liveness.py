"""Detection of actors that hang: a working actor answers calls or makes progress."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_trainable.protocol.calls import Actor, ActorLost, Call, Runtime, no_answer

# Number of times that an actor is asked about its progress within the deadline. An actor that
# answers its call within `deadline / QUESTIONS` is never asked.
QUESTIONS = 4


@dataclass(kw_only=True, eq=False)
class _Silence:
    """The silence of an actor since the pipeline last heard from it."""

    ask_at_s: float  # seconds of silence after which a question is due
    seconds: float = 0.0
    question: Call | None = None  # the question that has not been answered yet
    progress: Any = None  # the last progress that the actor reported


class Watch:
    """Waits for calls and detects silent actors.

    The pipeline hears from an actor when the actor answers a call or reports new progress. An actor
    counts as silent if it owes an answer and has not been heard from for `deadline_s` seconds,
    regardless of other actors. Only time spent waiting for the actor counts, because the pipeline
    receives nothing between two rounds.
    """

    def __init__(self, runtime: Runtime, deadline_s: float) -> None:
        self._runtime = runtime
        self._deadline_s = deadline_s
        self._silences: dict[Actor, _Silence] = {}

    def wait(self, calls: Sequence[Call]) -> tuple[list[Call], list[Actor]]:
        """Wait until a call is done or an actor is silent.

        Returns:
            The calls that are done, and the actors that are silent.
        """
        owing = list(dict.fromkeys(call.actor for call in calls))
        while True:
            questions = self._ask(owing)
            done = self._listen([*calls, *questions], owing)
            answered = [call for call in done if call not in questions]
            for call in answered:
                self._heard(call.actor)
            for question in (call for call in done if call in questions):
                self._take_progress(question)
            silent = [a for a in owing if self._silences[a].seconds >= self._deadline_s]
            if answered or silent:
                return answered, silent

    def result(self, call: Call) -> Any:
        """Return the value of one call.

        Raises:
            ActorLost: The actor of the call is silent or gone.
            ActorFailed: The call raised an exception.
        """
        answered, _ = self.wait([call])
        if not answered:
            raise no_answer([call], self._deadline_s)
        return self._runtime.result(call)

    def forget(self, actor: Actor) -> None:
        """Forget an actor that was killed."""
        self._silences.pop(actor, None)

    def _ask(self, actors: Iterable[Actor]) -> list[Call]:
        """Ask each actor about its progress, if a question is due.

        Return all questions that have not been answered yet.
        """
        for actor in actors:
            silence = self._silences.setdefault(actor, _Silence(ask_at_s=self._interval_s))
            if silence.question is None and silence.seconds >= silence.ask_at_s:
                silence.question = actor.submit("progress", "progress")
        return [q for actor in actors if (q := self._silences[actor].question) is not None]

    def _listen(self, calls: Sequence[Call], owing: Sequence[Actor]) -> list[Any]:
        """Wait for a call to end, at most for the shortest `_due_s`, and return the finished calls.

        The time spent waiting is added to the silence of each actor in `owing`.
        """
        silences = [self._silences[actor] for actor in owing]
        due_s = max(0.0, min(self._due_s(silence) for silence in silences))
        start = self._runtime.now()
        done = self._runtime.wait(calls, due_s)
        # A longer wait than requested means that this process was suspended, and others may have
        # been too.
        waited_s = min(due_s, self._runtime.now() - start) if done else due_s
        for silence in silences:
            silence.seconds += waited_s
        return done

    def _due_s(self, silence: _Silence) -> float:
        """Return the seconds until the next question to the actor, or until it counts as silent."""
        at_s = self._deadline_s
        if silence.question is None:
            at_s = min(at_s, silence.ask_at_s)
        return at_s - silence.seconds

    def _take_progress(self, question: Call) -> None:
        silence = self._silences[question.actor]
        silence.question = None
        silence.ask_at_s = silence.seconds + self._interval_s
        try:
            progress = self._runtime.result(question)
        except ActorLost:
            return  # the pending call reports the same loss
        if progress != silence.progress:
            silence.progress = progress
            self._heard(question.actor)

    def _heard(self, actor: Actor) -> None:
        silence = self._silences[actor]
        silence.seconds, silence.ask_at_s = 0.0, self._interval_s

    @property
    def _interval_s(self) -> float:
        return self._deadline_s / QUESTIONS
