"""The kinds of single values that a setting can have: `integer`, `number`, `choice`, `path`, …

Each function makes a field of a frozen dataclass, with the default, the meaning and the check of
one setting. A user's task declares its own settings with the same functions:

    @dataclass(frozen=True, kw_only=True)
    class SumSettings:
        largest: int = integer(20, "The largest number in a sum.", minimum=1)

A setting of ours also says, by keyword, how it hangs together with others: `read_if`, `default_by`
and what follows them in `Check`.
"""

from __future__ import annotations

import json
import math
import numbers
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

from grpo_trainable.config.conditions import Condition, Readable
from grpo_trainable.config.defaults import DefaultBy, Moment
from grpo_trainable.config.foreign_names import ForeignName
from grpo_trainable.config.mix import mix_of, mix_text
from grpo_trainable.plugins import is_reference
from grpo_trainable.text import did_you_mean


class ConfigError(ValueError):
    """The user's mistake, in one line: the dotted key, the value got, what would be valid."""


@dataclass(frozen=True)
class Check:
    """What one key accepts, and what it means."""

    default: Any
    meaning: str  # one sentence
    expected: str  # completes "must be …"
    convert: Callable[[Any], Any]  # the value as stored; ValueError or TypeError when invalid
    type: str  # one word, for the reference of all keys
    optional: bool = False  # None is valid
    is_text: bool = False  # any text is a value, so "7" stays text on the command line
    choices: tuple[str, ...] = ()  # the valid values, where they can be listed
    advice: str = ""  # where to look for what is no valid value, in half a sentence
    # What a value may refer to outside the config: a file or directory, a model, a Python object.
    refers_to: Literal["nothing", "path", "model", "object", "tasks"] = "nothing"

    # How it hangs together with other settings, and with other libraries. A single condition or
    # default needs no tuple.
    read_if: tuple[Condition, ...] = ()  # all must hold for it to be read; none: it always is
    default_by: tuple[DefaultBy, ...] = ()  # defaults that other settings decide
    also_called: tuple[ForeignName, ...] = ()  # its names in other libraries
    # Other values that it may have where it is not read: what its default resolves to, and defaults
    # of earlier versions, which the files of their experiments spell out.
    harmless: tuple[Any, ...] = ()
    # Within the sections of a task, of sampling and of the model: it changes neither what is
    # sampled nor its reward, only what training makes of that.
    of_training: bool = False

    def unmet(self, settings: Readable) -> list[Condition]:
        """Return what keeps it from being read beside these settings."""
        return [condition for condition in self.read_if if not condition.met_by(settings)]

    def default_at(self, moment: Moment) -> DefaultBy | None:
        """Return the default that others decide at this moment, if there is one."""
        return next((default for default in self.default_by if default.moment == moment), None)

    @property
    def of_tasks(self) -> Mapping[str, Any]:
        """Task -> default, of those that have one of their own."""
        absent = self.default_at("absent")
        return absent.of_tasks if absent else {}

    @property
    def unremarkable(self) -> tuple[Any, ...]:
        """Its general default, and other values that say nothing where it is not read."""
        return self.default, *self.harmless


def _checked(default: Any, meaning: str, expected: str, convert: Callable, **facts: Any) -> Any:
    if facts.pop("optional", False) or default is None:
        facts["optional"], expected = True, f"none or {expected}"
    for name in ("read_if", "default_by"):
        if name in facts and not isinstance(facts[name], tuple):
            facts[name] = (facts[name],)
    check = Check(default, meaning, expected, convert, **facts)
    return field(default=default, metadata={"check": check})


MAX_INTEGER = (1 << 63) - 1  # a larger one is no float either


