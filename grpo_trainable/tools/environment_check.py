"""Play a few episodes of an environment to find mistakes that would break training.

The check plays each specification several times with the same actions:

- twice in one environment;
- once in another process;
- in several environments of one process that play in turn, as the environments of a group do.

All episodes of a specification must be equal.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, TypeAlias

from grpo_trainable.config import EnvSettings, shown
from grpo_trainable.environments import JSONValue, Turn
from grpo_trainable.generator.env_processes import EpisodeError, GroupProcess

# Names of faults.
FAILS = "fails"  # the environment raises an exception or returns a wrong value, or its process dies
HANGS = "hangs"  # no answer within env.step_deadline_s
PROMPT = "prompt"  # the text that reset returns differs from the prompt of the task
DIFFERS = "differs"  # another process plays a different episode for the same specification
REMEMBERS = "remembers"  # an episode depends on the previous one
SHARES = "shares"  # episodes played in turn in one process affect each other
UNSENDABLE = "unsendable"  # JSON changes the specification
RETOKENISED = "retokenised"  # encoding and decoding change the text
PROCESSES = "processes"  # the environment leaves processes behind
FAULTS = (FAILS, HANGS, PROMPT, DIFFERS, REMEMBERS, SHARES, UNSENDABLE, RETOKENISED, PROCESSES)

LONG = 2000  # characters in the longest invented action
ODDITIES = ("", "é 😀", "x" * LONG)


@dataclass(frozen=True, kw_only=True)
class Specification:
    """An episode to play."""

    spec: JSONValue
    prompt: str | None = None  # prompt of the task; None without a task


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One occurrence of a fault."""

    name: str  # one of FAULTS
    where: str
    what: str


@dataclass(kw_only=True)
class Report:
    """Results of a check."""

    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # duration of each answer
    episodes: int = 0
    example: list[tuple[str, Turn]] = field(default_factory=list)  # (action, turn) of one episode
    first: str = ""  # first observation of the example


Heard: TypeAlias = tuple[str, list[Turn]]  # the text that reset returned, and the turns


class _Unplayable(Exception):
    """An episode could not be finished. The report contains the reason as a finding."""


