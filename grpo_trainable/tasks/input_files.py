"""Files that a trial reads besides its config, identified by SHA-256.

A file must have the same content in all trials of an experiment, and when a trial is resumed.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from grpo_trainable.config import CHECKS, GRPOConfig, TaskSettings
from grpo_trainable.config.reward_kinds import FUNCTION, JUDGE, MODEL, Reward, rewards_of
from grpo_trainable.models.directory import policy_files
from grpo_trainable.models.hf.adapter import adapter_files
from grpo_trainable.models.hf.files import reward_model_files
from grpo_trainable.plugins import is_reference, source_of
from grpo_trainable.storage.digests import digest_of
from grpo_trainable.tasks.custom import declared_settings
from grpo_trainable.tasks.keyword import NOUNS_FILE
from grpo_trainable.tasks.math import problem_files
from grpo_trainable.tasks.row_files import data_files
from grpo_trainable.tasks.templates import TEMPLATES

ASSETS = NOUNS_FILE.parent
_MIXED = "task.mix/"  # prefix of `task.mix/LABEL/SETTING`


class InputChanged(RuntimeError):
    """A file has changed since the run started. The message names the file and says what to do."""


def input_files(config: GRPOConfig) -> dict[str, Path]:
    """Return a trial's input files, keyed by config key.

    The key of a file in a directory, such as a policy, ends in `/` and the name of the file.

    The result includes the files that ship with the package, because another version of the package
    may ship different files. It excludes files that cannot be found, such as the files of built-in
    modules and of modules that a package creates at run time. It also excludes the modules that a
    user's code imports.

    A setting may name a user's function or class. The file that defines the function or class is
    found without importing it. Only the class of a user's task is imported, because it declares
    which of its settings are files.
    """
    return {key: Path(path) for key, path in _input_files(config)}


def users_objects(config: GRPOConfig) -> dict[str, str]:
    """Return the references to a user's functions and classes, keyed by config key."""
    named = {key: config[key] for key, check in CHECKS.items() if check.refers_to == "object"}
    named |= {f"{_MIXED}{label}/name": part.task.name for label, part in config.parts.items()}
    own = {key: name for key, name in named.items() if name is not None and is_reference(name)}
    return own | users_rewards(config)


def users_rewards(config: GRPOConfig) -> dict[str, str]:
    """Return the references to a user's reward functions, keyed by config key."""
    return {key: reward.source for key, reward in _rewards(config) if reward.kind == FUNCTION}


def _rewards(config: GRPOConfig) -> Iterator[tuple[str, Reward]]:
    """Yield (config key, reward) pairs. If a task has several rewards, the keys end in /NUMBER."""
    settings = {"task.reward": config.task.reward}
    settings |= {f"{_MIXED}{label}/reward": one.task.reward for label, one in config.parts.items()}
    for key, setting in settings.items():
        rewards = rewards_of(setting)
        for number, reward in enumerate(rewards, start=1):
            yield key if len(rewards) == 1 else f"{key}/{number}", reward


def _input_files(config: GRPOConfig) -> Iterator[tuple[str, str | Path]]:
    """Yield (config key, file) pairs. Files of user code are yielded before they are imported."""
    for key, reference in users_objects(config).items():
        yield from _source(key, reference)
    for label, part in config.parts.items():
        for key, path in _task_files(part.task):
            yield key.replace("task.", f"{_MIXED}{label}/", 1), path
    if not config.parts:
        yield from _task_files(config.task)
    if config.model.chat_template not in CHECKS["model.chat_template"].choices:
        yield "model.chat_template", config.model.chat_template
    yield from _judge_files(config)
    yield from _reward_model_files(config)
    yield from _policy_files(config)
    if config.teacher is not None:
        for name, path in policy_files(config.teacher).items():
            yield f"loss.teacher/{name}", path


def _task_files(task: TaskSettings) -> Iterator[tuple[str, str | Path]]:
    return (_custom_task_files if task.is_custom else TASK_FILES[task.name])(task)


def _policy_files(config: GRPOConfig) -> Iterator[tuple[str, Path]]:
    for name, path in policy_files(config.model).items():
        yield f"model.path/{name}", path
    if config.model.adapter is not None:
        for name, path in adapter_files(Path(config.model.adapter)).items():
            yield f"model.adapter/{name}", path


def _judge_files(config: GRPOConfig) -> Iterator[tuple[str, str]]:
    for key, reward in _rewards(config):
        if reward.kind == JUDGE:
            yield key, reward.source


def _reward_model_files(config: GRPOConfig) -> Iterator[tuple[str, Path]]:
    for key, reward in _rewards(config):
        if reward.kind != MODEL:
            continue
        directory = Path(reward.source)
        try:
            names = reward_model_files(directory)
        except ValueError as error:
            raise ValueError(f"{key}={MODEL}:{error}") from None
        yield from ((f"{key}/{name}", directory / name) for name in names)


def _keyword_files(task: TaskSettings) -> Iterator[tuple[str, str | Path]]:
    if task.train_file is None:
        yield "task.keywords_file", task.keywords_file or NOUNS_FILE
    yield from _prompt_files(task)


def _prompt_files(task: TaskSettings) -> Iterator[tuple[str, str | Path]]:
    for key, path in (("train_file", task.train_file), ("eval_file", task.eval_file)):
        if path is not None:
            yield from data_files(key, path).items()


