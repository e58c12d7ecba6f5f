"""Defaults that other settings decide: per task, per loss, per kind of engine.

A field declares them as `default_by`. There is one form for all, and three moments:

- `absent`: a key that is not given has it. `GRPOConfig.from_dict` fills it in.
- `none`: a key that is none, or whatever its default is, has it. `GRPOConfig` puts it in when it is
  constructed, so that a trial's files show it.
- `read`: a key that is none stays none, and whoever reads it computes with this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from grpo_trainable.config.conditions import Readable

Moment = Literal["absent", "none", "read"]


@dataclass(frozen=True, kw_only=True)
class DefaultBy:
    """The default that a key has beside certain values of others."""

    keys: tuple[str, ...]  # the settings that decide
    value: Callable[..., Any]  # takes their values; None where they leave the general default
    moment: Moment
    of_tasks: Mapping[str, Any] = field(default_factory=dict)  # task -> default, if they decide

    def beside(self, settings: Readable) -> Any:
        """Return the default beside these settings, or None."""
        return self.value(*(settings[key] for key in self.keys))


def by_task(**defaults: Any) -> DefaultBy:
    """Return a default for each of these tasks; docs/defaults.md says why they differ."""
    return DefaultBy(keys=("task.name",), value=defaults.get, moment="absent", of_tasks=defaults)


def where_none(keys: tuple[str, ...], value: Callable[..., Any]) -> DefaultBy:
    """Return a default that is put in where a key is none, or auto."""
    return DefaultBy(keys=keys, value=value, moment="none")


def when_read(keys: tuple[str, ...], value: Callable[..., Any]) -> DefaultBy:
    """Return a number that follows from others wherever a key is none."""
    return DefaultBy(keys=keys, value=value, moment="read")