class EnvironmentCheck:
    """Plays an environment in the same way as a trial with the same settings."""

    def __init__(
        self,
        settings: EnvSettings,
        *,
        actions: Sequence[str] = (),
        stop: str = "",
        seed: int = 0,
        group_size: int = 3,
        retold: Callable[[str], str] = str,
        tokens: Callable[[str], int] = len,
        most_tokens: int | None = None,
    ) -> None:
        """Prepare the check.

        Args:
            settings: Settings of the environment.
            actions: Actions to draw from. By default, actions are digits, unusual strings and words
                from the observations.
            stop: String at the end of each action.
            seed: Seed of the actions.
            group_size: Number of environments that play in turn in one process.
            retold: Encodes a text, decodes the tokens and returns the result.
            tokens: Counts the tokens in a text.
            most_tokens: `rollout.max_new_tokens`, or None to leave the length of answers unchecked.
        """
        self._settings, self._stop, self._seed = settings, stop, seed
        self._actions, self._group_size = actions, group_size
        self._retold, self._tokens, self._most_tokens = retold, tokens, most_tokens
        self._report = Report()
        self._where = ""

    def run(
        self, specifications: Sequence[Specification], progress: Callable[[], object] = lambda: None
    ) -> Report:
        """Play all specifications.

        Args:
            specifications: Episodes to play.
            progress: Called after each specification.

        Raises:
            ValueError: If the environment cannot be created. The message is one line.
        """
        all_turns: list[Turn] = []
        for number, specification in enumerate(specifications, start=1):
            self._where = f"specification {number}"
            with suppress(_Unplayable):
                all_turns += self._check(specification, number)
            progress()
        self._take_notes(all_turns)
        return self._report

    # ---- One specification -------------------------------------------------------------------

    def _check(self, specification: Specification, number: int) -> list[Turn]:
        spec = self._sent(specification.spec)
        with _Process(self._settings) as process:
            script = _Script(self._actions, self._stop, f"{self._seed}/{number}")
            first = self._played(process, 0, spec, script)
            self._compare_prompt(specification, first[0])
            self._compare_tokens(first)
            again = self._played(process, 0, spec, script)
            left = process.left_behind()
        if left:
            self._find(PROCESSES, f"still running after close(): {left}")
        with _Process(self._settings) as process:
            elsewhere = self._played(process, 0, spec, script)
        if self._difference(DIFFERS, "another process", first, elsewhere):
            return first[1]  # other differences would have the same cause
        self._difference(REMEMBERS, "the same environment, played again,", first, again)
        with _Process(self._settings) as process:
            for heard in self._in_turn(process, spec, script):
                if self._difference(SHARES, "one of several environments", first, heard):
                    break
        if not self._report.example:
            self._report.first = first[0]
            actions = (script.action(turn, first) for turn in range(len(first[1])))
            self._report.example = list(zip(actions, first[1], strict=True))
        return first[1]

    def _sent(self, spec: JSONValue) -> JSONValue:
        """Return a specification as another process receives it, encoded as JSON and decoded."""
        try:
            arrived = json.loads(json.dumps(spec, allow_nan=False))
        except (TypeError, ValueError) as error:
            self._find(UNSENDABLE, f"the specification {shown(spec)} is not JSON: {error}")
            raise _Unplayable from None
        if arrived != spec:
            self._find(UNSENDABLE, f"JSON changes {shown(spec)} to {shown(arrived)}")
        return arrived

    def _played(self, process: _Process, place: int, spec: JSONValue, script: _Script) -> Heard:
        """Play one episode alone."""
        *_, heard = self._steps(process, place, spec, script)
        return heard

    def _in_turn(self, process: _Process, spec: JSONValue, script: _Script) -> list[Heard]:
        """Play a group of episodes: one action of each episode, in turn."""
        running = [self._steps(process, g, spec, script) for g in range(self._group_size)]
        heard = [next(episode) for episode in running]
        for _ in zip_longest(*running):  # one action of each episode
            pass
        return heard

    def _steps(
        self, process: _Process, place: int, spec: JSONValue, script: _Script
    ) -> Iterator[Heard]:
        """Play an episode action by action. After each answer, yield the result so far.

        The result is always the same tuple, whose list of turns grows.
        """
        self._report.episodes += 1
        said = self._ask(process, "reset", {"reset": place, "spec": spec})["text"]
        heard: Heard = (said, [])
        yield heard
        for turn in range(self._settings.max_turns):
            message = {"step": place, "action": script.action(turn, heard)}
            heard[1].append(Turn(**self._ask(process, f"turn {turn + 1}", message)))
            yield heard
            if heard[1][-1].done:
                return

    def _ask(self, process: _Process, where: str, message: dict[str, Any]) -> dict[str, Any]:
        start, deadline = time.monotonic(), self._settings.step_deadline_s
        after = "" if "action" not in message else f" after {shown(message['action'])}"
        try:
            answer = process.ask(message, deadline)
        except TimeoutError:
            self._find(HANGS, f"no answer within env.step_deadline_s={deadline:g}{after}", where)
            raise _Unplayable from None
        except EpisodeError as error:
            self._find(FAILS, f"{error}{after}", where)
            raise _Unplayable from None
        self._report.seconds.append(time.monotonic() - start)
        return answer

    # ---- Comparisons -------------------------------------------------------------------------

    def _compare_prompt(self, specification: Specification, said: str) -> None:
        if specification.prompt is not None and said != specification.prompt:
            what = f"reset returned {shown(said)}, but the task's prompt is "
            self._find(PROMPT, what + shown(specification.prompt))

    def _compare_tokens(self, heard: Heard) -> None:
        said, turns = heard
        for number, text in enumerate([said, *(turn.text for turn in turns)]):
            retold = self._retold(text)
            if retold != text:
                where = "reset" if number == 0 else f"turn {number}"
                self._find(
                    RETOKENISED, f"the policy reads {shown(retold)} instead of {shown(text)}", where
                )
                return

    def _difference(self, name: str, who: str, first: Heard, other: Heard) -> bool:
        """Return True if two episodes differ, and report the first difference."""
        if first == other:
            return False
        if first[0] != other[0]:
            self._find(name, f"{who} begins with {shown(other[0])}, not {shown(first[0])}", "reset")
            return True
        pairs = enumerate(zip(first[1], other[1], strict=False), start=1)
        for number, (expected, turn) in pairs:
            for part in ("text", "reward", "done", "info"):
                one, two = getattr(expected, part), getattr(turn, part)
                if one != two:
                    what = f"{who} has {part} {shown(two)}, not {shown(one)}, after equal actions"
                    self._find(name, what, f"turn {number}")
                    return True
        return True

    def _find(self, name: str, what: str, where: str = "") -> None:
        place = f"{self._where}, {where}" if where else self._where
        self._report.findings.append(Finding(name=name, where=place, what=what))

    def _take_notes(self, turns: Sequence[Turn]) -> None:
        """Add notes on unusual results that are not necessarily faults."""
        report, settings = self._report, self._settings
        note = report.notes.append
        slowest = max(report.seconds, default=0.0)
        if slowest > settings.patience_s:
            note(
                f"an answer took {slowest:.1f} s: the generator waits at most "
                f"env.patience_s={settings.patience_s:g} per call for late answers and then "
                "continues without them"
            )
        if not turns:
            return
        if not any(turn.done for turn in turns):
            note(f"no episode ended within env.max_turns={settings.max_turns}")
        if len({turn.reward for turn in turns}) == 1:
            hint = "" if self._actions else "; give meaningful actions (--action)"
            note(f"every action earned {turns[0].reward:g}{hint}")
        longest = max(self._tokens(turn.text) for turn in turns)
        if self._most_tokens is not None and longest >= self._most_tokens:
            note(
                f"an answer has {longest:,} tokens, but rollout.max_new_tokens="
                f"{self._most_tokens} limits actions and answers together"
            )


class _Script:
    """The actions of an episode. Equal answers lead to equal actions."""

    def __init__(self, actions: Sequence[str], stop: str, key: str) -> None:
        self._actions, self._stop, self._key = actions, stop, key

    def action(self, turn: int, heard: Heard) -> str:
        """Return the action of turn number `turn`, counted from 0."""
        draw = random.Random(f"{self._key}/{turn}")
        if self._actions:
            return draw.choice(self._actions) + self._stop
        said, turns = heard
        words = [word for text in (said, *(t.text for t in turns[:turn])) for word in text.split()]
        return draw.choice([*words, *map(str, range(10)), *ODDITIES]) + self._stop


class _Process:
    """A process that plays episodes and ends when the `with` block ends."""

    def __init__(self, settings: EnvSettings) -> None:
        self._group = GroupProcess(settings)

    def __enter__(self) -> _Process:
        self._group.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._group.close()

    def ask(self, message: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        return self._group.ask(message, deadline_s)

    def left_behind(self) -> str:
        """Close the environments, and describe the processes that remain; "" if none remain."""
        self._group.ask({"close": True}, 5.0)
        count = len(self._group.started())
        return (
            "" if not count else f"{count} process{'' if count == 1 else 'es'} of the environment"
        )
