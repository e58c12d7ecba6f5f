"""Where prompts come from and how responses are scored."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from grpo_trainable.config.built_in_tasks import (
    MIX,
    TASK_SETTINGS,
    KeywordSettings,
    MathSettings,
    MixSettings,
    ReasoningGymSettings,
    settled_equality,
)
from grpo_trainable.config.conditions import (
    CONTROL,
    NOT_PLAYED,
    OF_TEXT,
    Condition,
    Config,
    Conflict,
    given,
    positive,
)
from grpo_trainable.config.foreign_names import trl, verl
from grpo_trainable.config.mix import Entry, mix_of
from grpo_trainable.config.values import (
    Settings,
    checks_of,
    choice_or_reference,
    flag,
    integer,
    number,
    reference,
    text,
)
from grpo_trainable.plugins import is_reference

MAX_WEIGHT = 1e6  # largest weight of a part of the reward
PARTS = ("format", "answer")  # of every reward


def scored_apart(reward: str | None, name: str, equality: str, mix: str | None) -> bool:
    """Check whether a task with these settings scores any responses in processes of their own."""
    verified = name == "reasoning_gym" or (name == "math" and equality == "math_verify")
    mixed = any(_entry_scored_apart(entry) for entry in mix_of(mix).values())
    return reward is not None or is_reference(name) or verified or mixed


def _entry_scored_apart(entry: Entry) -> bool:
    files = entry.get("train_file"), entry.get("eval_file")
    equality = settled_equality(entry.get("equality", "auto"), *files)
    return scored_apart(entry.get("reward"), entry["name"], equality, None)


SCORED_APART = Condition(
    keys=("task.reward", "task.name", "task.equality", "task.mix"),
    needs="task.reward, a task of your own, task.name=reasoning_gym or task.equality=math_verify",
    holds=scored_apart,
)
# An environment of text has processes of its own, as what is scored apart has.
PROCESSES_OF_ITS_OWN = Condition(
    keys=("env.name", *SCORED_APART.keys),
    needs=f"env.name, {SCORED_APART.needs}",
    holds=lambda name, *scoring: name != "off" or scored_apart(*scoring),
)
# All of these may fail, and so may an environment of control.
_MAY_FAIL = Condition(
    keys=PROCESSES_OF_ITS_OWN.keys,
    needs=f"env.name, task.name={CONTROL}, {SCORED_APART.needs}",
    holds=lambda *settings: settings[2] == CONTROL or PROCESSES_OF_ITS_OWN.holds(*settings),
)


def _has_files(train_file: str | None, eval_file: str | None, mix: str | None) -> bool:
    entries = mix_of(mix).values()
    in_mix = any(entry.keys() & {"train_file", "eval_file"} for entry in entries)
    return train_file is not None or eval_file is not None or in_mix


_HAS_FILES_OR_MAY_FAIL = Condition(
    keys=("task.train_file", "task.eval_file", *_MAY_FAIL.keys),
    needs=f"task.train_file, task.eval_file, {_MAY_FAIL.needs}",
    holds=lambda train_file, eval_file, *failing: (
        _MAY_FAIL.holds(*failing) or _has_files(train_file, eval_file, failing[-1])
    ),
)


def _are_weights(text: str) -> bool:
    try:
        weights = json.loads(text)
    except (ValueError, RecursionError):
        return False
    if not isinstance(weights, dict) or not weights:
        return False
    # True is a number to Python; NaN and infinity are to JSON.
    return all(type(w) in (int, float) and abs(w) <= MAX_WEIGHT for w in weights.values())


@dataclass(frozen=True, kw_only=True)
class CommonTaskSettings(Settings):
    """The settings that every task has."""

    SECTION: ClassVar[str] = "task"

    name: str = choice_or_reference(
        tuple(TASK_SETTINGS), "The task, which makes prompts and scores responses.", what="Class"
    )
    reward: str | None = reference(
        None,
        "A function f(response, ground_truth) that scores a response in place of the task.",
        what="function",
        read_if=(NOT_PLAYED, OF_TEXT),
        also_called=(
            trl("reward_funcs", "my_rewards.py:score"),
            verl("custom_reward_function.path", "my_rewards.py:score"),
        ),
    )
    reward_deadline_s: float = number(
        10.0,
        "Seconds that scoring one response may take, where that has processes of its own.",
        above=0,
        read_if=(SCORED_APART, NOT_PLAYED),
    )
    max_error_rate: float = number(
        0.1,
        "The largest share of failed rewards; a trial with more of them ends.",
        minimum=0,
        maximum=1,
        read_if=_MAY_FAIL,
    )
    reward_weights: str | None = text(
        None,
        "Parts of the reward and their weights as JSON: their weighted sum is what is trained on; "
        "every reward has the parts format and answer; none: the reward itself.",
        expected='a JSON object of numbers, such as {"answer": 1, "format": 0.5}',
        valid=_are_weights,
    )
    normalize_parts: bool = flag(
        False,
        "Whether each part is normalised within its group, as by group_std, before it is weighted.",
        read_if=given("task.reward_weights"),
        of_training=True,
    )
    length_penalty: float = number(
        0.0,
        "α: what each token that a response is longer or shorter than length_target takes off its "
        "reward.",
        minimum=0,
        of_training=True,
    )
    length_target: int | None = integer(
        None,
        "The tokens that a response should have.",
        minimum=1,
        read_if=positive("task.length_penalty"),
        of_training=True,
    )
    strict: bool = flag(
        False,
        "Whether the first failed reward ends the trial, and a malformed line of a prompt file is "
        "an error.",
        read_if=_HAS_FILES_OR_MAY_FAIL,
    )


@dataclass(frozen=True, kw_only=True)
class TaskSettings(
    MixSettings, ReasoningGymSettings, MathSettings, KeywordSettings, CommonTaskSettings
):
    """Where prompts come from and how responses are scored. A task of your own adds the settings
    that it declares."""

    # What is given for the settings that a user's task declares: (name, value). The task's class
    # says which there are and what they accept, and only a process that runs the task loads it.
    own: tuple[tuple[str, Any], ...] = ()

    @property
    def part_weights(self) -> dict[str, float]:
        """Part of the reward -> its weight; empty where the reward itself is trained on."""
        weights = json.loads(self.reward_weights or "{}")
        return {part: float(weight) for part, weight in weights.items()}

    @property
    def is_custom(self) -> bool:
        """Whether the task is a user's class."""
        return is_reference(self.name)

    @property
    def has_custom_reward(self) -> bool:
        """Whether code of the user's scores responses: a function, or a task's."""
        mixed = mix_of(self.mix).values()
        return (
            self.reward is not None
            or self.is_custom
            or any("reward" in entry or is_reference(entry["name"]) for entry in mixed)
        )

    @property
    def is_scored_apart(self) -> bool:
        """Whether the task, or what stands in for its reward, scores in processes of its own, since
        that may take long."""
        return scored_apart(self.reward, self.name, self.equality, self.mix)

    def to_dict(self) -> dict[str, Any]:
        """The settings that the task has; those of other tasks are left out."""
        settings = super().to_dict()
        own = dict(settings.pop("own"))
        of_task = {} if self.is_custom else checks_of(TASK_SETTINGS[self.name])
        keys = {**checks_of(CommonTaskSettings), **of_task}
        return {key: settings[key] for key in settings if key in keys} | own


