"""Grade-school word problems as a user-defined task: `task.name=grade_school.py:GradeSchool`.

In some problems, somebody has some things and gets more or gives some away. In others, somebody has
boxes of things. Each problem is a conversation that begins with a solved example. The calculation
alone decides whether a problem is held out. An evaluation therefore asks only for calculations that
never occur in training, whatever the names in the problem. The problems are under this repository's
licence.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count, cycle, islice
from random import Random

from grpo_trainable.tasks import Example, Score
from grpo_trainable.tasks.answers import BOXED
from grpo_trainable.tasks.equality import decide_exactly, equal

LARGEST = 30  # largest number in a problem, given or calculated
HELD_OUT_SHARE = 0.2
EVAL_PROBLEMS = 512

NAMES = ("Tom", "Ann", "Sam", "Lucy", "Ben", "Mia", "Leo", "Eva", "Max", "Nina")
THINGS = ("apples", "books", "coins", "marbles", "stickers", "pencils", "cards", "shells")
ONE_PILE = "{name} has {n} {things}."
BOXES = "{name} has {m} boxes with {n} {things} in each."
GAINS = ("{friend} gives {name} {n} more.", "{name} finds {n} more.", "{name} buys {n} more.")
LOSSES = ("{name} gives {n} of them to {friend}.", "{name} loses {n} of them.", "{name} sells {n}.")
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
QUESTION = "How many {things} does {name} have now?"

# After seeing this example, a model mostly answers in the same form, with few tokens.
EXAMPLE = (
    {"role": "system", "content": "Calculate."},
    {
        "role": "user",
        "content": "Kim has 8 plums and finds 5 more. How many plums does Kim have now?",
    },
    {"role": "assistant", "content": r"8 + 5 = 13. \boxed{13}"},
)


@dataclass(frozen=True, slots=True)
class Problem:
    question: str
    calculation: str  # such as 3 * 4
    answer: int

    @property
    def is_held_out(self) -> bool:
        digest = hashlib.sha256(self.calculation.encode()).digest()
        return int.from_bytes(digest[:6], "big") / 2**48 < HELD_OUT_SHARE


class GradeSchool:
    """A task with one prompt per problem, and reward 1 for the right number in a LaTeX box."""

    eval_size = EVAL_PROBLEMS

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def train_example(self, prompt_index: int) -> Example:
        return asked(problem(f"train {self._seed} {prompt_index}", held_out=False))

    def eval_examples(self, count: int) -> list[Example]:
        """Return the same held-out examples for every seed.

        The examples repeat after the first `eval_size`.
        """
        once = [asked(own) for own in held_out(min(count, EVAL_PROBLEMS))]
        return list(islice(cycle(once), count))

    def reward(self, response: str, ground_truth: object) -> Score:
        truth = str(ground_truth)
        return BOXED.judged(
            response, lambda answer: float(equal(answer, truth, decide_exactly)), truth=truth
        )


def asked(own: Problem) -> Example:
    return Example([*EXAMPLE, {"role": "user", "content": own.question}], own.answer)


def held_out(number: int) -> list[Problem]:
    """Return `number` held-out problems, no two of which have the same question.

    A smaller `number` gives the first problems of the same list.
    """
    found: dict[str, Problem] = {}
    for index in count():
        if len(found) == number:
            break
        own = problem(f"eval {index}", held_out=True)
        found.setdefault(own.question, own)
    return list(found.values())


def problem(key: str, *, held_out: bool) -> Problem:
    """Return the problem for `key`, either a held-out problem or a training problem."""
    return first(_problem, Random(f"grade school {key}"), held_out=held_out)


def first(draw: Callable[[Random], Problem], rng: Random, *, held_out: bool) -> Problem:
    """Draw problems, and return the first one whose `is_held_out` equals `held_out`."""
    while True:
        own = draw(rng)
        if own.is_held_out == held_out:
            return own


def _problem(rng: Random) -> Problem:
    name, friend = rng.sample(NAMES, 2)
    words = {"name": name, "friend": friend, "things": rng.choice(THINGS)}
    sign = rng.choice("+-*")
    if sign == "*":
        left = rng.randint(2, LARGEST // 2)
        right = rng.randint(2, LARGEST // left)
        told = BOXES.format(m=left, n=right, **words)
    else:
        left = rng.randint(2, LARGEST - 2) if sign == "+" else rng.randint(3, LARGEST)
        right = rng.randint(2, LARGEST - left) if sign == "+" else rng.randint(2, left - 1)
        change = rng.choice(GAINS if sign == "+" else LOSSES).format(n=right, **words)
        told = f"{ONE_PILE.format(n=left, **words)} {change}"
    answer = OPERATIONS[sign](left, right)
    return Problem(f"{told} {QUESTION.format(**words)}", f"{left} {sign} {right}", answer)
