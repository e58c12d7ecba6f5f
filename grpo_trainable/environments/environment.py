"""The interface of an environment: it starts an episode and answers one action per turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

JSONValue: TypeAlias = (
    bool | int | float | str | Sequence["JSONValue"] | Mapping[str, "JSONValue"] | None
)

FLOAT32_MAX = 3.4028234663852886e38  # rewards become float32 tensors
# Maximum length of an observation. Longer text would not fit into any context, so it is a mistake.
MOST_CHARACTERS = 1_000_000


@dataclass(frozen=True, slots=True)
class Turn:
    """Answer of the environment to an action."""

    text: str = ""  # observation that the next action responds to; ignored after the last action
    reward: float = 0.0  # reward of this action; an episode earns the sum
    done: bool = False  # True at the end of the episode
    info: Mapping[str, float] = field(default_factory=dict)  # reward parts, summed over an episode


class Environment(Protocol):
    """Interface of an environment, which plays one episode after another.

    The class of an environment is called without arguments, in a process that may be killed.
    Several environments share a process and play in turn.
    """

    def reset(self, spec: JSONValue) -> str:
        """Begin the episode that `spec` fully describes, and return the first observation.

        The same specification begins the same episode in any process.
        """
        ...

    def step(self, action: str) -> Turn:
        """Respond to the text that the policy wrote."""
        ...

    def close(self) -> None:
        """Release the resources of the environment. No method is called afterwards."""
        ...


def fields_of(spec: JSONValue, *names: str) -> list[Any]:
    """Return the named fields of a specification.

    Raises:
        ValueError: If a field is missing.
    """
    if not isinstance(spec, Mapping) or any(name not in spec for name in names):
        raise ValueError(f"needs a ground truth with {' and '.join(names)}")
    return [spec[name] for name in names]


def as_text(value: Any) -> str:
    """Check the text of an observation, and make it encodable.

    Raises:
        TypeError: If `value` is not text.
        ValueError: If the text is too long.
    """
    if not isinstance(value, str):
        raise TypeError(f"must return text, got {type(value).__name__}")
    if len(value) > MOST_CHARACTERS:
        raise ValueError(f"returned {len(value):,} characters; valid: at most {MOST_CHARACTERS:,}")
    # Half a surrogate pair can be neither encoded nor written to a file.
    return value.encode("utf-8", "replace").decode()


def as_turn(value: Any) -> Turn:
    """Check the `Turn` that an environment's step returned.

    Raises:
        TypeError: If `value` is not a `Turn`, or if a field has the wrong type.
        ValueError: If a number is not a finite float32, or if the text is too long.
    """
    if not isinstance(value, Turn):
        raise TypeError(f"step must return a Turn, got {type(value).__name__}")
    if not isinstance(value.done, bool):
        raise TypeError(f"done must be True or False, got {type(value.done).__name__}")
    if not isinstance(value.info, Mapping):
        raise TypeError(f"info must be a dict of numbers, got {type(value.info).__name__}")
    return Turn(
        text=as_text(value.text),
        reward=finite_float32("reward", value.reward),
        done=value.done,
        info={
            str(name): finite_float32(f"info {name}", number) for name, number in value.info.items()
        },
    )


def finite_float32(name: str, value: Any) -> float:
    """Check a number that user code returned, such as a reward.

    Args:
        name: The name of the number in error messages.
        value: The number, of any type that converts to float.

    Raises:
        TypeError: If `value` is not a number.
        ValueError: If `value` is not a finite float32.
        OverflowError: If `value` is too large for a float.
    """
    # float() alone would accept the string "1".
    if not hasattr(type(value), "__float__"):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    number = float(value)
    if not abs(number) <= FLOAT32_MAX:
        raise ValueError(f"{name} must be a finite float32, got {number}")
    return number