def conflicts(config: Config) -> Iterator[Conflict]:
    """Yield what contradicts each other."""
    task = config.task
    # A generator that waits for a score must not pass for one that hangs itself.
    enough_s = 2 * task.reward_deadline_s

    yield (
        task.length_penalty > 0 and task.length_target is None,
        "task.length_target",
        f"task.length_penalty={task.length_penalty:g} needs the number of tokens to aim at",
    )
    yield (
        (task.length_target or 0) > config.rollout.max_new_tokens,
        "task.length_target",
        f"must be <= rollout.max_new_tokens={config.rollout.max_new_tokens}, which no response is "
        "longer than",
    )
    yield (
        not task.has_custom_reward
        and not config.env.plays
        and not set(task.part_weights) <= set(PARTS)
        and task.name != MIX,  # whose tasks are asked one by one
        "task.reward_weights",
        f"the reward of task.name={task.name} has the parts {' and '.join(PARTS)}",
    )
    yield (
        task.name == "reasoning_gym" and task.dataset is None,
        "task.dataset",
        "task.name=reasoning_gym needs the name of a data set, such as chain_sum",
    )
    yield (
        task.is_scored_apart and not config.env.plays and enough_s > config.resources.deadline_s,
        "resources.deadline_s",
        f"must be >= {enough_s:g}, twice task.reward_deadline_s={task.reward_deadline_s:g}",
    )
