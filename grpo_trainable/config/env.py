"""The `env` section: episodes of several turns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from grpo_trainable.config.built_in_tasks import GAMES
from grpo_trainable.config.conditions import CHAT, OF_TEXT, Condition, Config, Conflict, one_of
from grpo_trainable.config.defaults import by_task
from grpo_trainable.config.engine_catalog import engine_record
from grpo_trainable.config.values import (
    Settings,
    choice,
    choice_or_reference,
    flag,
    integer,
    number,
)

_PLAYED = Condition(
    keys=("env.name",), needs="an env.name other than off", holds=lambda name: name != "off"
)


@dataclass(frozen=True, kw_only=True)
class EnvSettings(Settings):
    """Episodes of several turns, in which an environment answers the policy."""

    SECTION: ClassVar[str] = "env"

    name: str = choice_or_reference(
        ("off", "guess", "calculator", "python"),
        "Environment that answers the policy and rewards the episode in place of the task: a "
        "number to guess (guess), a calculator (calculator), a Python interpreter (python), or "
        "your own Class.",
        what="Class",
        read_if=OF_TEXT,
        default_by=by_task(guess="guess", calculator="calculator"),
    )
    role: str = choice(
        ("user", "tool"),
        "Role of the messages in which a chat template puts the environment's answers.",
        read_if=(_PLAYED, CHAT),
    )
    allow_unsafe: bool = flag(
        False,
        "Run the policy's code without containment. The code can then read, change and delete your "
        "files and end your processes.",
        read_if=one_of("env.name", "python"),
    )
    max_turns: int = integer(
        8,
        "Maximum number of actions in an episode. Longer episodes are cut off.",
        minimum=1,
        read_if=_PLAYED,
    )
    discount: float = number(
        1.0,
        "Discount factor. The reward of an action is multiplied by this factor once for each "
        "earlier action of the episode.",
        above=0,
        maximum=1,
        read_if=_PLAYED,
    )
    step_deadline_s: float = number(
        10.0,
        "Maximum number of seconds that an environment may take to begin an episode or to answer.",
        above=0,
        read_if=_PLAYED,
    )
    episode_deadline_s: float = number(
        60.0,
        "Maximum number of seconds that an environment may take in total in one episode.",
        above=0,
        read_if=_PLAYED,
    )
    patience_s: float = number(
        1.0,
        "Maximum total time, in seconds, that a call to a generator waits for slow environments "
        "while other episodes of the call could continue. A call that stays below this limit "
        "gives the same episodes, bit for bit, when it is repeated.",
        minimum=0,
        read_if=_PLAYED,
    )

    @property
    def plays(self) -> bool:
        """Return True if responses are episodes."""
        return self.name != "off"


def conflicts(config: Config) -> Iterator[Conflict]:
    """Yield conflicts between an environment and other settings."""
    env, enough_s = config.env, 2 * config.env.step_deadline_s
    can_play = config.engine == "auto" or engine_record(config.engine).plays

    yield (
        config.task.name in GAMES and env.name != config.task.name,
        "env.name",
        f"must be {config.task.name} with task.name={config.task.name}, whose prompts need that "
        "environment",
    )
    yield (
        env.plays and not can_play,
        "engine",
        f"cannot add the answers of an environment to a response; env.name={env.name} needs "
        "engine=torch, hf or vllm",
    )
    yield (
        env.plays and config.loss.advantage == "vine",
        "loss.advantage",
        f"must not be vine with env.name={env.name}: completions would have to start in the "
        "middle of an episode",
    )
    yield (
        env.plays and config.rollout.overlong == "interrupt",
        "rollout.overlong",
        f"must not be interrupt with env.name={env.name}: only the environment may add text to an "
        "episode",
    )
    yield (
        env.plays and enough_s > config.resources.deadline_s,
        "resources.deadline_s",
        f"must be >= {enough_s:g}, twice env.step_deadline_s={env.step_deadline_s:g}",
    )
