"""Finds a trial's files, and cuts them when the trial starts again from a checkpoint.

Everything is written once, straight to the storage path, a round at a time: it can be read while
the trial runs, and nothing of it waits in Ray's session directory when the driver is killed. Where
that path is in an object store, `callbacks.mirror` brings there what is written here. What lies
after the checkpoint that a trial went on from is removed when the trial writes it again.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq

from grpo_trainable.config import GRPOConfig, mix_of
from grpo_trainable.storage.atomic import replacing
from grpo_trainable.storage.object_store import Place, StoredPath
from grpo_trainable.storage.trial_storage import place
from grpo_trainable.telemetry.metrics import names_with

PART = re.compile(r"part-(\d{8})\.parquet")
# From the trial's directory. A deeper one is a copy that somebody has put aside.
STORED_PART = re.compile(rf"[^/]+/{PART.pattern}")

_verbose = False


def is_local(trial: Any) -> bool:
    """Whether the storage path is a directory of this machine."""
    return isinstance(trial.storage.storage_filesystem, pyarrow.fs.LocalFileSystem)


def trial_place(trial: Any) -> Place:
    """The trial's directory in the storage path."""
    return place(trial.storage.storage_filesystem, trial.path)


def trial_directory(trial: Any) -> Path:
    """The directory to write a trial's files to: its own, or the one that is brought to its own in
    an object store. Tune copies `trial.local_path` there again and again, so it is another."""
    own = trial_place(trial)
    if not isinstance(own, Path):
        staging = Path(trial.local_path)
        own = staging.parent.with_name(f"{staging.parent.name}-mirrored") / staging.name
    own.mkdir(parents=True, exist_ok=True)
    return own


def error_line(trial: Any) -> str:
    """Return the last line of how a trial failed last."""
    try:
        lines = Path(trial.error_file or "").read_text(errors="replace").strip().splitlines()
    except OSError as error:
        return f"its error file cannot be read ({error.strerror})"
    return lines[-1].strip() if lines else "its error file is empty"


def continued_file(trial: Any, name: str) -> Path:
    """A file that a trial goes on writing: as it is here, else as an object store has it. It need
    not exist."""
    path, own = trial_directory(trial) / name, trial_place(trial)
    if not path.exists() and isinstance(own, StoredPath) and (own / name).exists():
        with replacing(path) as file:  # a part of it must not be brought to the store
            file.write((own / name).read_bytes())
    detach(path)
    return path


def continued_files(trial: Any, pattern: str) -> list[Path]:
    """Every file of a trial whose name matches, here or in an object store, as `continued_file`
    gives it."""
    own = trial_place(trial)
    here = [path.name for path in trial_directory(trial).glob(pattern)]
    stored = own.names() if isinstance(own, StoredPath) else []
    names = {*here, *(name for name in stored if fnmatch(name, pattern))}
    return [continued_file(trial, name) for name in sorted(names)]


def parts_after(trial: StoredPath, last: int) -> list[str]:
    """List the Parquet parts of later iterations that a trial's directory in an object store has,
    by their paths from there."""
    found = ((name, STORED_PART.fullmatch(name)) for name in trial.files())
    return [name for name, part in found if part is not None and int(part[1]) > last]


def detach(path: Path) -> None:
    """Replaces a link, symbolic or hard, by a copy of what it leads to. An experiment may have been
    copied as links: going on with the copy must not cut or lengthen the files of the original."""
    if path.is_symlink() or (path.exists() and path.stat().st_nlink > 1):
        content = path.read_bytes() if path.exists() else b""
        with replacing(path) as file:
            file.write(content)


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a `result.json`, without those whose writing was cut short; none if there is no
    file."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                row = json.loads(line)
                row["training_iteration"]
            except (ValueError, LookupError, TypeError):
                continue
            yield row


def config_of(trial: Any) -> GRPOConfig:
    """A trial's config with its defaults."""
    return GRPOConfig.from_dict(trial.config)


def mixed_tasks(trial: Any) -> list[str]:
    """The labels of the tasks that a trial mixes; none where it has one task."""
    task = trial.config.get("task") or {}
    return list(mix_of(task.get("mix")))


def names_of(trial: Any) -> frozenset[str]:
    """The names of a trial's metrics."""
    return names_with(mixed_tasks(trial))


def label(trial: Any) -> str:
    """The name of a trial in messages: `arm/seed`."""
    config = config_of(trial)
    return f"{config.arm}/{config.seed}"


def set_verbose(on: bool) -> None:
    """Have callbacks of this process print more than the console does.

    No callback keeps this: Tune pickles callbacks with the experiment, and a resumed experiment may
    be more or less verbose than the first command.
    """
    global _verbose
    _verbose = on


def is_verbose(trial: Any) -> bool:
    """Return True where the command or the trial's `callbacks.verbose` asks for more lines."""
    return _verbose or config_of(trial).callbacks.verbose


def cut_lines(path: Path, last: int, iteration: Callable[[bytes], int | None]) -> None:
    """Keep the lines before the first whose iteration is greater than `last`.

    What cannot be read at the end goes as well: its writing was cut short. `iteration` is None for
    a line that belongs to none.
    """
    if not path.exists():
        return
    end = kept = 0
    with path.open("rb") as file:
        for line in file:
            end += len(line)
            try:
                number = iteration(line) if line.endswith(b"\n") else None
            except (ValueError, LookupError, TypeError):
                continue
            if number is not None and number > last:
                break
            kept = end if line.endswith(b"\n") else kept
    os.truncate(path, kept)


def write_part(directory: Path, iteration: int, table: pa.Table) -> None:
    """Writes one Parquet file for a round, in place of an earlier one for the same round."""
    directory.mkdir(parents=True, exist_ok=True)
    with replacing(directory / f"part-{iteration:08d}.parquet") as file:
        pq.write_table(table, file, compression="zstd")


def read_parts(trial: Any, kind: str, columns: list[str]) -> Iterator[pa.Table]:
    """Yields what `write_part` wrote, in order. When a trial goes on from a checkpoint on another
    machine, the first parts may be in a remote storage only."""
    local = sorted((trial_directory(trial) / kind).glob("part-*.parquet"))
    if not is_local(trial):
        storage = trial.storage.storage_filesystem
        stored = pyarrow.fs.FileSelector(f"{trial.path}/{kind}", allow_not_found=True)
        for file in sorted(storage.get_file_info(stored), key=lambda file: file.base_name):
            if PART.fullmatch(file.base_name) and (not local or file.base_name < local[0].name):
                yield pq.read_table(file.path, filesystem=storage, columns=columns)
    for path in local:
        yield pq.read_table(path, columns=columns)


def cut_parts(directory: Path, last: int) -> None:
    """Removes the parts of later iterations, and what a killed `write_part` left."""
    for path in [*directory.glob("part-*"), *directory.glob(".part-*")]:
        match = PART.fullmatch(path.name)
        if match is None or int(match[1]) > last:
            path.unlink()
