"""What a task is: prompts in a seeded, endless order, and a score for each response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

JSONValue: TypeAlias = (
    bool | int | float | str | Sequence["JSONValue"] | Mapping[str, "JSONValue"] | None
)


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt, complete: the response follows its last character."""

    prompt: str
    ground_truth: JSONValue


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    response: str
    ground_truth: JSONValue


@dataclass(frozen=True, slots=True)
class Score:
    reward: float  # what is trained on
    format_reward: float
    answer_reward: float


@dataclass(frozen=True, slots=True)
class RewardError:
    """A response that could not be scored, and why, in one line."""

    message: str


class Task(Protocol):
    def train_example(self, cursor: int) -> Example:
        """The `cursor`-th training example, 0 and up without end.

        A pure function of the task's seed and `cursor`, so a resumed run needs only the cursor.
        """
        ...

    def eval_examples(self, count: int) -> list[Example]:
        """`count` held-out examples, the same at every call and for every seed."""
        ...

    def reward(self, response: str, ground_truth: JSONValue) -> Score: ...
