"""Episodes of several turns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from grpo_trainable.config.built_in_tasks import GAMES
from grpo_trainable.config.conditions import OF_TEXT, Condition, Config, Conflict, one_of
from grpo_trainable.config.defaults import by_task
from grpo_trainable.config.engine_catalog import engine_record
from grpo_trainable.config.values import Settings, choice_or_reference, flag, integer, number

_PLAYED = Condition(
    keys=("env.name",), needs="an env.name other than off", holds=lambda name: name != "off"
)


@dataclass(frozen=True, kw_only=True)
class EnvSettings(Settings):
    """Episodes of several turns: what the policy writes is answered by an environment."""

    SECTION: ClassVar[str] = "env"

    name: str = choice_or_reference(
        ("off", "guess", "calculator", "python"),
        "The environment in which responses are played, and which rewards them in place of the "
        "task: a number to guess, a calculator, a Python interpreter, or a Class of yours.",
        what="Class",
        read_if=OF_TEXT,
        default_by=by_task(guess="guess", calculator="calculator"),
    )
    allow_unsafe: bool = flag(
        False,
        "Whether code that the policy writes runs uncontained: it can then read, change and delete "
        "your files and end your processes.",
        read_if=one_of("env.name", "python"),
    )
    max_turns: int = integer(
        8, "Actions of an episode after which it is cut off.", minimum=1, read_if=_PLAYED
    )
    discount: float = number(
        1.0,
        "What the reward of an action counts for each action before it.",
        above=0,
        maximum=1,
        read_if=_PLAYED,
    )
    step_deadline_s: float = number(
        10.0,
        "Seconds that an environment may take to begin or to answer.",
        above=0,
        read_if=_PLAYED,
    )
    episode_deadline_s: float = number(
        60.0,
        "Seconds that an environment may take for an episode in all.",
        above=0,
        read_if=_PLAYED,
    )
    patience_s: float = number(
        1.0,
        "Seconds that a call of a generator waits in all for environments while others of its "
        "episodes could go on; a call that waits no longer repeats bit by bit.",
        minimum=0,
        read_if=_PLAYED,
    )

    @property
    def plays(self) -> bool:
        """Whether responses are episodes."""
        return self.name != "off"


def conflicts(config: Config) -> Iterator[Conflict]:
    """Yield what contradicts each other."""
    env, enough_s = config.env, 2 * config.env.step_deadline_s
    can_play = config.engine == "auto" or engine_record(config.engine).plays

    yield (
        config.task.name in GAMES and env.name != config.task.name,
        "env.name",
        f"must be {config.task.name} with task.name={config.task.name}, which only that plays",
    )
    yield (
        env.plays and not can_play,
        "engine",
        f"cannot extend a response by what an environment says; env.name={env.name} needs "
        "engine=torch",
    )
    yield (
        env.plays and config.loss.advantage == "vine",
        "loss.advantage",
        f"must not be vine with env.name={env.name}: completions would need an environment in the "
        "middle of its episode",
    )
    yield (
        env.plays and config.rollout.overlong == "interrupt",
        "rollout.overlong",
        f"must not be interrupt with env.name={env.name}: an episode is answered by its "
        "environment alone",
    )
    yield (
        env.plays and enough_s > config.resources.deadline_s,
        "resources.deadline_s",
        f"must be >= {enough_s:g}, twice env.step_deadline_s={env.step_deadline_s:g}",
    )
