"""The interface of an environment: it starts an episode and answers one action per turn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

JSONValue: TypeAlias = (
    bool | int | float | str | Sequence["JSONValue"] | Mapping[str, "JSONValue"] | None
)

# Maximum length of an observation. Longer text would fit into no context, so it must be a mistake.
MOST_CHARACTERS = 1_000_000
FLOAT32_MAX = 3.4028234663852886e38  # rewards become float32 tensors


@dataclass(frozen=True, slots=True)
class Turn:
    """The environment's answer to an action."""

    text: str = ""  # observation that the next action responds to; ignored after the last action
    reward: float = 0.0  # reward of this action; the episode earns the discounted sum
    done: bool = False  # True at the end of the episode
    # Numbers and booleans are summed over an episode. The sums become metrics, and can be parts of
    # the reward. Other values are ignored.
    info: Mapping[str, Any] = field(default_factory=dict)


class Environment(Protocol):
    """Interface of an environment, which plays one episode after another.

    The class of an environment is called without arguments, in a process that may be killed.
    Several environments share a process and take turns.
    """

    def reset(self, spec: JSONValue) -> str:
        """Begin the episode that `spec` fully describes, and return the first observation.

        The same specification begins the same episode in any process.
        """
        ...

    def step(self, action: str) -> Turn:
        """Respond to an action, the text that the policy wrote."""
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
    """Check that an observation is text, and replace characters that cannot be encoded.

    Raises:
        TypeError: If `value` is not text.
        ValueError: If the text is too long.
    """
    if not isinstance(value, str):
        raise TypeError(f"an observation must be text, got {type(value).__name__}")
    if len(value) > MOST_CHARACTERS:
        raise ValueError(
            f"an observation has {len(value):,} characters; valid: at most {MOST_CHARACTERS:,}"
        )
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
        raise TypeError(f"info must be a dict, got {type(value.info).__name__}")
    return Turn(
        text=as_text(value.text),
        reward=finite_float32("reward", value.reward),
        done=value.done,
        info=numbers_in(value.info),
    )


def numbers_in(info: Mapping[Any, Any]) -> dict[str, float]:
    """Return the numbers and booleans of an `info`, except those outside the range of float32."""
    found = {}
    for name, value in info.items():
        if getattr(value, "ndim", None) == 0:  # a scalar of NumPy or PyTorch
            value = value.item()
        if isinstance(value, int | float) and abs(value) <= FLOAT32_MAX:
            # Half a surrogate pair cannot be written to a file.
            found[str(name).encode("utf-8", "replace").decode()] = float(value)
    return found


def add_info(total: dict[str, float], info: Mapping[str, float]) -> None:
    """Add the numbers of one turn to the sums over the episode's earlier turns."""
    for name, number in info.items():
        total[name] = total.get(name, 0.0) + number


def mean_info(infos: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each number over episodes. A number that an episode lacks counts as 0."""
    names = sorted({name for info in infos for name in info})
    return {name: math.fsum(info.get(name, 0.0) for info in infos) / len(infos) for name in names}


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
