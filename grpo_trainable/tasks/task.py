"""What a task is: prompts in a seeded, endless order, and a score for each response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, TypeAlias

from grpo_trainable.tasks.messages import Prompt

FLOAT32_MAX = 3.4028234663852886e38  # rewards become float32 tensors

JSONValue: TypeAlias = (
    bool | int | float | str | Sequence["JSONValue"] | Mapping[str, "JSONValue"] | None
)


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt, complete: the response follows its last character, or its last message."""

    prompt: Prompt  # text, or a list of messages that a chat template makes text of
    ground_truth: JSONValue


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    response: str
    ground_truth: JSONValue
    label: str | None = None  # label of the task that scores it, where a trial has several


@dataclass(frozen=True, slots=True)
class Score:
    reward: float  # what is trained on
    format_reward: float
    answer_reward: float
    verified: bool = True  # False: the answer could not be judged, and counts as wrong
    # What the response answers, in a form in which equal answers are equal texts, so that a vote
    # can be taken; None where it gives no answer, or where the task has none.
    answer: str | None = None
    # What `task.reward_weights` may name besides the format and the answer.
    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def all_parts(self) -> dict[str, float]:
        """Every part of the reward by its name."""
        return {"format": self.format_reward, "answer": self.answer_reward, **self.parts}


@dataclass(frozen=True, slots=True)
class RewardError:
    """A response that could not be scored, and why, in one line."""

    message: str


def as_score(result: Any) -> Score:
    """The score that a user's reward returned: a `Score`, a number, or a mapping with `reward`.

    Unless given, the format reward is 1, the answer reward is the reward, and there are neither an
    answer nor parts.

    Raises:
        TypeError, ValueError, OverflowError: it is anything else, or no finite float32.
    """
    verified = not isinstance(result, Score) or result.verified
    scores = asdict(result) if isinstance(result, Score) else result
    if not isinstance(scores, Mapping):
        scores = {"reward": scores}
    if "reward" not in scores:
        raise ValueError(f"returned a dict without reward: keys {sorted(map(str, scores))}")
    reward = _finite("reward", scores["reward"])
    return Score(
        reward=reward,
        format_reward=_finite("format_reward", scores.get("format_reward", 1.0)),
        answer_reward=_finite("answer_reward", scores.get("answer_reward", reward)),
        verified=verified,
        answer=_answer(scores.get("answer")),
        parts=_parts(scores.get("parts") or {}),
    )


def _parts(given: Any) -> dict[str, float]:
    if not isinstance(given, Mapping):
        raise TypeError(f"parts must be a dict of numbers, got {type(given).__name__}")
    return {str(name): _finite(f"part {name}", value) for name, value in given.items()}


def _finite(name: str, value: Any) -> float:
    # Not float() alone: it would take the text "1".
    if not hasattr(type(value), "__float__"):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    number = float(value)
    if not abs(number) <= FLOAT32_MAX:
        raise ValueError(f"{name} must be a finite float32, got {number}")
    return number


def _answer(value: Any) -> str | None:
    # Half a surrogate pair could not be written to a file.
    return None if value is None else str(value).encode("utf-8", "replace").decode()


class Task(Protocol):
    """What a task offers. Its class is called with its settings, if it has any, and the seed."""

    @property
    def stop(self) -> Sequence[str]:
        """Strings after which a response is complete, unless `rollout.stop` says others. A task of
        the user's may leave it out."""
        ...

    def train_example(self, prompt_index: int) -> Example:
        """Training example number `prompt_index`, from 0 on without end.

        A pure function of the task's seed and the index, so a resumed run needs only the index.
        """
        ...

    def eval_examples(self, count: int) -> list[Example]:
        """`count` held-out examples, the same at every call and for every seed."""
        ...

    def reward(self, response: str, ground_truth: JSONValue) -> Score: ...


def train_size(task: object) -> int | None:
    """How many training examples a task has before they come round again in another order, as its
    attribute of this name says; None where it does not say."""
    return getattr(task, "train_size", None)


def eval_size(task: object) -> int | None:
    """How many held-out examples a task has before they come round again, as its attribute of this
    name says; None where it has none or does not say."""
    return getattr(task, "eval_size", None)


def notes_of(task: object) -> Sequence[str]:
    """What a user may not have meant with the files of a task, a line each, as its method `notes`
    says; nothing where it has none."""
    notes = getattr(task, "notes", None)
    return () if notes is None else notes()
