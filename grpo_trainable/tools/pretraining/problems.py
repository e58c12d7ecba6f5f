"""Arithmetic word problems from a seed: a question, a calculation in steps, and the answer.

A problem starts with one or two numbers, changes them, and asks for the result. Each number, given
or computed, is at least 1. The largest allowed number and the number of operations set the
difficulty. The calculation of a problem, not its words, decides whether the problem is held out. So
no held-out problem is a reworded training problem.
"""

from __future__ import annotations

import hashlib
import operator
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from grpo_trainable.tools.pretraining.stories import BOYS, GIRLS

SCENES_FILE = Path(__file__).parents[2] / "assets" / "problems" / "scenes.txt"
MOST_TIMES = 9  # largest factor or divisor, as in the multiplication table
HELD_OUT_SHARE = 0.1

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}
_LINE = re.compile(r"(=|\?)?([-+*/])? (.+)")
_LIST = re.compile(r"(\w+): (.+)")
_FIELD = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class Step:
    """One operation of a calculation. Its written result may be wrong."""

    left: int
    sign: str
    right: int
    result: int

    @classmethod
    def of(cls, left: int, sign: str, right: int) -> Step:
        """Return the step with its true result."""
        return cls(left, sign, right, OPERATIONS[sign](left, right))


def written(steps: Iterable[Step]) -> str:
    """Format a calculation for a solution: "3 + 4 = 7. 7 * 2 = 14."."""
    return " ".join(f"{s.left} {s.sign} {s.right} = {s.result}." for s in steps)


@dataclass(frozen=True, slots=True)
class Problem:
    """A word problem with its calculation."""

    question: str
    steps: tuple[Step, ...]

    @property
    def answer(self) -> str:
        """Result of the last step."""
        return str(self.steps[-1].result)

    @property
    def is_held_out(self) -> bool:
        """Return True if a hash of the calculation reserves the problem for evaluations."""
        digest = hashlib.sha256(written(self.steps).encode()).digest()
        return int.from_bytes(digest[:6], "big") / 2**48 < HELD_OUT_SHARE


@dataclass(frozen=True, slots=True)
class Line:
    """A sentence of a scene, with the sign of its operation (None if it has no operation)."""

    text: str
    sign: str | None


@dataclass(slots=True)
class Scene:
    """A theme for problems: sentences that start a problem, change a number or ask for it."""

    words: dict[str, list[str]] = field(default_factory=dict)  # field -> possible words
    starts: list[Line] = field(default_factory=list)
    changes: list[Line] = field(default_factory=list)
    questions: list[Line] = field(default_factory=list)


def read_scenes(text: str) -> list[Scene]:
    """Parse scenes, which are separated by `====`.

    - `= …` starts a problem with the number `{n}`, and `=+ …` with `{m} + {n}`.
    - `+ …` changes the number by `{n}`.
    - `? …` asks for the number, and `?/ …` for the number divided by `{n}`.
    - `name: a, b` lists words. One of these words replaces `{name}` throughout a problem.

    `{name}`, `{friend}` and the pronouns stand for people. If a field begins with a capital letter,
    so does the word that replaces it.
    """
    return [_read_scene(part.strip().splitlines()) for part in text.split("====")]


def _read_scene(lines: list[str]) -> Scene:
    scene = Scene()
    for line in lines:
        if listed := _LIST.fullmatch(line):
            scene.words[listed[1]] = listed[2].split(", ")
            continue
        parts = _LINE.fullmatch(line)
        assert parts is not None, line
        kinds = {"=": scene.starts, "?": scene.questions, None: scene.changes}
        kinds[parts[1]].append(Line(parts[3], parts[2]))
    return scene


SCENES = read_scenes(SCENES_FILE.read_text(encoding="utf-8"))


class ProblemWriter:
    """Writes random problems. Each number of operations is equally likely."""

    def __init__(self, rng: Random, *, largest: int, most_operations: int) -> None:
        """Set the difficulty.

        Args:
            rng: Source of all random draws.
            largest: Largest number in a problem.
            most_operations: Maximum number of operations in a problem. The minimum is 1.
        """
        self._rng = rng
        self._largest = largest
        self._most_operations = most_operations

    def problems(self, *, held_out: bool) -> Iterator[Problem]:
        """Yield an endless stream of held-out problems or of training problems."""
        while True:
            operations = self._rng.randint(1, self._most_operations)
            problem = self._problem(operations)
            while problem is None or problem.is_held_out != held_out:
                problem = self._problem(operations)
            yield problem

    def _problem(self, operations: int) -> Problem | None:
        """Draw a problem with `operations` operations from a random scene.

        Returns:
            The problem, or None if the drawn sentences do not allow this number of operations, or
            if an operation has no valid operand.
        """
        scene = self._rng.choice(SCENES)
        start, question = self._rng.choice(scene.starts), self._rng.choice(scene.questions)
        between = operations - sum(line.sign is not None for line in (start, question))
        if not 0 <= between <= len(scene.changes):
            return None
        lines = [start, *self._rng.sample(scene.changes, between), question]
        chosen = self._numbers(lines)
        if chosen is None:
            return None
        numbers, steps = chosen
        words = self._words(scene)
        sentences = [
            _filled(line.text, words | given) for line, given in zip(lines, numbers, strict=True)
        ]
        return Problem(" ".join(sentences), tuple(steps))

    def _numbers(self, lines: list[Line]) -> tuple[list[dict[str, str]], list[Step]] | None:
        """Draw the numbers for `{m}` and `{n}` in each line.

        Returns:
            The numbers in each line and the steps of the calculation, or None if an operation has
            no valid operand.
        """
        value, numbers, steps = None, [], []
        for line in lines:
            given = {}
            if value is None:
                value = self._first(line.sign)
                given["m" if line.sign else "n"] = str(value)
            if line.sign is not None:
                operand = self._operand(line.sign, value)
                if operand is None:
                    return None
                steps.append(Step.of(value, line.sign, operand))
                given["n"], value = str(operand), steps[-1].result
            numbers.append(given)
        return numbers, steps

    def _first(self, sign: str | None) -> int:
        return self._rng.randint(
            2, min(MOST_TIMES, self._largest) if sign == "*" else self._largest
        )

    def _operand(self, sign: str, value: int) -> int | None:
        """Draw a second operand that keeps the result within the bounds, or return None."""
        if sign == "/":
            choices = [n for n in range(2, MOST_TIMES + 1) if value % n == 0 and value > n]
            return self._rng.choice(choices) if choices else None
        most = {
            "+": self._largest - value,
            "-": value - 1,
            "*": min(MOST_TIMES, self._largest // value),
        }[sign]
        return self._rng.randint(2, most) if most >= 2 else None

    def _words(self, scene: Scene) -> dict[str, str]:
        girl = self._rng.random() < 0.5
        name = self._rng.choice(GIRLS if girl else BOYS)
        friend = self._rng.choice([n for n in (*GIRLS, *BOYS) if n != name])
        he, him, his = ("she", "her", "her") if girl else ("he", "him", "his")
        chosen = {field: self._rng.choice(words) for field, words in scene.words.items()}
        return {"name": name, "friend": friend, "he": he, "him": him, "his": his, **chosen}


def _filled(template: str, words: dict[str, str]) -> str:
    def fill(match: re.Match[str]) -> str:
        word = words[match[1].lower()]
        return word[0].upper() + word[1:] if match[1][0].isupper() else word

    return _FIELD.sub(fill, template)