def _math_files(task: TaskSettings) -> Iterator[tuple[str, str | Path]]:
    for key, path in problem_files(task).items():
        yield from data_files(key, path).items()
    yield from _template_file(task)


def _template_file(task: TaskSettings) -> Iterator[tuple[str, str | Path]]:
    if task.template not in TEMPLATES:
        yield "task.template", task.template


def _no_files(task: TaskSettings) -> Iterator[tuple[str, str | Path]]:
    yield from ()


# `task.name` -> the files that a built-in task reads.
TASK_FILES = {
    "keyword": _keyword_files,
    "math": _math_files,
    "reasoning_gym": _template_file,
    "code": _prompt_files,
    "guess": _no_files,
    "calculator": _no_files,
    "control": _no_files,
}


def _custom_task_files(task: TaskSettings) -> Iterator[tuple[str, str | Path]]:
    """Yield the files to which the settings of a user's task refer. Directories are skipped."""
    own = dict(task.own)
    for key, check in declared_settings(task.name).items():
        value = own.get(key.removeprefix("task."))
        if value is None or value in check.choices:
            continue
        if check.refers_to == "path" and not os.path.isdir(value):
            yield key, value
        elif check.refers_to == "object" and is_reference(value):
            yield from _source(key, value)


def _source(key: str, reference: str) -> Iterator[tuple[str, str]]:
    source = source_of(reference)
    if source is not None:
        yield key, source


def input_digests(
    config: GRPOConfig,
    before: Mapping[str, str] | None = None,
    keys: Collection[str] | None = None,
) -> dict[str, str]:
    """Return the SHA-256 of each file that a trial reads, keyed by config key.

    Files of user code come first, so the file of a task is compared before it is imported.

    Args:
        config: Config of a trial.
        before: Earlier result of this function or of `digests_of_all`. Each file is compared with
            this result as soon as the file is read. Keys that are missing in either result are not
            compared.
        keys: Keys to include. By default all keys are included.

    Raises:
        ValueError: If a file cannot be read. The message is one line that names the file.
        InputChanged: If a file differs from `before`.
    """
    files = _input_files(config)
    if keys is not None:
        files = (file for file in files if file[0] in keys)
    return _digests(files, before or {})


def _digests(files: Iterable[tuple[str, str | Path]], before: Mapping[str, str]) -> dict[str, str]:
    digests = {}
    for key, path in files:
        digests[key] = digest_of(key, Path(path))
        refuse_changed(key, Path(path), digests[key], before)
    return digests


class Input(NamedTuple):
    """A file that a trial reads, with its digest."""

    path: Path
    sha256: str

    @property
    def ships(self) -> bool:
        """Return True if the file ships with the package, and False for a user's file."""
        return ASSETS in self.path.parents


def inputs_of_all(configs: Iterable[GRPOConfig]) -> dict[str, Input]:
    """Return the files that several trials read, keyed by config key.

    If trials read different files for one key, the plain key refers to the first of these files.
    Each other file has a longer key: the plain key, a space and the path of the file.

    Raises:
        ValueError: If a file cannot be read. The message is one line that names the file.
    """
    together: dict[str, Input] = {}
    for config in configs:
        add_inputs(together, config)
    return together


def digests_of_all(configs: Iterable[GRPOConfig]) -> dict[str, str]:
    """Return the result of `inputs_of_all` with only the digest of each file."""
    return {key: file.sha256 for key, file in inputs_of_all(configs).items()}


def add_inputs(together: dict[str, Input], config: GRPOConfig) -> None:
    """Add the files of one trial to a result of `inputs_of_all`."""
    files = input_files(config)
    for key, digest in input_digests(config).items():
        found = Input(files[key], digest)
        if together.setdefault(key, found).sha256 != digest:
            together[f"{key} {files[key]}"] = found


def refuse_changed_inputs(
    config: GRPOConfig, now: Mapping[str, str], before: Mapping[str, str]
) -> None:
    """Check that no file that a trial reads has changed.

    Args:
        config: Config of the trial.
        now: Current result of `input_digests`.
        before: Earlier result of `input_digests` or `digests_of_all`. Keys that are missing in
            either result are not compared.

    Raises:
        InputChanged: If the content of a file has changed.
    """
    files = input_files(config)
    for key, digest in now.items():
        refuse_changed(key, files[key], digest, before)


def refuse_changed_policy(config: GRPOConfig, before: Mapping[str, str]) -> None:
    """Check that the files of a trial's initial policy have not changed.

    No user code is imported. `before` is an earlier result of `input_digests`.

    Raises:
        InputChanged: If the content of a file has changed.
        ValueError: If a file cannot be read. The message is one line.
    """
    _digests(_policy_files(config), before)


def refuse_changed(key: str, path: Path, digest: str, before: Mapping[str, str]) -> None:
    """Compare a file's digest with an earlier result of `input_digests` or `digests_of_all`.

    Raises:
        InputChanged: If the content of the file has changed.
    """
    if before.get(f"{key} {path}", before.get(key, digest)) == digest:
        return
    ships = Input(path, digest).ships
    old = "install the version of grpo-trainable" if ships else "put back the file"
    raise InputChanged(
        f"{key}: {path} has changed since this run started; {old} that the run started with, or "
        "start a new run"
    )
