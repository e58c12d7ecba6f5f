"""Tasks played in an environment. An example is a specification and the first observation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from grpo_trainable.config import TaskSettings
from grpo_trainable.environments import Environment
from grpo_trainable.environments.calculator import Calculator
from grpo_trainable.environments.guess import Guess
from grpo_trainable.tasks.order import permutation
from grpo_trainable.tasks.task import Example, JSONValue, Score, as_score


class _Game:
    """A task with all specifications of a game, in a different order in each pass.

    Evaluation uses the same specifications as training. So evaluation measures how well the policy
    plays the game, not whether the policy generalises to other specifications.
    """

    stop = ("\n",)
    specs: tuple[dict[str, Any], ...]
    environment: Callable[[], Environment]

    def __init__(self, settings: TaskSettings, seed: int) -> None:
        self._seed = seed

    @property
    def train_size(self) -> int:
        """Number of specifications."""
        return len(self.specs)

    eval_size = train_size

    def train_example(self, prompt_index: int) -> Example:
        """Return training example `prompt_index`. Each pass has a different order."""
        epoch, place = divmod(prompt_index, len(self.specs))
        order = permutation(f"train {self._seed}", epoch, len(self.specs))
        return self._example(self.specs[order[place]])

    def eval_examples(self, count: int) -> list[Example]:
        """Return `count` examples, in the same order for every seed."""
        order = permutation("eval", 0, len(self.specs))
        return [self._example(self.specs[order[i % len(order)]]) for i in range(count)]

    def _example(self, spec: dict[str, Any]) -> Example:
        return Example(self.environment().reset(spec), spec)

    def reward(self, response: str, ground_truth: JSONValue) -> Score:
        """Score a response that is the only action of an episode."""
        environment = self.environment()
        environment.reset(ground_truth)
        return as_score(environment.step(response).reward)


class GuessTask(_Game):
    """Task of guessing a secret digit."""

    specs = tuple({"secret": digit} for digit in range(10))
    environment = Guess


class CalculatorTask(_Game):
    """Task of multiplying two digits from 2 to 9."""

    specs = tuple(
        {"question": f"{a}*{b}", "answer": a * b} for a in range(2, 10) for b in range(2, 10)
    )
    environment = Calculator