def integer(
    default: int | None,
    meaning: str = "",
    *,
    minimum: int,
    maximum: int | None = None,
    optional: bool = False,
    **relations: Any,
) -> Any:
    """An integer from `minimum` to `maximum`, of 64 bits in any case; None too where it is the
    default or `optional`."""
    expected = f"an integer >= {minimum}" + ("" if maximum is None else f" and <= {maximum}")

    def convert(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise TypeError
        whole = int(value)
        if not minimum <= whole <= (MAX_INTEGER if maximum is None else maximum):
            raise ValueError
        return whole

    return _checked(
        default, meaning, expected, convert, type="integer", optional=optional, **relations
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
    """A finite number within bounds: `above` and `below` are themselves excluded."""
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
    """Two finite numbers for which `valid` holds; `expected` says it in words."""

    def convert(value: Any) -> tuple[float, float]:
        if not isinstance(value, list | tuple):
            raise TypeError
        first, second = (_finite(item) for item in value)
        if not valid(first, second):
            raise ValueError
        return first, second

    return _checked(default, meaning, expected, convert, type="two numbers", **relations)


def flag(default: bool, meaning: str = "", **relations: Any) -> Any:
    """True or false."""

    def convert(value: Any) -> bool:
        if not isinstance(value, bool):
            raise TypeError
        return value

    return _checked(default, meaning, "true or false", convert, type="flag", **relations)


def choice(words: Sequence[str], meaning: str = "", *, advice: str = "", **relations: Any) -> Any:
    """One of a few words; the first is the default. `advice` follows them in errors."""
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
    """One of a few words, or a Python object of the user's: `module:name` or `file.py:name`.

    `what` stands for the name in errors, such as `function` or `Class`; `advice` follows it there.
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
    """A Python object of the user's: `module:name` or `file.py:name`."""
    expected = f"module:{what} or file.py:{what}"
    return _text(
        default, meaning, expected, is_reference, "reference", refers_to="object", **relations
    )


def name_or_reference(
    default: str | None, meaning: str = "", *, what: str = "name", **relations: Any
) -> Any:
    """A name that something else knows, or a Python object of the user's."""
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
    """The path of a file or a directory; a relative one means the directory of the command."""
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
    """One of a few words, the first by default, or the path of a file, which has a dot or a slash
    in it.

    `what` stands for the path in errors.
    """
    return _text(
        words[0],
        meaning,
        f"one of {', '.join(words)}, or the path of a {what} (./NAME where it has no ending)",
        lambda text: text in words or is_path(text),
        "choice or path",
        choices=tuple(words),
        refers_to="path",
        **relations,
    )


def path_or_hub_id(default: str | None, meaning: str = "", **relations: Any) -> Any:
    """The path of a directory, or else organisation/name of a model on the Hugging Face hub."""
    return _text(
        default,
        meaning,
        "a non-empty path",
        lambda text: bool(text.strip()) and "\0" not in text,
        "path or hub id",
        refers_to="model",
        **relations,
    )


def is_hub_id(text: str) -> bool:
    """Whether `text` has the form of a name on the hub; the model need not exist."""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", text) is not None


def is_path(text: str) -> bool:
    """Whether `text` can only be a path where a word could be as well: it has a dot or a slash."""
    return bool(re.search(r"[./]", text)) and "\0" not in text


def text(
    default: str | None,
    meaning: str = "",
    *,
    expected: str = "text",
    valid: Callable[[str], bool] = lambda text: True,
    **relations: Any,
) -> Any:
    """A text for which `valid` holds; `expected` says it in words."""
    return _text(default, meaning, expected, valid, "text", **relations)


def texts(
    default: Sequence[str] | None,
    meaning: str = "",
    *,
    expected: str = "a list of texts",
    valid: Callable[[str], bool] = lambda text: True,
    **relations: Any,
) -> Any:
    """A list of texts for each of which `valid` holds; one text stands for a list of it."""

    def convert(value: Any) -> tuple[str, ...]:
        listed = [value] if isinstance(value, str) else value
        if not isinstance(listed, list | tuple) or not all(isinstance(t, str) for t in listed):
            raise TypeError
        if not all(map(valid, listed)):
            raise ValueError
        return tuple(listed)

    stored = None if default is None else tuple(default)
    return _checked(stored, meaning, expected, convert, type="list of texts", **relations)


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


def task_mix(meaning: str = "", **relations: Any) -> Any:
    """Several tasks and their weights: JSON, or the mapping that it stands for."""
    return _checked(
        None,
        meaning,
        'a JSON object of tasks and weights > 0, such as {"math": 0.5, "keyword": 0.5}, each task '
        "under a name of its own",
        lambda value: mix_text(mix_of(value)),
        type="JSON object",
        is_text=True,
        refers_to="tasks",
        **relations,
    )


def gpus(default: float, meaning: str = "", **relations: Any) -> Any:
    """GPUs of an actor: Ray shares one by fractions and gives several only whole."""

    def convert(value: Any) -> float:
        converted = _finite(value)
        if converted < 0 or (converted > 1 and converted != int(converted)):
            raise ValueError
        return converted

    expected = "a number from 0 to 1, or a whole number above"
    return _checked(default, meaning, expected, convert, type="number", **relations)


# ---- Checking --------------------------------------------------------------------------------


def converted(key: str, value: Any, check: Check) -> Any:
    """`value` as a config stores it.

    Raises:
        ConfigError: it is not what `check` expects.
    """
    if value is None and check.optional:
        return None
    try:
        return check.convert(value)
    except (TypeError, ValueError, OverflowError):
        near = did_you_mean(value, check.choices) if isinstance(value, str) else None
        hint = f"; {near or check.advice}" if near or check.advice else ""
        raise ConfigError(f"{key}={shown(value)}: must be {check.expected}{hint}") from None


class Settings:
    """The base of each section: checks and converts every field, however it was constructed."""

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
        """Plain JSON-able data, every key present; `from_dict` gives an equal config back."""
        return {item.name: _plain(getattr(self, item.name)) for item in fields(self)}  # type: ignore[arg-type]


def _plain(value: Any) -> Any:
    if isinstance(value, Settings):
        return value.to_dict()
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def checks_of(settings: Any, prefix: str = "") -> dict[str, Check]:
    """Key → what it accepts, of a dataclass whose fields are kinds of values."""
    return {
        prefix + item.name: item.metadata["check"]
        for item in fields(settings)
        if "check" in item.metadata
    }


def section_expected(section: Any) -> str:
    """What an error says where `section` should be."""
    return "must be a mapping with keys from " + ", ".join(checks_of(section))


def shown(value: Any) -> str:
    """A value as an error prints it: one line, at most 80 characters, "1" told apart from 1."""
    if value is None:
        return "none"
    is_word = isinstance(value, str) and re.fullmatch(r"[A-Za-z_./~][\w./:~+-]*", value)
    if is_word and value.lower() not in ("true", "false", "null", "nan", "infinity"):
        line = value
    else:
        try:
            line = json.dumps(value, ensure_ascii=False, default=repr)
        except (TypeError, ValueError, RecursionError):
            # A key that is no text, a loop, an integer too long for Python to print.
            line = f"<{type(value).__name__}>"
    line = " ".join(line.split())
    return line if len(line) <= 80 else line[:79] + "…"
