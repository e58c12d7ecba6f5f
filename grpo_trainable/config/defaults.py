"""Defaults that depend on other settings: on the task, the model, the loss or the kind of engine.

A field declares such defaults as `default_by`. Each default applies at one of three moments:

- `absent`: the key is not given. `GRPOConfig.from_dict` fills in the first default that applies.
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

# A default can depend on these things, and not only on the values of settings.
TASKS = "the tasks"  # the names of the trial's tasks; a mix has several
TEMPLATES = "the templates"  # the values of task.template and task.code_in of all tasks
MODEL = "the model"  # `ModelFacts`, or None for a policy of this package
# The two settings for the GPUs of the actor that trains. In each placement, one of the two has no
# effect and stays 0.
TRAINING_GPUS = ("resources.learner_gpus", "resources.worker_gpus")
# Prefix of a key in `keys`. The prefixed key stands for the given value of the key, or for none if
# no value is given. With this prefix, the defaults of two keys can depend on each other's given
# values.
GIVEN = "given "


@dataclass(frozen=True, kw_only=True)
class DefaultBy:
    """Default of a key that depends on the values of other keys."""

    keys: tuple[str, ...]  # what the default depends on: settings, `TASKS`, `MODEL` and so on
    value: Callable[..., Any]  # takes the values of `keys`; returns None if no default applies
    moment: Moment
    of_tasks: Mapping[str, Any] = field(default_factory=dict)  # task -> its default
    # For a default that depends on the model or a GPU: the reason, and the default in words.
    because: str = ""
    told: str = ""

    def beside(self, settings: Readable) -> Any:
        """Return the default for these settings, or None if it does not apply."""
        return self.value(*(settings[key] for key in self.keys))


def by_task(**defaults: Any) -> DefaultBy:
    """Return a default for each of these tasks. docs/defaults.md gives the reasons.

    A mix gets the default of a task only if every task in the mix has that name.
    """

    def value(tasks: frozenset[str]) -> Any:
        return defaults.get(*tasks) if len(tasks) == 1 else None

    return DefaultBy(keys=(TASKS,), value=value, moment="absent", of_tasks=defaults)


def by_model(
    because: str, value: Callable[..., Any], *, keys: tuple[str, ...] = (), told: str
) -> DefaultBy:
    """Return a default for Hugging Face models. docs/defaults.md gives the reasons.

    Args:
        because: The reason for the default, which `--dry-run` shows.
        value: Function of the model's `ModelFacts` and the values of `keys`. Returns None if the
            default does not apply.
        keys: Settings that the default also depends on.
        told: The default in words, for the reference page of all keys.
    """

    def of_model(facts: Any, *values: Any) -> Any:
        return None if facts is None else value(facts, *values)

    return DefaultBy(
        keys=(MODEL, *keys), value=of_model, moment="absent", because=because, told=told
    )


def by_gpu(because: str, value: Any, *, told: str) -> DefaultBy:
    """Return a default for every policy that is trained on a GPU.

    Args:
        because: The reason for the default, which `--dry-run` shows.
        value: The default.
        told: The default in words, for the reference page of all keys.
    """
    return DefaultBy(
        keys=TRAINING_GPUS,
        value=lambda *gpus: value if any(gpus) else None,
        moment="absent",
        because=because,
        told=told,
    )


def where_none(keys: tuple[str, ...], value: Callable[..., Any]) -> DefaultBy:
    """Return a default that replaces a key's general default, such as none or auto."""
    return DefaultBy(keys=keys, value=value, moment="none")


def when_read(keys: tuple[str, ...], value: Callable[..., Any]) -> DefaultBy:
    """Return a default that is computed from other keys each time the unset key is read."""
    return DefaultBy(keys=keys, value=value, moment="read")
