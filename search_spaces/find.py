"""Lookup of search spaces and presets by the text that a user gives."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from types import ModuleType

from grpo_trainable.config import ConfigError, make_absolute, shown
from grpo_trainable.plugins import PluginError, is_reference, load_instance, load_module, source_of
from grpo_trainable.text import did_you_mean
from search_spaces import SPACES
from search_spaces.columns import DERIVED
from search_spaces.presets import PRESETS, Preset
from search_spaces.search_space import SearchSpace


def find_space(text: str) -> SearchSpace:
    """Return the space that `text` names.

    The text is a name such as `lag`, or names a user's space: `my_space.py`, `my_space.py:NAME` or
    `my.module:NAME`. Paths in arms are relative to the directory of the space's file. In the
    result, they are absolute.

    Raises:
        ConfigError: There is no such space, or its file cannot be used. The error is one line.
    """
    if text in SPACES:
        return SPACES[text]
    try:
        if text.endswith(".py"):
            return _checked(text, _only_space(text, load_module("--space", text)))
        if is_reference(text):
            return _checked(text, load_instance("--space", text, SearchSpace))
    except PluginError as error:
        raise ConfigError(str(error)) from None
    if text in PRESETS:
        raise ConfigError(f"--space {text}: that is a preset; use --preset {text}")
    near = did_you_mean(text, SPACES, cutoff=0.4)
    hint = f"{near} " if near else ""
    raise ConfigError(
        f"--space {shown(text)}: unknown; {hint}valid: {', '.join(SPACES)}, "
        "or a file such as my_space.py that defines a SearchSpace"
    )


def absolute(text: str) -> str:
    """Return a text that names the same space in any working directory."""
    if text.endswith(".py"):
        return os.path.abspath(text)
    where, _, name = text.rpartition(":")
    return f"{os.path.abspath(where)}:{name}" if where.endswith(".py") else text


def source_file(text: str) -> str | None:
    """Return the file that defines a user's space, or None for a shipped space."""
    if text in SPACES or not (text.endswith(".py") or is_reference(text)):
        return None
    return text if text.endswith(".py") else source_of(text)


def directory_of(text: str) -> str:
    """Return the base directory for relative paths in the arms of a space."""
    file = source_file(text)
    return os.path.dirname(os.path.abspath(file)) if file is not None else os.getcwd()


def _only_space(text: str, module: ModuleType) -> SearchSpace:
    ours = [id(space) for space in SPACES.values()]
    found = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, SearchSpace) and id(value) not in ours
    }
    if not found:
        raise ConfigError(f"--space {text}: defines no SearchSpace")
    if len({id(space) for space in found.values()}) > 1:
        names = " or ".join(f"{text}:{name}" for name in found)
        raise ConfigError(f"--space {text}: defines several search spaces; choose {names}")
    return next(iter(found.values()))


def _checked(text: str, found: SearchSpace) -> SearchSpace:
    """Return the space with absolute paths, after checking the metrics of its columns."""
    from grpo_trainable.telemetry.metrics import (  # imports numpy, which shipped spaces don't need
        BY_TASK,
        NAMES,
    )

    known = {*NAMES, *DERIVED}
    for column in found.columns:
        of_a_task = re.sub("/.*/", "/LABEL/", column.metric) in BY_TASK
        if column.metric not in known and not of_a_task:
            hint = did_you_mean(column.metric, known) or "docs/metrics.md lists the metrics"
            raise ConfigError(
                f"--space {text}: column {column.name}: metric={column.metric}: unknown; {hint}"
            )
    base_dir = directory_of(text)
    return replace(
        found, arms={arm: make_absolute(found.arms[arm], base_dir) for arm in found.arms}
    )


def find_preset(name: str) -> Preset:
    """Return the preset of this name.

    Raises:
        ConfigError: There is no such preset. The error is one line.
    """
    if name in PRESETS:
        return PRESETS[name]
    if name in SPACES:
        raise ConfigError(f"--preset {name}: that is a search space; use --space {name}")
    # REINFORCE++ is called reinforce_pp here.
    hint = did_you_mean(name.replace("+", "p"), PRESETS) or f"valid: {', '.join(PRESETS)}"
    raise ConfigError(f"--preset {name}: unknown; {hint}")
