"""Load a user's task, `task.name=file.py:Class`, configure it and check what it returns.

Every mistake in the class raises a `PluginError` or a `ConfigError` with a one-line message.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from grpo_trainable.config import (
    CHECKS,
    Check,
    CommonTaskSettings,
    ConfigError,
    GRPOConfig,
    checks_of,
    converted,
    flatten,
    make_absolute,
    mix_of,
    mix_text,
    shown,
    unknown_key,
)
from grpo_trainable.plugins import PluginError, load, one_line
from grpo_trainable.tasks.messages import mistake_in_prompt
from grpo_trainable.tasks.task import Example, JSONValue, Score, as_score
from grpo_trainable.text import plural

COMMON = checks_of(CommonTaskSettings, "task.")


def declared_settings(name: str) -> dict[str, Check]:
    """Return the settings that a task class declares in `Settings`, as `task.<setting>` -> check.

    Raises:
        PluginError: If the class cannot be loaded, or declares its settings wrongly.
    """
    settings = _settings_class(name)
    return {} if settings is None else checks_of(settings, "task.")


def keys_with(name: str) -> dict[str, Check]:
    """Return all settings of a trial that runs the user's task `name`, as key -> check."""
    others = {key: check for key, check in CHECKS.items() if not key.startswith("task.")}
    return others | COMMON | declared_settings(name)


