"""What a trial reads besides its config, by SHA-256: a resumed run must read the same again."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

from grpo_trainable.config import CHECKS, GRPOConfig, TaskSettings
from grpo_trainable.models.store import POLICY_FILES, SHIPPED_POLICY, policy_directory
from grpo_trainable.plugins import is_reference, source_of
from grpo_trainable.tasks.custom import declared_settings
from grpo_trainable.tasks.keyword import NOUNS_FILE
from grpo_trainable.tasks.math import problem_files
from grpo_trainable.tasks.templates import TEMPLATES

CHUNK_BYTES = 1 << 20
ASSETS = NOUNS_FILE.parent


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
    return {key: name for key, name in named.items() if name is not None and is_reference(name)}


def _input_files(config: GRPOConfig) -> Iterator[tuple[str, str | Path]]:
    task = config.task
    yield from (_custom_task_files if task.is_custom else TASK_FILES[task.name])(task)
    for key, reference in users_objects(config).items():
        yield from _source(key, reference)
    directory = policy_directory(config.model.preset, config.model.path)
    for name in ("tokenizer.json",) if directory is None else POLICY_FILES:
        yield f"model.path/{name}", (directory or SHIPPED_POLICY) / name


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


# What the built-in tasks read.
TASK_FILES = {
    "keyword": _keyword_files,
    "math": _math_files,
    "reasoning_gym": _template_file,
}


def _custom_task_files(task: TaskSettings) -> Iterator[tuple[str, str | Path]]:
    """What the task's own settings refer to; directories are not looked into."""
    own = dict(task.own)
    for key, check in declared_settings(task.name).items():
        value = own.get(key.removeprefix("task."))
        if check.refers_to == "path" and value is not None and not os.path.isdir(value):
            yield key, value
        elif check.refers_to == "object" and value is not None and is_reference(value):
            yield from _source(key, value)


def _source(key: str, reference: str) -> Iterator[tuple[str, str]]:
    source = source_of(reference)
    if source is not None:
        yield key, source


def input_digests(config: GRPOConfig) -> dict[str, str]:
    """Config key -> SHA-256 of its file.

    Raises:
        ValueError: a file cannot be read, in one line that names it.
    """
    digests = {}
    for key, path in input_files(config).items():
        try:
            with path.open("rb") as file:
                digest = hashlib.sha256()
                for chunk in iter(partial(file.read, CHUNK_BYTES), b""):
                    digest.update(chunk)
                digests[key] = digest.hexdigest()
        except OSError as error:
            raise ValueError(f"{key}: {path} cannot be read ({error.strerror})") from None
    return digests


def digests_of_all(configs: Iterable[GRPOConfig]) -> dict[str, str]:
    """`input_digests` of several trials together: where a key makes them read different files, each
    but the first stands under the key and its path.

    Raises:
        ValueError: a file cannot be read, in one line that names it.
    """
    together: dict[str, str] = {}
    for config in configs:
        files = input_files(config)
        for key, digest in input_digests(config).items():
            if together.setdefault(key, digest) != digest:
                together[f"{key} {files[key]}"] = digest
    return together


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
        if before.get(f"{key} {files[key]}", before.get(key, digest)) != digest:
            shipped = ASSETS in files[key].parents
            old = "install the version of grpo-trainable" if shipped else "put the file back"
            raise InputChanged(
                f"{key}: {files[key]} is not what it was when this run started; {old} that it "
                "started with, or start a new run"
            )
