"""Conditions under which a setting has an effect, each as a predicate and in words.

A field declares its conditions as `read_if`. A key that has no effect must keep its default:
`GRPOConfig` rejects any other value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from grpo_trainable.plugins import is_reference

# A `GRPOConfig`. Modules that use this alias cannot import the class, because the module of the
# class imports them.
Config: TypeAlias = Any
# (True if the settings contradict each other, the key to blame, the reason).
Conflict: TypeAlias = tuple[bool, str, str]


class Readable(Protocol):
    """A config or a dict: an object that returns the value at a dotted key."""

    def __getitem__(self, key: str, /) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Condition:
    """Condition on other settings under which a key has an effect."""

    keys: tuple[str, ...]  # the settings that the condition checks
    needs: str  # the condition in words, for errors and the reference
    holds: Callable[..., bool]  # takes the values of `keys`, in the order of `keys`

    def met_by(self, settings: Readable) -> bool:
        """Return True if a config or plain settings meet the condition."""
        return self.holds(*(settings[key] for key in self.keys))


def one_of(key: str, *values: str, remark: str = "") -> Condition:
    """Require one of these values of `key`."""
    *others, last = values
    listed = f"{', '.join(others)} or {last}" if others else last
    return Condition(keys=(key,), needs=f"{key}={listed}{remark}", holds=lambda v: v in values)


def one_of_or_own(key: str, *values: str, remark: str = "") -> Condition:
    """Require one of these values of `key`, or a user's function."""
    return Condition(
        keys=(key,),
        needs=f"{key}={', '.join(values)} or a function of your own{remark}",
        holds=lambda v: v in values or is_reference(v),
    )


def at_least(key: str, minimum: int) -> Condition:
    """Require a value of at least `minimum`."""
    return Condition(keys=(key,), needs=f"{key} >= {minimum}", holds=lambda v: v >= minimum)


def positive(key: str) -> Condition:
    """Require a value above 0. The value none does not meet the condition."""
    return Condition(keys=(key,), needs=f"{key} > 0", holds=bool)


def is_true(key: str, remark: str = "") -> Condition:
    """Require a flag to be true."""
    return Condition(keys=(key,), needs=f"{key}=true{remark}", holds=bool)


def zero(key: str) -> Condition:
    """Require a value of 0."""
    return Condition(keys=(key,), needs=f"{key}=0", holds=lambda value: value == 0)


def given(key: str, what: str = "") -> Condition:
    """Require a value other than none."""
    needs = f"{what} as {key}" if what else f"a value for {key}"
    return Condition(keys=(key,), needs=needs, holds=lambda value: value is not None)


def none_given(*keys: str) -> Condition:
    """Require all of these keys to be none."""
    return Condition(
        keys=keys,
        needs=" and ".join(f"{key}=none" for key in keys),
        holds=lambda *values: all(value is None for value in values),
    )


# ---- Conditions that several sections use ------------------------------------------------------

CONTROL = "control"  # the task of a policy that acts in `model.env`

COLOCATED = one_of("placement", "colocated")
DISAGGREGATED = one_of("placement", "disaggregated")
REPLAY = at_least("buffer_capacity", 2)
NOT_PLAYED = one_of("env.name", "off")
OF_TEXT = Condition(
    keys=("task.name",),
    needs="a task with text (any except control)",
    holds=lambda name: name != CONTROL,
)
CHAT = Condition(
    keys=("model.chat_template",),
    needs="model.chat_template=on or a file",
    holds=lambda template: template != "off",
)
GAE = one_of("loss.advantage", "gae")
