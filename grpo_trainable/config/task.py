"""The `task` section: the prompts, and the scoring of responses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from grpo_trainable.config.built_in_tasks import (
    MIX,
    TASK_SETTINGS,
    CodeSettings,
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
    json_object,
    number,
    rewards,
)
from grpo_trainable.plugins import is_reference

MAX_WEIGHT = 1e6  # largest weight of a part of the reward
CODE_DEADLINE_S = 6  # the sandbox needs 3 s to end a program that only sleeps
PARTS = ("format", "answer")  # the parts of the reward in built-in tasks with text


def scored_apart(reward: str | None, name: str, equality: str, mix: str | None) -> bool:
    """Return True if a task with these settings scores any responses in separate processes."""
    tested = name in ("reasoning_gym", "code")
    verified = tested or (name == "math" and equality == "math_verify")
    mixed = any(_entry_scored_apart(entry) for entry in mix_of(mix).values())
    return reward is not None or is_reference(name) or verified or mixed


def _entry_scored_apart(entry: Entry) -> bool:
    files = entry.get("train_file"), entry.get("eval_file")
    equality = settled_equality(entry.get("equality", "auto"), *files)
    return scored_apart(entry.get("reward"), entry["name"], equality, None)


SCORED_APART = Condition(
    keys=("task.reward", "task.name", "task.equality", "task.mix"),
    needs="task.reward, a task of your own, task.name=reasoning_gym or code, or "
    "task.equality=math_verify",
    holds=scored_apart,
)
# Environments of tasks with text (`env.name`) also run in separate processes.
PROCESSES_OF_ITS_OWN = Condition(
    keys=("env.name", *SCORED_APART.keys),
    needs=f"an env.name other than off, {SCORED_APART.needs}",
    holds=lambda name, *scoring: name != "off" or scored_apart(*scoring),
)
# Computing a reward may fail in any of these processes, and in the environment of a control task.
_MAY_FAIL = Condition(
    keys=PROCESSES_OF_ITS_OWN.keys,
    needs=f"an env.name other than off, task.name={CONTROL}, {SCORED_APART.needs}",
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


def _are_weights(weights: dict[str, Any]) -> bool:
    # Python counts True as a number, and its JSON parser accepts NaN and infinity.
    return bool(weights) and all(
        type(w) in (int, float) and abs(w) <= MAX_WEIGHT for w in weights.values()
    )


@dataclass(frozen=True, kw_only=True)
class CommonTaskSettings(Settings):
    """Settings that all tasks have."""

    SECTION: ClassVar[str] = "task"

    name: str = choice_or_reference(
        tuple(TASK_SETTINGS), "Task that makes prompts and scores responses.", what="Class"
    )
    reward: str | None = rewards(
        "Reward that scores responses in place of the task: a function f(response, ground_truth), "
        "a function with the signature of TRL or verl, a list of functions, model:DIRECTORY for a "
        "reward model (docs/howto/reward.md), or judge:FILE for a language model that judges "
        "responses (docs/howto/judge.md). A JSON list of rewards gives their sum.",
        read_if=(NOT_PLAYED, OF_TEXT),
        also_called=(
            trl(
                "reward_funcs",
                "such as my_rewards.py:score, a function or a list of functions; a reward model is "
                "model:DIRECTORY",
            ),
            verl("custom_reward_function.path", "such as my_rewards.py:compute_score"),
            verl("custom_reward_function.name", "the part after the colon"),
            verl("reward_model.enable", "a reward model is model:DIRECTORY"),
            verl("reward_model.model.path", "such as model:DIRECTORY"),
        ),
    )
    reward_deadline_s: float = number(
        10.0,
        "Maximum number of seconds for scoring one response in a separate process. A function that "
        "scores all responses to a prompt in one call has this much time for each response. With "
        "task.name=code, a program may use a third of this time as CPU time.",
        above=0,
        read_if=(NOT_PLAYED, SCORED_APART),
    )
    max_error_rate: float = number(
        0.1,
        "Largest allowed share of failed rewards. A trial that exceeds this share ends.",
        minimum=0,
        maximum=1,
        read_if=_MAY_FAIL,
    )
    reward_weights: str | None = json_object(
        None,
        "Weights of the parts of the reward, as JSON. The reward is the weighted sum of the parts. "
        "Built-in rewards have the parts `format` and `answer`, your own reward has the parts that "
        "it returns, a list of rewards has one part for each reward, and a judge has one part for "
        "each criterion. `none` uses the reward that the task or function returns.",
        expected='a JSON object of numbers, such as {"answer": 1, "format": 0.5}',
        valid=_are_weights,
    )
    normalize_parts: bool = flag(
        False,
        "Normalise each part of the reward within its group, as loss.advantage=group_std does, "
        "before the parts are weighted.",
        read_if=given("task.reward_weights"),
        of_training=True,
    )
    length_penalty: float = number(
        0.0,
        "α, the penalty for each token by which the length of a response differs from "
        "length_target.",
        minimum=0,
        of_training=True,
    )
    length_target: int | None = integer(
        None,
        "Number of tokens that a response should have.",
        minimum=1,
        read_if=positive("task.length_penalty"),
        of_training=True,
    )
    strict: bool = flag(
        False,
        "End the trial at the first failed reward, and treat a malformed row of a prompt file as "
        "an error.",
        read_if=_HAS_FILES_OR_MAY_FAIL,
    )


@dataclass(frozen=True, kw_only=True)
class TaskSettings(
    MixSettings,
    CodeSettings,
    ReasoningGymSettings,
    MathSettings,
    KeywordSettings,
    CommonTaskSettings,
):
    """Prompts, and the scoring of responses.

    Your own task adds the settings that it declares.
    """

    # (name, value) pairs for the settings that a user's task declares. They are not checked here,
    # because only a process that runs the task loads the class that declares them.
    own: tuple[tuple[str, Any], ...] = ()

    @property
    def part_weights(self) -> dict[str, float]:
        """Weight of each part of the reward; empty if training uses the reward itself."""
        weights = json.loads(self.reward_weights or "{}")
        return {part: float(weight) for part, weight in weights.items()}

    @property
    def is_custom(self) -> bool:
        """Return True if the task is a user's class."""
        return is_reference(self.name)

    def declares(self, key: str) -> bool:
        """Return True if the task is a user's class that declares the setting `task.NAME`."""
        return self.is_custom and key in {f"task.{name}" for name, _ in self.own}

    @property
    def has_custom_reward(self) -> bool:
        """Return True if user code scores responses: a reward function or a user's task."""
        mixed = mix_of(self.mix).values()
        return (
            self.reward is not None
            or self.is_custom
            or any("reward" in entry or is_reference(entry["name"]) for entry in mixed)
        )

    @property
    def is_scored_apart(self) -> bool:
        """Return True if scoring may be slow and therefore runs in separate processes."""
        return scored_apart(self.reward, self.name, self.equality, self.mix)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings of this task, without the settings of other tasks."""
        settings = super().to_dict()
        own = dict(settings.pop("own"))
        of_task = {} if self.is_custom else checks_of(TASK_SETTINGS[self.name])
        keys = {**checks_of(CommonTaskSettings), **of_task}
        return {key: settings[key] for key in settings if key in keys} | own


def conflicts(config: Config) -> Iterator[Conflict]:
    """Yield conflicts between the task and other settings."""
    task = config.task
    # A generator that waits for a score must not be mistaken for a generator that hangs.
    enough_s = 2 * task.reward_deadline_s
    parts = ("answer",) if task.name == CONTROL else PARTS
    unknown = set(task.part_weights) - set(parts)

    yield (
        task.length_penalty > 0 and task.length_target is None,
        "task.length_target",
        f"task.length_penalty={task.length_penalty:g} needs a target length in tokens",
    )
    yield (
        (task.length_target or 0) > config.rollout.max_new_tokens,
        "task.length_target",
        f"must be <= rollout.max_new_tokens={config.rollout.max_new_tokens}, the maximum length "
        "of a response",
    )
    yield (
        not task.has_custom_reward
        and not config.env.plays
        and bool(unknown)
        and task.name != MIX,  # each task of a mix is checked separately
        "task.reward_weights",
        f"the reward of task.name={task.name} has no part {min(unknown, default='')}; "
        f"valid: {', '.join(parts)}",
    )
    yield (
        task.name == "reasoning_gym" and task.dataset is None,
        "task.dataset",
        "task.name=reasoning_gym needs the name of a data set, such as chain_sum",
    )
    yield (
        task.name == "code" and task.train_file is None,
        "task.train_file",
        "task.name=code needs a file of problems in the layout of HumanEval or MBPP "
        "(docs/howto/code.md)",
    )
    yield (
        task.name == "code"
        and task.code_in == "completion"
        and config.model.chat_template != "off",
        "task.code_in",
        f"must be block with model.chat_template={config.model.chat_template}: a chat model "
        "answers a prompt instead of continuing it",
    )
    yield (
        task.name == "code" and task.reward is None and task.reward_deadline_s < CODE_DEADLINE_S,
        "task.reward_deadline_s",
        f"must be >= {CODE_DEADLINE_S} with task.name=code, because the sandbox takes 3 s to end a "
        "program that sleeps",
    )
    yield (
        task.is_scored_apart and not config.env.plays and enough_s > config.resources.deadline_s,
        "resources.deadline_s",
        f"must be >= {enough_s:g}, twice task.reward_deadline_s={task.reward_deadline_s:g}",
    )
