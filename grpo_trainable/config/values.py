"""The kinds of values that a setting can have: `integer`, `number`, `choice`, `path` and others.

Each function declares one setting: it makes a field of a frozen dataclass, with a default, a
meaning and a check. A user's task declares its settings with the same functions:

    @dataclass(frozen=True, kw_only=True)
    class SumSettings:
        largest: int = integer(20, "The largest number in a sum.", minimum=1)

The package's own settings also declare how they depend on other settings. To do so, they pass
keyword arguments: `read_if`, `default_by` and the attributes that follow these two in `Check`.
"""

from __future__ import annotations

import json
import math
import numbers
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, cast

from grpo_trainable.config.conditions import Condition, Readable
from grpo_trainable.config.defaults import MODEL, TRAINING_GPUS, DefaultBy, Moment
from grpo_trainable.config.foreign_names import ForeignName
from grpo_trainable.config.mix import mix_of, mix_text
from grpo_trainable.config.reward_kinds import EXPECTED, rewards_of, rewards_text
from grpo_trainable.plugins import is_reference
from grpo_trainable.text import did_you_mean


class ConfigError(ValueError):
    """A user's mistake in one line: the dotted key, the value given, and the valid values."""


@dataclass(frozen=True)
class Check:
    """Declaration of one key: the values that it accepts, and its meaning."""

    default: Any
    meaning: str  # whole sentences, in one line
    expected: str  # the valid values in words, to follow "must be"
    convert: Callable[[Any], Any]  # returns the stored value; raises ValueError or TypeError
    type: str  # a short name, for the reference page of all keys
    optional: bool = False  # True: None is valid
    is_text: bool = False  # True: any string is a value, so 7 stays a string on the command line
    choices: tuple[str, ...] = ()  # the valid values, if they can be listed
    advice: str = ""  # a clause that follows the valid values in an error
    # The kind of thing outside the config that a value names: a file or directory, a model, a
    # Python object, one or several rewards, or the tasks of a mix.
    refers_to: Literal["nothing", "path", "model", "object", "rewards", "tasks"] = "nothing"

    # Relations to other settings and to other libraries. A single condition or default needs no
    # tuple.
    read_if: tuple[Condition, ...] = ()  # the key has an effect if all of these hold
    default_by: tuple[DefaultBy, ...] = ()  # defaults that depend on other settings
    also_called: tuple[ForeignName, ...] = ()  # the key's names in other libraries
    # Other values that the key may have when it has no effect: the values that its default resolves
    # to, and the defaults of earlier versions, which old experiments have in their files.
    harmless: tuple[Any, ...] = ()
    # True: the key affects only training, not the sampled tokens or their rewards, and
    # `launch/evaluate.py` does not read it. Only keys of the sections `task`, `rollout`, `model`
    # and `eval` set this.
    of_training: bool = False

    def unmet(self, settings: Readable) -> list[Condition]:
        """Return the conditions in `read_if` that these settings do not meet."""
        return [condition for condition in self.read_if if not condition.met_by(settings)]

    def default_at(self, moment: Moment) -> DefaultBy | None:
        """Return the default that depends on other settings and applies at this moment, or None."""
        return next((default for default in self.default_by if default.moment == moment), None)

    @property
    def of_tasks(self) -> Mapping[str, Any]:
        """Default of each task whose default differs from the general default."""
        return next((default.of_tasks for default in self.default_by if default.of_tasks), {})

    @property
    def of_models(self) -> list[DefaultBy]:
        """Defaults for Hugging Face models, which take precedence over defaults for tasks."""
        return [default for default in self.default_by if MODEL in default.keys]

    @property
    def of_gpus(self) -> list[DefaultBy]:
        """Defaults for training on a GPU, which take precedence over defaults for models."""
        return [default for default in self.default_by if default.keys == TRAINING_GPUS]

    @property
    def unremarkable(self) -> tuple[Any, ...]:
        """The general default, and other values that are allowed when the key has no effect."""
        return self.default, *self.harmless


def _checked(default: Any, meaning: str, expected: str, convert: Callable, **facts: Any) -> Any:
    if facts.pop("optional", False) or default is None:
        facts["optional"], expected = True, f"none or {expected}"
    for name in ("read_if", "default_by"):
        if name in facts and not isinstance(facts[name], tuple):
            facts[name] = (facts[name],)
    check = Check(default, meaning, expected, convert, **facts)
    return field(default=default, metadata={"check": check})


MAX_INTEGER = (1 << 63) - 1  # the largest signed 64-bit integer


