"""Settings as plain data, before `GRPOConfig.from_dict` checks them."""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from grpo_trainable.config.built_in_tasks import MIX
from grpo_trainable.config.defaults import GIVEN, MODEL, TASKS, TEMPLATES
from grpo_trainable.config.foreign_names import PAGE, ForeignName
from grpo_trainable.config.mix import Entry, mix_of, mix_text, with_absolute_paths
from grpo_trainable.config.reward_kinds import with_absolute_sources
from grpo_trainable.config.schema import CHECKS, DEFAULTS, SECTIONS, TRL, VERL
from grpo_trainable.config.task import CommonTaskSettings
from grpo_trainable.config.values import (
    Check,
    ConfigError,
    checks_of,
    converted,
    is_path,
    shown,
)
from grpo_trainable.models.hf.json_files import ModelFacts, facts_of, is_hub_id
from grpo_trainable.plugins import is_reference

# Keys of the section `task` that every task has.
_OF_ALL_TASKS = checks_of(CommonTaskSettings, "task.")


def parse_assignment(
    text: str, checks: Mapping[str, Check] = CHECKS, *, own_task: bool = False
) -> tuple[str, Any]:
    """Parse an assignment of `--set`: `optim.lr=1e-3` gives `("optim.lr", 0.001)`.

    The value of a key that takes a string is returned as given, unless it starts with a quotation
    mark. All other values are parsed as JSON. `none` and `null` give None, unless the key takes a
    string and may not be none. `GRPOConfig.from_dict` checks the value later.

    Args:
        text: The assignment.
        checks: The checks of the known keys.
        own_task: If True, accept any key of the section `task`, because the task is a user's class,
            which declares its own settings.

    Raises:
        ConfigError: `text` is not an assignment, or the key is not in `checks`.
    """
    key, equals, raw = (part.strip() for part in text.partition("="))
    if not equals or not key:
        raise ConfigError(f"{shown(text)}: must be KEY=VALUE, for example optim.lr=1e-4")
    if key in SECTIONS:
        names = ", ".join(name for name in checks if name.startswith(f"{key}."))
        raise ConfigError(f"{key}={shown(raw)}: is a section; set one of {names}")
    is_own = own_task and key.startswith("task.") and key not in _OF_ALL_TASKS
    if key not in checks and not is_own:
        raise unknown_key(key, checks)
    is_text = not is_own and checks[key].is_text
    if raw.lower() in ("none", "null") and not (is_text and not checks[key].optional):
        return key, None
    if is_text and not raw.startswith('"'):
        return key, raw
    if raw.lower() in ("true", "false"):
        return key, raw.lower() == "true"
    # JSON accepts neither ".5" nor "+1", but float accepts both. A value that JSON and float reject
    # stays a string, so the error shows the value as given.
    for read in (json.loads, float):
        try:
            return key, read(raw)
        except (ValueError, RecursionError):
            continue
    return key, raw


def parse_assignments(texts: Iterable[str], checks: Mapping[str, Check] = CHECKS) -> dict[str, Any]:
    """Parse all assignments of a command line, and return the values by dotted key.

    Args:
        texts: The assignments.
        checks: The checks of the known keys.

    Raises:
        ConfigError: `parse_assignment` rejects an assignment, or a key is given twice.
    """
    given: dict[str, Any] = {}
    for text in texts:
        key, value = parse_assignment(text, checks)
        if key in given:
            both = f"--set arm={given[key]},{value} runs both arms"
            raise ConfigError(
                f"{key}={shown(value)}: --set {key}={shown(given[key])} is given too; "
                f"{both if key == 'arm' else 'remove one of the two'}"
            )
        given[key] = value
    return given


