"""The interface of a task: an endless, seeded stream of prompts and a score for each response."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from grpo_trainable.environments.environment import finite_float32
from grpo_trainable.tasks.messages import Prompt

# Processes that score responses need not load numpy.
if TYPE_CHECKING:
    from grpo_trainable.protocol.rollout import Rubric

# Keys of `Score.usage`: requests sent to a judge, requests repeated, questions whose answer was
# already known, and tokens.
USAGE = ("calls", "retries", "cached", "prompt_tokens", "completion_tokens")

JSONValue: TypeAlias = (
    bool | int | float | str | Sequence["JSONValue"] | Mapping[str, "JSONValue"] | None
)


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt and its true answer. The response follows the prompt's last character or message."""

    prompt: Prompt  # text, or a list of messages for a chat template
    ground_truth: JSONValue
    # The prompt's row in the data, by column. Only a user's reward function reads it.
    columns: Mapping[str, JSONValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """A response to score, with its prompt's true answer and data."""

    response: str
    ground_truth: JSONValue
    label: str | None = None  # in a mix of tasks, the label of the task that scores the response
    example: int = 0  # index of the example; responses to the same example form a group
    prompt: Prompt = ""
    columns: Mapping[str, JSONValue] = field(default_factory=dict)  # see `Example`
    token_ids: Sequence[int] = ()  # tokens of the response
    rubrics: tuple[Rubric, ...] | None = None  # see `Request`


@dataclass(frozen=True, slots=True)
class Score:
    """The reward of one response, and the parts of this reward."""

    reward: float  # the number that training maximises
    format_reward: float | None  # None if the reward does not judge the format
    answer_reward: float
    verified: bool = True  # False: the answer could not be judged and counts as wrong
    # The answer in a canonical form: majority votes require the same form for equal answers. None
    # if the response gives no answer, or if the task has no answers.
    answer: str | None = None
    # Further parts that `task.reward_weights` may name, besides the format and the answer.
    parts: Mapping[str, float] = field(default_factory=dict)
    # Counts of a judge's calls and tokens. The keys are those of `USAGE`.
    usage: Mapping[str, int] = field(default_factory=dict, compare=False)
    # The new rubrics of the prompt. None: the rubrics do not change.
    rubrics: Sequence[Rubric] | None = field(default=None, compare=False)

    @property
    def all_parts(self) -> dict[str, float]:
        """Every part of the reward, keyed by name."""
        form = {} if self.format_reward is None else {"format": self.format_reward}
        return {**form, "answer": self.answer_reward, **self.parts}


@dataclass(frozen=True, slots=True)
class RewardError:
    """The reason why a response has no score, in one line."""

    message: str
    repeats: bool = False  # True: the function fails in the same way whenever it is called again
    is_failure: bool = True  # False: the function gave this response no reward on purpose
    usage: Mapping[str, int] = field(default_factory=dict, compare=False)  # see `Score`


def has_failed(answer: Score | RewardError) -> bool:
    """Return True if the score is missing because of a failure, and False if on purpose."""
    return isinstance(answer, RewardError) and answer.is_failure


def weighted(answer: Score | RewardError, weights: Mapping[str, float]) -> Score | RewardError:
    """Return the score with the weighted sum of its parts as the reward.

    Return an error if the score lacks a part that has a weight. Without weights, or if `answer` is
    an error already, return `answer` unchanged.

    Args:
        answer: The score of a response, or the reason why there is none.
        weights: Weight of each part (`task.reward_weights`).
    """
    if isinstance(answer, RewardError) or not weights:
        return answer
    there = answer.all_parts
    missing = [name for name in weights if name not in there]
    if not missing:
        total = math.fsum(weight * there[name] for name, weight in weights.items())
        return replace(answer, reward=total)
    why = f"task.reward_weights names {missing[0]}, but the parts of the reward are "
    why += ", ".join(there)
    if missing[0] == "format":
        why += "; a reward has the part format if it returns format_reward"
    return RewardError(why, repeats=True)


def as_score(result: Any) -> Score:
    """Convert the result of a user's reward function to a `Score`.

    A mapping needs only the key `reward`. By default, the answer reward equals the reward. The
    format reward and the answer are None by default, and there are no parts.

    Args:
        result: A `Score`, a number, or a mapping with the key `reward`.

    Raises:
        TypeError: If `result`, or one of its fields, has the wrong type.
        ValueError: If the key `reward` is missing, or if a number is not a finite float32.
        OverflowError: If a number is too large for a float.
    """
    verified = not isinstance(result, Score) or result.verified
    scores = asdict(result) if isinstance(result, Score) else result
    if not isinstance(scores, Mapping):
        scores = {"reward": scores}
    if "reward" not in scores:
        raise ValueError(
            f"returned a dict without the key reward; its keys: {sorted(map(str, scores))}"
        )
    reward = finite_float32("reward", scores["reward"])
    form = scores.get("format_reward")
    return Score(
        reward=reward,
        format_reward=None if form is None else finite_float32("format_reward", form),
        answer_reward=finite_float32("answer_reward", scores.get("answer_reward", reward)),
        verified=verified,
        answer=_answer(scores.get("answer")),
        parts=_parts(scores.get("parts") or {}),
        usage=result.usage if isinstance(result, Score) else {},
        rubrics=result.rubrics if isinstance(result, Score) else None,
    )


def _parts(given: Any) -> dict[str, float]:
    if not isinstance(given, Mapping):
        raise TypeError(f"parts must be a dict of numbers, got {type(given).__name__}")
    return {str(name): finite_float32(f"part {name}", value) for name, value in given.items()}


def _answer(value: Any) -> str | None:
    # Half a surrogate pair cannot be written to a file.
    return None if value is None else str(value).encode("utf-8", "replace").decode()


class Task(Protocol):
    """Interface of a task. The class is called with the task's settings, if any, and the seed."""

    @property
    def stop(self) -> Sequence[str]:
        """Strings that end a response, unless `rollout.stop` sets others.

        A user's task may omit this attribute.
        """
        ...

    def train_example(self, prompt_index: int) -> Example:
        """Return example `prompt_index`, counted from 0, of the endless training stream.

        The example depends only on the task's seed and the index, so a resumed run needs only the
        index.
        """
        ...

    def eval_examples(self, count: int) -> list[Example]:
        """Return the same `count` held-out examples for every call and every seed."""
        ...

    def reward(self, response: str, ground_truth: JSONValue) -> Score:
        """Score a response."""
        ...


def train_size(task: object) -> int | None:
    """Return the number of training examples in one pass, or None if the task does not state it.

    The next pass repeats these examples in a different order. A task states the number in its
    attribute `train_size`.
    """
    return getattr(task, "train_size", None)


def eval_size(task: object) -> int | None:
    """Return the number of held-out examples before they repeat, or None if it is not stated.

    A task states the number in its attribute `eval_size`.
    """
    return getattr(task, "eval_size", None)


def sources_of(task: object) -> tuple[str, str] | None:
    """Return the sources of the training and held-out examples, or None if the task states none.

    A task describes the sources for the user in its attribute `sources`.
    """
    return getattr(task, "sources", None)


def notes_of(task: object) -> Sequence[str]:
    """Return one line for each likely mistake in the settings or files of a task.

    The lines come from the task's optional method `notes`.
    """
    notes = getattr(task, "notes", None)
    return () if notes is None else notes()
