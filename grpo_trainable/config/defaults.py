"""Defaults that depend on other settings: on the task, the loss or the kind of engine.

A field declares such a default as `default_by`. The default applies at one of three moments:

- `absent`: the key is not given. `GRPOConfig.from_dict` fills in the default.
- `none`: the key has its general default, usually none. `GRPOConfig` replaces that value when the
  config is constructed, so a trial's files show the replacement.
- `read`: the key is none and stays none. Code that reads the key computes the default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from grpo_trainable.config.conditions import Readable

Moment = Literal["absent", "none", "read"]


@dataclass(frozen=True, kw_only=True)
class DefaultBy:
    """Default of a key that depends on the values of other keys."""

    keys: tuple[str, ...]  # the settings that the default depends on
    value: Callable[..., Any]  # takes the values of `keys`; returns None for the general default
    moment: Moment
    of_tasks: Mapping[str, Any] = field(default_factory=dict)  # task -> default, if tasks decide

    def beside(self, settings: Readable) -> Any:
        """Return the default for these settings, or None to keep the general default."""
        return self.value(*(settings[key] for key in self.keys))


def by_task(**defaults: Any) -> DefaultBy:
    """Return a default for each of these tasks. docs/defaults.md gives the reasons."""
    return DefaultBy(keys=("task.name",), value=defaults.get, moment="absent", of_tasks=defaults)


def where_none(keys: tuple[str, ...], value: Callable[..., Any]) -> DefaultBy:
    """Return a default that replaces a key's general default, such as none or auto."""
    return DefaultBy(keys=keys, value=value, moment="none")


def when_read(keys: tuple[str, ...], value: Callable[..., Any]) -> DefaultBy:
    """Return a default that code computes from other keys when it reads a key that is none."""
    return DefaultBy(keys=keys, value=value, moment="read")