def set_dotted(mapping: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key to `value` in nested dicts, in place. Create missing sections."""
    *sections, leaf = key.split(".")
    for name in sections:
        mapping = mapping.setdefault(name, {})
        if not isinstance(mapping, dict) or "grid_search" in mapping:
            raise ConfigError(
                f"{key}={shown(value)}: {name} is searched as a whole, so its keys cannot be set "
                "separately"
            )
    mapping[leaf] = value


def flatten(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of each dotted key in a nested config."""
    flat: dict[str, Any] = {}
    for name, value in mapping.items():
        if isinstance(value, Mapping):
            flat.update({f"{name}.{key}": leaf for key, leaf in flatten(value).items()})
        else:
            flat[name] = value
    return flat


def make_absolute(
    config: Mapping[str, Any],
    base_dir: str | os.PathLike[str],
    checks: Mapping[str, Check] = CHECKS,
) -> dict[str, Any]:
    """Return a copy in which paths relative to `base_dir` are absolute.

    Call this on the driver, because Tune changes the working directory of a trial's process.

    Args:
        config: Nested settings.
        base_dir: Base directory for relative paths.
        checks: The checks of the keys. They say whether a value is a path or names a Python file.
    """

    def settled(key: str, value: Any) -> Any:
        check = checks.get(key)
        value = _plain(value)
        if check is not None and check.refers_to == "tasks" and value is not None:
            return with_absolute_paths(value, lambda entry: settled("task", entry))
        if check is not None and check.refers_to == "rewards" and value is not None:
            return with_absolute_sources(value, of_function=with_absolute_file, of_path=absolute)
        if isinstance(value, Mapping):
            return {name: settled(f"{key}.{name}", item) for name, item in value.items()}
        # A value that is empty or not a string is returned unchanged. `from_dict` rejects it and
        # names the key.
        if check is None or not isinstance(value, str) or not value.strip():
            return value
        if check.refers_to == "path":
            return absolute(value) if is_path(value) or not check.choices else value
        if check.refers_to == "model":
            on_hub = is_hub_id(value) and not os.path.isdir(absolute(value))
            return value if on_hub else absolute(value)
        return with_absolute_file(value) if check.refers_to == "object" else value

    def with_absolute_file(reference: str) -> str:
        file, _, name = reference.rpartition(":")
        return f"{absolute(file)}:{name}" if file.endswith(".py") else reference

    def absolute(path: str) -> str:
        return os.path.abspath(os.path.join(base_dir, os.path.expanduser(path)))

    return {name: settled(name, value) for name, value in config.items()}


def started_in() -> str:
    """Return the directory in which Ray was started, the base of a user's relative paths.

    Tune moves the process of a trial to another directory.
    """
    return os.environ.get("TUNE_ORIG_WORKING_DIR", os.getcwd())


# The entry of nested settings that holds strings such as "placement=disaggregated,lag=1".
SET = "set"


def expand_set(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of nested plain data in which the settings below `set` have their own keys.

    `{"set": {"actors": "placement=disaggregated,lag=1"}}` gives `{"placement": "disaggregated",
    "lag": 1}`. So a search can choose among combinations of settings that are valid together.

    Raises:
        ConfigError: `data` is not a mapping, `set` is not a mapping of strings with the syntax of
            `--set`, or a setting is given twice.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"config={shown(data)}: must be a mapping")
    copied = {
        key: {name: _plain(leaf) for name, leaf in value.items()}
        if isinstance(value, Mapping)
        else value
        for key, value in data.items()
    }
    texts = copied.pop(SET, {})
    example = f'such as {{"{SET}": {{"actors": "placement=disaggregated,lag=1"}}}}'
    if not isinstance(texts, Mapping):
        raise ConfigError(f"{SET}={shown(texts)}: must be a mapping of strings, {example}")
    assignments: list[tuple[str, str]] = []
    for name, text in texts.items():
        where = f"{SET}.{shown(name)}"
        if not isinstance(text, str):
            raise ConfigError(f"{where}={shown(text)}: must be a string, {example}")
        # A comma before a key separates two settings; other commas belong to a value.
        split = re.split(r",(?=\s*[A-Za-z_][\w.]*=)", text)
        assignments += [(where, assignment) for assignment in split]
    # The name of the task comes first, because a user's task has its own keys.
    assignments.sort(key=lambda pair: pair[1].partition("=")[0].strip() != "task.name")
    for where, assignment in assignments:
        try:
            key, value = parse_assignment(assignment, own_task=_has_own_task(copied))
        except ConfigError as error:
            raise ConfigError(f"{error} (in {where})") from None
        if key in flatten(copied):
            raise ConfigError(f"{key}={shown(value)} (in {where}): {key} is given twice")
        set_dotted(copied, key, value)
    return copied


def _plain(value: Any) -> Any:
    """Return a `pathlib.Path` as text, and any other value unchanged."""
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _has_own_task(data: Mapping[str, Any]) -> bool:
    """Return True if the task in nested plain data is a user's class."""
    task = data.get("task")
    name = task.get("name") if isinstance(task, Mapping) else None
    return isinstance(name, str) and is_reference(name)


def unknown_key(key: str, checks: Mapping[str, Check] = CHECKS) -> ConfigError:
    """Return the error for an unknown key.

    The error proposes the nearest key in `checks`, or our name for a key of TRL or verl.
    """
    section, _, leaf = key.rpartition(".")
    by_leaf: dict[str, list[str]] = {}
    for name in checks:
        by_leaf.setdefault(name.rpartition(".")[2], []).append(name)
    siblings = {
        name.rpartition(".")[2]: [name] for name in checks if name.startswith(f"{section}.")
    }
    sections = {} if section else {name: [name] for name in SECTIONS}

    def close(names: dict[str, list[str]], text: str = leaf, cutoff: float = 0.75) -> list[str]:
        matches = difflib.get_close_matches(text, names, n=1, cutoff=cutoff)
        return names[matches[0]] if matches else []

    # Try, in this order: a name from another library, a correct name in the wrong section, and a
    # misspelt name. If the section is unknown, its name must be similar too.
    foreign = advice_for(key)
    near = by_leaf.get(leaf) or close(siblings)
    if section and not siblings:
        near = near or close({name: [name] for name in checks}, key)
    else:
        near = near or close(by_leaf) or close(sections, cutoff=0.65)
    if foreign is not None:
        advice = foreign
    elif near:
        advice = f"did you mean {' or '.join(near)}?"
    elif siblings:
        advice = "valid: " + ", ".join(f"{section}.{name}" for name in siblings)
    else:
        top = [name for name in DEFAULTS if name not in SECTIONS]
        advice = "valid: " + ", ".join([*top, *(f"{name}.…" for name in SECTIONS)])
    return ConfigError(f"{shown(key)}: unknown key; {advice}")


def foreign_name(key: str) -> ForeignName | None:
    """Return the setting of TRL or verl that a key names, or None."""
    return VERL.get(key) or TRL.get(key.rpartition(".")[2])


def advice_for_option(option: str) -> str | None:
    """Return advice for an unknown option that names a setting of this package, TRL or verl.

    Return None for other options.
    """
    name = option.removeprefix("--").partition("=")[0].replace("-", "_")
    keys = [key for key in CHECKS if name in (key, key.rpartition(".")[2])]
    found = None if keys else foreign_name(name)
    if found is not None and not found.ours:
        return found.advice
    if found is not None:
        assigned = (ours if "=" in ours else f"{ours}=VALUE" for ours in found.ours)
        return f"{found.advice}; write {' '.join(f'--set {each}' for each in assigned)}"
    if keys:
        return f"write {' or '.join(f'--set {key}=VALUE' for key in keys)}"
    return None


def advice_for(key: str) -> str | None:
    """Return advice, such as our name, for a key of TRL or verl, or None for any other key.

    A name from TRL is also recognised inside one of our sections, as in `loss.beta`.
    """
    found = foreign_name(key)
    if found is not None:
        return found.advice
    if any(name.startswith(f"{key}.") for name in VERL):
        return f"it is a section of verl's config; {PAGE} lists our names for its keys"
    return None


def with_defaults(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested settings, with missing keys filled in from the defaults of task and model.

    A missing key without such a default stays missing.
    """
    filled = dict(data)
    task = data.get("task")
    if isinstance(task, Mapping) and task.get("mix") is not None and task.get("name") is None:
        filled["task"] = {**task, "name": MIX}
    given = Given(dict(filled))
    for key in CHECKS:
        section, _, leaf = key.rpartition(".")
        own = filled.get(section, {})
        if not given.has(key) and isinstance(own, Mapping):
            default = given.default_of(key)
            if default is not None:
                filled[section] = {leaf: default[0], **own}
    return _with_defaults_in_mix(filled, given)


def _with_defaults_in_mix(filled: dict[str, Any], given: Given) -> dict[str, Any]:
    """Add to each task of a mix the defaults that depend on the Hugging Face model."""
    task = filled.get("task")
    if not isinstance(task, Mapping):
        return filled
    entries, added = _entries(task.get("mix")), False
    for entry in entries.values():
        alone = Given({**filled, "task": dict(entry)}, same_model=given)
        for key in CHECKS:
            section, _, leaf = key.rpartition(".")
            if section == "task" and leaf not in entry and CHECKS[key].of_models:
                default = alone.default_of(key)
                if default is not None:
                    entry[leaf], added = default[0], True
    return {**filled, "task": {**task, "mix": mix_text(entries)}} if added else filled


def _entries(mix: Any) -> dict[str, Entry]:
    """Return the entries of a mix. An invalid mix has no entries, because it is rejected later."""
    try:
        return mix_of(mix)
    except (TypeError, ValueError, RecursionError):
        return {}


class Given:
    """Settings that are given as nested plain data, and the default of each missing key.

    An invalid value counts as not given. It is rejected later, when its key is checked.
    """

    def __init__(self, data: Mapping[str, Any], same_model: Given | None = None) -> None:
        """Keep nested plain data.

        Args:
            data: The settings.
            same_model: Other settings with the same model as `data`. The files of the model are
                then read only once.
        """
        self._data = data
        self._same_model = same_model

    def __getitem__(self, key: str) -> Any:
        """Return the value of a dotted key, or of a name from `config.defaults` such as `TASKS`."""
        if key == TASKS:
            return frozenset(task["task.name"] for task in self._tasks)
        if key == TEMPLATES:
            return frozenset(
                task[form]
                for form in ("task.template", "task.code_in")
                for task in self._tasks
                if not CHECKS[form].unmet(task)
            )
        if key == MODEL:
            return self._facts
        if key.startswith(GIVEN):
            return self._valid(key.removeprefix(GIVEN), None)
        missing = object()
        value = self._valid(key, missing)
        if value is not missing:
            return value
        default = self.default_of(key)
        return CHECKS[key].default if default is None else default[0]

    def _valid(self, key: str, otherwise: Any) -> Any:
        """Return the given value of a key, or `otherwise` if it is missing or invalid."""
        if self.has(key):
            with contextlib.suppress(ConfigError):
                return converted(key, self._section_of(key)[key.rpartition(".")[2]], CHECKS[key])
        return otherwise

    def without(self, key: str) -> Given:
        """Return a copy of these settings without one key."""
        section, _, leaf = key.rpartition(".")
        others = {name: value for name, value in self._section_of(key).items() if name != leaf}
        return Given({**self._data, section: others}, same_model=self)

    def has(self, key: str) -> bool:
        """Return True if the key is given, even if its value is invalid."""
        return key.rpartition(".")[2] in self._section_of(key)

    def default_of(self, key: str) -> tuple[Any, str] | None:
        """Return a key's default under the other settings, and the reason for it (may be empty).

        If several defaults apply, the first one counts. If none applies, return None: the key then
        has its general default.
        """
        check = CHECKS[key]
        for default in check.default_by:
            if default.moment != "absent" or (default.because and check.unmet(self)):
                continue
            value = default.beside(self)
            if value is not None:
                return value, default.because
        return None

    @cached_property
    def _facts(self) -> ModelFacts | None:
        if self._same_model is not None:
            return self._same_model._facts
        path = self["model.path"]
        return None if path is None else facts_of(path)

    def _section_of(self, key: str) -> Mapping[str, Any]:
        section = key.rpartition(".")[0]
        found = self._data.get(section, {}) if section else self._data
        return found if isinstance(found, Mapping) else {}

    @cached_property
    def _tasks(self) -> list[Given]:
        """One copy of these settings per task of the mix, or only this object if no mix is set."""
        mixed = _entries(self._section_of("task.mix").get("mix")).values()
        alone = [Given({**self._data, "task": entry}, same_model=self) for entry in mixed]
        return alone or [self]
