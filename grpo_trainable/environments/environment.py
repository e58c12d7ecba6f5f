"""What an environment is: a specification begins an episode, each action is answered by a turn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

JSONValue: TypeAlias = (
    bool | int | float | str | Sequence["JSONValue"] | Mapping[str, "JSONValue"] | None
)

# Characters of an observation. No context holds as many tokens; more of them are a mistake.
MOST_CHARACTERS = 1_000_000


@dataclass(frozen=True, slots=True)
class Turn:
    """What an action led to."""

    text: str = ""  # what the policy reads before it acts again; nothing reads that of the last one
    reward: float = 0.0  # reward of this action; an episode's is the sum
    done: bool = False  # whether the episode is over
    info: Mapping[str, float] = field(default_factory=dict)  # added up over an episode, as parts


class Environment(Protocol):
    """One episode after the other. Its class is called without arguments, in a process that may be
    killed; several of them live in one process and play in turn."""

    def reset(self, spec: JSONValue) -> str:
        """Begins the episode that `spec` describes in full, and says what the policy reads first.

        Called with one specification it begins equal episodes, in any process.
        """
        ...

    def step(self, action: str) -> Turn:
        """What the text that the policy wrote leads to."""
        ...

    def close(self) -> None:
        """Lets go of what the environment holds; no call follows."""
        ...


def fields_of(spec: JSONValue, *names: str) -> list[Any]:
    """Return these fields of a specification.

    Raises:
        ValueError: it lacks one of them.
    """
    if not isinstance(spec, Mapping) or any(name not in spec for name in names):
        raise ValueError(f"needs a ground truth with {' and '.join(names)}")
    return [spec[name] for name in names]


def as_text(value: Any) -> str:
    """What an environment said.

    Raises:
        TypeError, ValueError: it is no text, or too long.
    """
    if not isinstance(value, str):
        raise TypeError(f"must say text, got {type(value).__name__}")
    if len(value) > MOST_CHARACTERS:
        raise ValueError(f"said {len(value):,} characters, valid: at most {MOST_CHARACTERS:,}")
    # Half a surrogate pair could neither be encoded nor written to a file.
    return value.encode("utf-8", "replace").decode()


def as_turn(value: Any) -> Turn:
    """What an environment's step returned: a `Turn`, checked.

    Raises:
        TypeError, ValueError: it is anything else, or a field of it is.
    """
    if not isinstance(value, Turn):
        raise TypeError(f"step must return a Turn, got {type(value).__name__}")
    if not isinstance(value.done, bool):
        raise TypeError(f"done must be True or False, got {type(value.done).__name__}")
    if not isinstance(value.info, Mapping):
        raise TypeError(f"info must be a dict of numbers, got {type(value.info).__name__}")
    return Turn(
        text=as_text(value.text),
        reward=_finite("reward", value.reward),
        done=value.done,
        info={str(name): _finite(f"info {name}", number) for name, number in value.info.items()},
    )


def _finite(name: str, value: Any) -> float:
    # Not float() alone: it would take the text "1".
    if not hasattr(type(value), "__float__"):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {number}")
    return number
