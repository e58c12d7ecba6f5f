"""Word problems for a calculator: the task, the environment and the transcripts of `tool_use.py`.

In a problem, somebody has some things or boxes of things, and then gets more or loses some, once or
twice. The numbers are too large for mental arithmetic, so a small model needs the calculator. The
words of the problems come from `grade_school.py`. As there, the calculation alone decides whether a
problem is held out.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice
from random import Random
from typing import Any

from grade_school import BOXES, GAINS, LOSSES, NAMES, ONE_PILE, QUESTION, THINGS, Problem, first

from grpo_trainable.environments.calculator import CALL, Calculator, calculate
from grpo_trainable.environments.environment import fields_of
from grpo_trainable.tasks import Example

SYSTEM = {
    "role": "system",
    "content": f"Write {CALL}and an expression to use the calculator. Then write the answer.",
}
ROLE = "user"  # role of messages that hold results; `launch/align.py` accepts no tool messages


class ProblemCalculator(Calculator):
    """The environment `calculator`, with a problem in words in place of an expression."""

    def reset(self, spec: Any) -> str:
        """Begin an episode and return the problem."""
        super().reset(spec)
        (question,) = fields_of(spec, "question")
        return str(question)


class ToolProblems:
    """A task with one prompt for each problem. It has no stop strings: an end id ends an action."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def train_example(self, prompt_index: int) -> Example:
        """Return training example `prompt_index`."""
        return asked(problem(f"train {self._seed} {prompt_index}", held_out=False))

    def eval_examples(self, count: int) -> list[Example]:
        """Return the same held-out examples for every seed."""
        return [asked(own) for own in islice(different("eval", held_out=True), count)]


def asked(own: Problem) -> Example:
    """Return the problem as a conversation, with the specification of its episode."""
    spec = {"question": own.question, "answer": own.answer}
    return Example([SYSTEM, {"role": "user", "content": own.question}], spec)


def different(kind: str, *, held_out: bool) -> Iterator[Problem]:
    """Yield problems of one kind, no two of which have the same question."""
    found = set()
    for index in count():
        own = problem(f"{kind} {index}", held_out=held_out)
        if own.question not in found:
            found.add(own.question)
            yield own


def transcript(own: Problem) -> list[dict[str, str]]:
    """Return an episode as a conversation: the problem, a call, its result and the answer."""
    environment, example = ProblemCalculator(), asked(own)
    environment.reset(example.ground_truth)
    call = f"{CALL}{own.calculation}"
    result = environment.step(call).text.removesuffix("\n")
    return [
        *example.prompt,
        {"role": "assistant", "content": call},
        {"role": ROLE, "content": result},
        {"role": "assistant", "content": str(own.answer)},
    ]


def problem(key: str, *, held_out: bool) -> Problem:
    """Return the problem for `key`, either a held-out problem or a training problem."""
    return first(_problem, Random(f"tool {key}"), held_out=held_out)


def _problem(rng: Random) -> Problem:
    name, *friends = rng.sample(NAMES, 3)
    words = {"name": name, "things": rng.choice(THINGS)}
    if rng.random() < 0.5:
        boxes, each = rng.randint(11, 49), rng.randint(11, 99)
        told, calculation = BOXES.format(m=boxes, n=each, **words), f"{boxes}*{each}"
    else:
        first = rng.randint(100, 999)
        told, calculation = ONE_PILE.format(n=first, **words), str(first)
    for friend in friends[: rng.randint(1, 2)]:
        most = calculate(calculation) - 1  # the largest number of things that may be lost
        gains = most < 11 or rng.random() < 0.5
        change = rng.randint(11, 999 if gains else most)
        kind = rng.choice(GAINS if gains else LOSSES)
        told += " " + kind.format(n=change, friend=friend, **words)
        calculation += f"{'+' if gains else '-'}{change}"
    return Problem(f"{told} {QUESTION.format(**words)}", calculation, calculate(calculation))