def integer(
    default: int | None,
    meaning: str = "",
    *,
    minimum: int,
    maximum: int | None = None,
    optional: bool = False,
    **relations: Any,
) -> Any:
    """Declare an integer from `minimum` to `maximum`, of at most 64 bits.

    A float without a fractional part, such as 2.0 from `tune.quniform`, is converted. None is valid
    too if it is the default or if `optional` is true.
    """
    expected = f"an integer >= {minimum}" + ("" if maximum is None else f" and <= {maximum}")

    def convert(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise TypeError
        whole = int(cast("float", value))
        if whole != value or not minimum <= whole <= (MAX_INTEGER if maximum is None else maximum):
            raise ValueError
        return whole

    return _checked(
        default, meaning, expected, convert, type="integer", optional=optional, **relations
    )


ALL = "all"


def count_or_all(default: int, meaning: str = "", *, minimum: int, **relations: Any) -> Any:
    """Declare a count of at least `minimum`, or the word `all`."""
    of_integer: Check = integer(default, minimum=minimum).metadata["check"]
    return _checked(
        default,
        meaning,
        f"{ALL} or {of_integer.expected}",
        lambda value: value if value == ALL else of_integer.convert(value),
        type="integer or all",
        **relations,
    )


def _finite(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError
    converted = float(value)
    if not math.isfinite(converted):
        raise ValueError
    return converted


def number(
    default: float | None,
    meaning: str = "",
    *,
    above: float | None = None,
    minimum: float | None = None,
    below: float | None = None,
    maximum: float | None = None,
    **relations: Any,
) -> Any:
    """Declare a finite number within bounds. The bounds `above` and `below` are exclusive."""
    bounds = ((">", above), (">=", minimum), ("<", below), ("<=", maximum))
    limits = " and ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)

    def convert(value: Any) -> float:
        converted = _finite(value)
        if (
            (above is not None and converted <= above)
            or (minimum is not None and converted < minimum)
            or (below is not None and converted >= below)
            or (maximum is not None and converted > maximum)
        ):
            raise ValueError
        return converted

    expected = f"a number {limits}" if limits else "a number"
    return _checked(default, meaning, expected, convert, type="number", **relations)


def pair(
    default: tuple[float, float] | None,
    meaning: str = "",
    *,
    expected: str,
    valid: Callable[[float, float], bool],
    **relations: Any,
) -> Any:
    """Declare two finite numbers that satisfy `valid`. `expected` describes them in errors."""

    def convert(value: Any) -> tuple[float, float]:
        if not isinstance(value, list | tuple):
            raise TypeError
        first, second = (_finite(item) for item in value)
        if not valid(first, second):
            raise ValueError
        return first, second

    return _checked(default, meaning, expected, convert, type="two numbers", **relations)


BOTH = (True, False)


def flag(default: bool, meaning: str = "", **relations: Any) -> Any:
    """Declare a setting that is true or false."""

    def convert(value: Any) -> bool:
        # NumPy's booleans are equal to Python's and, in contrast to 1 and 0, are not numbers.
        if not isinstance(value, bool) and (isinstance(value, numbers.Number) or value not in BOTH):
            raise TypeError
        return bool(value)

    return _checked(default, meaning, "true or false", convert, type="flag", **relations)


def choice(words: Sequence[str], meaning: str = "", *, advice: str = "", **relations: Any) -> Any:
    """Declare a choice among a few words. The first word is the default.

    In an error message, `advice` comes after the list of valid words.
    """
    expected = f"one of {', '.join(words)}"
    valid = words.__contains__
    return _text(
        words[0],
        meaning,
        expected,
        valid,
        "choice",
        choices=tuple(words),
        advice=advice,
        **relations,
    )


def choice_or_reference(
    words: Sequence[str],
    meaning: str = "",
    *,
    what: str = "name",
    advice: str = "",
    **relations: Any,
) -> Any:
    """Declare a choice among a few words, or a user's Python object.

    An object is named as `module:name` or `file.py:name`.

    Args:
        words: The valid words. The first is the default.
        meaning: The meaning of the setting.
        what: Placeholder for the object's name in errors, such as `function` or `Class`.
        advice: A clause that comes after the list of valid values in an error message.
        relations: Other attributes of `Check`.
    """
    return _text(
        words[0],
        meaning,
        f"one of {', '.join(words)}, or module:{what} or file.py:{what}",
        lambda text: text in words or is_reference(text),
        "choice or reference",
        choices=tuple(words),
        advice=advice,
        refers_to="object",
        **relations,
    )


def reference(
    default: str | None, meaning: str = "", *, what: str = "name", **relations: Any
) -> Any:
    """Declare a user's Python object: `module:name` or `file.py:name`."""
    expected = f"module:{what} or file.py:{what}"
    return _text(
        default, meaning, expected, is_reference, "reference", refers_to="object", **relations
    )


def rewards(meaning: str = "", **relations: Any) -> Any:
    """Declare one reward, or a list of rewards that is stored as JSON text."""
    return _checked(
        None,
        meaning,
        EXPECTED,
        lambda value: rewards_text(rewards_of(value)),
        type="reward or JSON list",
        is_text=True,
        refers_to="rewards",
        **relations,
    )


def name_or_reference(
    default: str | None, meaning: str = "", *, what: str = "name", **relations: Any
) -> Any:
    """Declare a name that another package knows, or a user's Python object."""
    expected = f"a {what}, or module:name or file.py:name"
    valid = re.compile(r"[\w./:-]+").fullmatch
    return _text(
        default,
        meaning,
        expected,
        lambda t: bool(valid(t)),
        "text or reference",
        refers_to="object",
        **relations,
    )


def path(default: str | None, meaning: str = "", **relations: Any) -> Any:
    """Declare the path of a file or a directory.

    A relative path is relative to the current directory of the command.
    """
    return _text(
        default,
        meaning,
        "a non-empty path",
        lambda text: bool(text.strip()) and "\0" not in text,
        "path",
        refers_to="path",
        **relations,
    )


def choice_or_path(
    words: Sequence[str], meaning: str = "", *, what: str = "file", **relations: Any
) -> Any:
    """Declare a choice among a few words, or the path of a file. The first word is the default.

    A path contains a dot or a slash. `what` describes the file in errors.
    """
    return _text(
        words[0],
        meaning,
        f"one of {', '.join(words)}, or the path of a {what} (./NAME if it has no extension)",
        lambda text: text in words or is_path(text),
        "choice or path",
        choices=tuple(words),
        refers_to="path",
        **relations,
    )


def path_or_hub_id(default: str | None, meaning: str = "", **relations: Any) -> Any:
    """Declare a directory, or the organisation/name of a model on the Hugging Face hub."""
    return _text(
        default,
        meaning,
        "a non-empty path",
        lambda text: bool(text.strip()) and "\0" not in text,
        "path or hub id",
        refers_to="model",
        **relations,
    )


def is_path(text: str) -> bool:
    """Return True if `text` is a path rather than a word: it has a dot or a slash."""
    return bool(re.search(r"[./]", text)) and "\0" not in text


def text(
    default: str | None,
    meaning: str = "",
    *,
    expected: str = "text",
    valid: Callable[[str], bool] = lambda text: True,
    **relations: Any,
) -> Any:
    """Declare a string that satisfies `valid`. Errors describe such a string with `expected`."""
    return _text(default, meaning, expected, valid, "text", **relations)


def texts(
    default: Sequence[str] | None,
    meaning: str = "",
    *,
    expected: str = "a list of strings",
    valid: Callable[[str], bool] = lambda text: True,
    **relations: Any,
) -> Any:
    """Declare a list of strings that each satisfy `valid`. A single string is a list of one."""

    def convert(value: Any) -> tuple[str, ...]:
        listed = [value] if isinstance(value, str) else value
        if not isinstance(listed, list | tuple) or not all(isinstance(t, str) for t in listed):
            raise TypeError
        if not all(map(valid, listed)):
            raise ValueError
        return tuple(listed)

    stored = None if default is None else tuple(default)
    return _checked(stored, meaning, expected, convert, type="list of strings", **relations)


def _text(
    default: str | None,
    meaning: str,
    expected: str,
    valid: Callable[[str], bool],
    type: str,
    **facts: Any,
) -> Any:
    def convert(value: Any) -> str:
        if not isinstance(value, str):
            raise TypeError
        if not valid(value):
            raise ValueError
        return value

    return _checked(default, meaning, expected, convert, type=type, is_text=True, **facts)


def json_object(
    default: str | None,
    meaning: str = "",
    *,
    expected: str,
    valid: Callable[[dict[str, Any]], bool],
    **relations: Any,
) -> Any:
    """Declare a JSON object that satisfies `valid`: JSON text, or the equivalent mapping."""

    def convert(value: Any) -> str:
        written = value
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            written = json.dumps(value, ensure_ascii=False)
        if not isinstance(written, str):
            raise TypeError
        listed = json.loads(written)
        if not isinstance(listed, dict) or not valid(listed):
            raise ValueError
        return written

    return _checked(
        default, meaning, expected, convert, type="JSON object", is_text=True, **relations
    )


def task_mix(meaning: str = "", **relations: Any) -> Any:
    """Declare a mix of tasks and their weights: JSON text, or the equivalent mapping."""
    return _checked(
        None,
        meaning,
        'a JSON object of tasks and weights > 0, such as {"math": 0.5, "keyword": 0.5}, each task '
        "under a different name",
        lambda value: mix_text(mix_of(value)),
        type="JSON object",
        is_text=True,
        refers_to="tasks",
        **relations,
    )


def gpus(default: float, meaning: str = "", **relations: Any) -> Any:
    """Declare the number of GPUs of an actor. Ray allows a fraction of one GPU, or whole GPUs."""

    def convert(value: Any) -> float:
        converted = _finite(value)
        if converted < 0 or (converted > 1 and converted != int(converted)):
            raise ValueError
        return converted

    expected = "a number from 0 to 1, or a whole number above 1"
    return _checked(default, meaning, expected, convert, type="number", **relations)


# ---- Checking --------------------------------------------------------------------------------


def converted(key: str, value: Any, check: Check) -> Any:
    """Return `value` as a config stores it.

    Raises:
        ConfigError: `check` does not accept the value.
    """
    if value is None and check.optional:
        return None
    try:
        return check.convert(value)
    except (TypeError, ValueError, OverflowError, RecursionError):
        advice = _nearest_choice(value, check) or _one_value(value) or check.advice
        hint = f"; {advice}" if advice else ""
        raise ConfigError(f"{key}={shown(value)}: must be {check.expected}{hint}") from None


def _one_value(value: Any) -> str | None:
    """Return advice if the user probably meant to compare several values, otherwise None."""
    if isinstance(value, str) and re.fullmatch(r"[\w.+-]+(,[\w.+-]+)+", value):
        return "to compare several values, write a search space (docs/howto/search-space.md)"
    return None


def _nearest_choice(value: Any, check: Check) -> str | None:
    """Return `did you mean NAME?` with the choice that the user probably meant, or None."""
    text = value if isinstance(value, str | bool) else ""
    switch = {"true": "on", "false": "off"}.get(str(text).lower())
    if switch in check.choices:
        return f"did you mean {switch}?"
    return did_you_mean(value, check.choices) if isinstance(value, str) else None


class Settings:
    """Base class of all sections. It checks and converts every field on construction."""

    SECTION: ClassVar[str] = ""

    def __post_init__(self) -> None:
        prefix = f"{self.SECTION}." if self.SECTION else ""
        for item in fields(self):  # type: ignore[arg-type]
            value = getattr(self, item.name)
            check: Check | None = item.metadata.get("check")
            if check is not None:
                object.__setattr__(self, item.name, converted(prefix + item.name, value, check))
            elif type(value) is not type(item.default):
                raise ConfigError(f"{item.name}={shown(value)}: {section_expected(item.default)}")

    def to_dict(self) -> dict[str, Any]:
        """Return the value of every key as data that JSON can store.

        `from_dict` turns the data back into an equal config.
        """
        return {item.name: _plain(getattr(self, item.name)) for item in fields(self)}  # type: ignore[arg-type]


def _plain(value: Any) -> Any:
    if isinstance(value, Settings):
        return value.to_dict()
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def checks_of(settings: Any, prefix: str = "") -> dict[str, Check]:
    """Return the check of each key in a dataclass that is declared with this module's functions."""
    return {
        prefix + item.name: item.metadata["check"]
        for item in fields(settings)
        if "check" in item.metadata
    }


def section_expected(section: Any) -> str:
    """Return the end of the error message for a value that should be a `section`."""
    return "must be a mapping with keys from " + ", ".join(checks_of(section))


def shown(value: Any) -> str:
    """Return a value as an error message shows it: in one line of at most 80 characters.

    The string "1" is printed differently from the number 1.
    """
    if value is None:
        return "none"
    is_word = isinstance(value, str) and re.fullmatch(r"[A-Za-z_./~][\w./:~+-]*", value)
    if is_word and value.lower() not in ("true", "false", "null", "nan", "infinity"):
        line = value
    else:
        try:
            line = json.dumps(value, ensure_ascii=False, default=repr)
        except (TypeError, ValueError, RecursionError):
            # A key that is not a string, a circular reference, or an integer too long to print.
            line = f"<{type(value).__name__}>"
    line = " ".join(line.split())
    return line if len(line) <= 80 else line[:79] + "…"