def complete_settings(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checked value of each declared setting: the given value or the default.

    Raises:
        ConfigError: If the class does not declare a given setting, or if a value is invalid.
    """
    declared = declared_settings(name)
    for setting in given:
        if f"task.{setting}" not in declared:
            raise unknown_key(f"task.{setting}", keys_with(name))
    return {
        (setting := key.removeprefix("task.")): converted(
            key, given.get(setting, check.default), check
        )
        for key, check in declared.items()
    }


def default_settings(name: str, base_dir: str) -> dict[str, Any]:
    """Return the defaults of the settings of a task class, as `task.<setting>` -> value.

    Relative paths are resolved against `base_dir`.

    Raises:
        PluginError: If the class cannot be loaded, or declares its settings wrongly.
    """
    declared = declared_settings(name)
    defaults = {key.removeprefix("task."): check.default for key, check in declared.items()}
    return flatten(make_absolute({"task": defaults}, base_dir, declared))


def with_task_settings(
    config: GRPOConfig, base_dir: str, *, given_in: str | None = None
) -> GRPOConfig:
    """Complete and check the settings that a user's task declares.

    Unset settings get their defaults, and paths become absolute. The class of the task is loaded.

    Args:
        config: Config of a trial.
        base_dir: Directory against which relative defaults are resolved.
        given_in: Directory against which relative paths in `config` are resolved, by default
            `base_dir`.

    Raises:
        ConfigError: If the class does not declare a given setting, or if a value is invalid.
        PluginError: If the class cannot be loaded.
    """
    task = config.task
    if config.parts:
        return _with_settings_of_parts(config, base_dir, given_in)
    if not task.is_custom:
        return config
    declared = declared_settings(task.name)
    given = make_absolute({"task": dict(task.own)}, given_in or base_dir, declared)["task"]
    settings = {"task": complete_settings(task.name, given)}
    own = make_absolute(settings, base_dir, declared)["task"]
    return replace(config, task=replace(task, own=tuple(sorted(own.items()))))


def _with_settings_of_parts(config: GRPOConfig, base_dir: str, given_in: str | None) -> GRPOConfig:
    """Complete the settings of every user-defined task in a mix, and write them into `task.mix`."""
    entries = mix_of(config.task.mix)
    for label, part in config.parts.items():
        try:
            own = with_task_settings(part, base_dir, given_in=given_in).task.own
        except ConfigError as error:
            raise ConfigError(f"task.mix, {label}: {error}") from None
        entries[label] |= {name: list(v) if isinstance(v, tuple) else v for name, v in own}
    return replace(config, task=replace(config.task, mix=mix_text(entries)))


class CustomTask:
    """Adapter from a user's class to the interface of a task."""

    def __init__(
        self, name: str, given: Mapping[str, Any], seed: int, *, rewards: bool = True
    ) -> None:
        """Load the class and check its methods.

        Args:
            name: Value of `task.name`.
            given: Settings that the user gave for the class.
            seed: Seed of the trial.
            rewards: True if the method `reward` is required. It is not needed if an environment
                gives rewards.

        Raises:
            ConfigError: If the class does not declare a given setting, or if a value is invalid.
            PluginError: If the class cannot be loaded or instantiated, or breaks the interface.
        """
        settings_class = _settings_class(name)
        settings = complete_settings(name, given)
        self._name = name
        with self._blamed("cannot be created"):
            arguments = [] if settings_class is None else [settings_class(**settings)]
            self._task: Any = _task_class(name)(*arguments, seed)
        for method in ("train_example", "eval_examples", *(("reward",) if rewards else ())):
            if not callable(getattr(self._task, method, None)):
                raise self._error(f"has no method {method}")
        self.stop = self._stop_strings()
        if self.train_example(0) != self.train_example(0):
            raise self._error(
                "two calls of train_example(0) gave different examples: an example must depend "
                "only on the seed and its index"
            )

    def train_example(self, prompt_index: int) -> Example:
        """Get a training example from the class and check it."""
        call = f"train_example({prompt_index})"
        with self._blamed(call):
            example = self._task.train_example(prompt_index)
        return self._checked(call, example)

    def eval_examples(self, count: int) -> list[Example]:
        """Get `count` held-out examples from the class and check them."""
        call = f"eval_examples({count})"
        with self._blamed(call):
            examples = list(self._task.eval_examples(count))
        if len(examples) != count:
            raise self._error(f"{call} gave {plural(len(examples), 'example')}")
        return [self._checked(call, example) for example in examples]

    @property
    def train_size(self) -> int | None:
        """Number of training examples in one pass, or None if the class states no number."""
        return self._size("train_size")

    @property
    def eval_size(self) -> int | None:
        """Number of held-out examples before they repeat, or None if the class states no number."""
        return self._size("eval_size")

    def _size(self, name: str) -> int | None:
        with self._blamed(name):
            size = getattr(self._task, name, None)
        if size is not None and (type(size) is not int or size < 1):
            raise self._error(f"{name} is {size!r:.40}; it must be an integer >= 1")
        return size

    def reward(self, response: str, ground_truth: JSONValue) -> Score:
        """Score a response. Exceptions that the class raises reach the caller unchanged."""
        return as_score(self._task.reward(response, ground_truth))

    def _stop_strings(self) -> tuple[str, ...]:
        with self._blamed("stop"):
            given = getattr(self._task, "stop", ())
        check = CHECKS["rollout.stop"]
        try:
            return check.convert(given)
        except (TypeError, ValueError):
            raise self._error(f"stop is {shown(given)}; it must be a list of strings") from None

    def _checked(self, call: str, example: Any) -> Example:
        if not isinstance(example, Example):
            kind = type(example).__name__
            raise self._error(
                f"{call} gave a value of type {kind}; it must be Example(prompt, ground_truth)"
            )
        mistake = mistake_in_prompt(example.prompt)
        if mistake is not None:
            raise self._error(f"{call} gave an example whose prompt {mistake}")
        with self._blamed(f"{call} gave a ground_truth that is not JSON"):
            json.dumps(example.ground_truth, allow_nan=False)
        with self._blamed(f"{call} gave columns that are not a dict of JSON values"):
            json.dumps(dict(example.columns), allow_nan=False)
        return example

    @contextlib.contextmanager
    def _blamed(self, what: str) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as error:
            raise self._error(f"{what}: {one_line(error)}") from error

    def _error(self, reason: str) -> PluginError:
        return PluginError(f"task.name={self._name}: {reason}")


def _task_class(name: str) -> type:
    found = load("task.name", name)
    if not isinstance(found, type):
        raise PluginError(f"task.name={name}: must be a class, got a {type(found).__name__}")
    return found


def _settings_class(name: str) -> Any:
    """Return the dataclass in which the class declares its settings, or None if there is none."""
    settings = getattr(_task_class(name), "Settings", None)
    if settings is None:
        return None
    if not isinstance(settings, type) or not is_dataclass(settings):
        raise PluginError(f"task.name={name}: Settings must be a dataclass")
    for item in fields(settings):
        if "check" not in item.metadata:
            raise PluginError(
                f"task.name={name}: the setting {item.name} must declare the values it accepts, "
                f"for example {item.name}: int = integer(1, minimum=0), from grpo_trainable.config"
            )
        if f"task.{item.name}" in COMMON:
            raise PluginError(
                f"task.name={name}: every task has a setting {item.name}; rename yours"
            )
    return settings
