"""What a trial reads besides its config, by SHA-256. All trials of an experiment, and a resumed
one, must read the same."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from grpo_trainable.config import CHECKS, GRPOConfig, TaskSettings
from grpo_trainable.models.directory import policy_files
from grpo_trainable.plugins import is_reference, source_of
from grpo_trainable.storage.digests import digest_of
from grpo_trainable.tasks.custom import declared_settings
from grpo_trainable.tasks.keyword import NOUNS_FILE
from grpo_trainable.tasks.math import problem_files
from grpo_trainable.tasks.templates import TEMPLATES

ASSETS = NOUNS_FILE.parent
_MIXED = "task.mix/"  # begins a name that goes on with a task's label and its setting


class InputChanged(RuntimeError):
    """A file is not what it was when the run started; the message names it and what to do."""


def input_files(config: GRPOConfig) -> dict[str, Path]:
    """Config key -> the file that it makes a trial read, a policy's with `/name` after the key.

    Shipped files are among them, since another version of the package may bring others. The file of
    an object of the user's is found without importing it; where it cannot be found (a built-in
    module, or one that its package makes up) it is left out. What it imports is not looked into.
    Only a user's task is imported, since its class says which of its settings are files.
    """
    return {key: Path(path) for key, path in _input_files(config)}


def users_objects(config: GRPOConfig) -> dict[str, str]:
    """Config key -> the reference to an object of the user's, where a key names one."""
    named = {key: config[key] for key, check in CHECKS.items() if check.refers_to == "object"}
    for label, part in config.parts.items():
        named |= {f"{_MIXED}{label}/{key}": part[f"task.{key}"] for key in ("name", "reward")}
    return {key: name for key, name in named.items() if name is not None and is_reference(name)}


def _input_files(config: GRPOConfig) -> Iterator[tuple[str, str | Path]]:
    """Files with a user's code come first, before any of it is imported."""
    for key, reference in users_objects(config).items():
        yield from _source(key, reference)
    for label, part in config.parts.items():
        for key, path in _task_files(part.task):
            yield key.replace("task.", f"{_MIXED}{label}/", 1), path
    if not config.parts:
        yield from _task_files(config.task)
    if config.model.chat_template not in CHECKS["model.chat_template"].choices:
        yield "model.chat_template", config.model.chat_template
    yield from _policy_files(config)
    if config.teacher is not None:
        for name, path in policy_files(config.teacher).items():
            yield f"loss.teacher/{name}", path


def _task_files(task: TaskSettings) -> Iterator[tuple[str, str | Path]]:
    return (_custom_task_files if task.is_custom else TASK_FILES[task.name])(task)


def _policy_files(config: GRPOConfig) -> Iterator[tuple[str, Path]]:
    for name, path in policy_files(config.model).items():
        yield f"model.path/{name}", path


def _keyword_files(task: TaskSettings) -> Iterator[tuple[str, str | Path]]:
    if task.train_file is None and task.eval_file is None:
        yield "task.keywords_file", task.keywords_file or NOUNS_FILE
    for key, path in (("task.train_file", task.train_file), ("task.eval_file", task.eval_file)):
        if path is not None:
            yield key, path


def _math_files(task: TaskSettings) -> Iterator[tuple[str, str | Path]]:
    for key, path in problem_files(task).items():
        yield f"task.{key}", path
    yield from _template_file(task)


def _template_file(task: TaskSettings) -> Iterator[tuple[str, str | Path]]:
    if task.template not in TEMPLATES:
        yield "task.template", task.template


def _no_files(task: TaskSettings) -> Iterator[tuple[str, str | Path]]:
    yield from ()


# What the built-in tasks read.
TASK_FILES = {
    "keyword": _keyword_files,
    "math": _math_files,
    "reasoning_gym": _template_file,
    "guess": _no_files,
    "calculator": _no_files,
    "control": _no_files,
}


def _custom_task_files(task: TaskSettings) -> Iterator[tuple[str, str | Path]]:
    """What the task's own settings refer to; directories are not looked into."""
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
    """Config key -> SHA-256 of its file; of some `keys` only.

    With `before`, which is what this function or `digests_of_all` said earlier, each file is
    compared as soon as it is read; one that only one of them has is not compared. A user's files
    with code come first, so a task's is compared before it is imported.

    Raises:
        ValueError: a file cannot be read, in one line that names it.
        InputChanged: a file has another content than `before`.
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
    path: Path
    sha256: str

    @property
    def ships(self) -> bool:
        """Whether it comes with the package; others are the user's own."""
        return ASSETS in self.path.parents


def inputs_of_all(configs: Iterable[GRPOConfig]) -> dict[str, Input]:
    """What several trials read together, by config key: where a key makes them read different
    files, each but the first stands under the key and its path.

    Raises:
        ValueError: a file cannot be read, in one line that names it.
    """
    together: dict[str, Input] = {}
    for config in configs:
        add_inputs(together, config)
    return together


def digests_of_all(configs: Iterable[GRPOConfig]) -> dict[str, str]:
    """The digests alone of `inputs_of_all`."""
    return {key: file.sha256 for key, file in inputs_of_all(configs).items()}


def add_inputs(together: dict[str, Input], config: GRPOConfig) -> None:
    """Adds one more trial to what `inputs_of_all` says of several."""
    files = input_files(config)
    for key, digest in input_digests(config).items():
        found = Input(files[key], digest)
        if together.setdefault(key, found).sha256 != digest:
            together[f"{key} {files[key]}"] = found


def refuse_changed_inputs(
    config: GRPOConfig, now: Mapping[str, str], before: Mapping[str, str]
) -> None:
    """Compares what `input_digests` says `now` with what it, or `digests_of_all`, said `before`; a
    key that only one of them has is not compared.

    Raises:
        InputChanged: a file has another content.
    """
    files = input_files(config)
    for key, digest in now.items():
        refuse_changed(key, files[key], digest, before)


def refuse_changed_policy(config: GRPOConfig, before: Mapping[str, str]) -> None:
    """Compares the files of the policy that a trial started from with what `input_digests` said
    `before`. No code of the user's is imported.

    Raises:
        InputChanged: a file has another content.
        ValueError: one cannot be read, in one line.
    """
    _digests(_policy_files(config), before)


def refuse_changed(key: str, path: Path, digest: str, before: Mapping[str, str]) -> None:
    """Compares the digest of one file with what `input_digests` or `digests_of_all` said `before`.

    Raises:
        InputChanged: it has another content.
    """
    if before.get(f"{key} {path}", before.get(key, digest)) == digest:
        return
    ships = Input(path, digest).ships
    old = "install the version of grpo-trainable" if ships else "put the file back"
    raise InputChanged(
        f"{key}: {path} is not what it was when this run started; {old} that it started with, or "
        "start a new run"
    )
