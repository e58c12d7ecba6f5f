"""Find a trial's files, and cut rounds that the trial repeats after a restart.

Callbacks write everything once, directly to the storage path, one round at a time. So files can be
read while the trial runs, and no data is left in Ray's session directory if the driver is killed.
If the storage path is in an object store, `callbacks.mirror` copies the files to the store.

When a trial restarts from a checkpoint, later rounds stay in the files. When the trial repeats the
first of these rounds, all of them are cut from the files.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatch
from numbers import Real
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
from ray.tune.result import AUTO_RESULT_KEYS
from ray.tune.utils import flatten_dict

from grpo_trainable.config import GRPOConfig, arm_and_seed, expand_set, expanded, mix_of
from grpo_trainable.storage.atomic import replacing
from grpo_trainable.storage.object_store import AnyPath, StoredPath
from grpo_trainable.storage.trial_storage import path_on
from grpo_trainable.telemetry.metrics import names_with
from grpo_trainable.text import without_module

PART = re.compile(r"part-(\d{8})\.parquet")
# Path of the Parquet file of a round, relative to the trial's directory. Such files in deeper
# directories are copies that were put aside.
STORED_PART = re.compile(rf"[^/]+/{PART.pattern}")
# Names of the entries that Tune adds to a row, except `done` and `trial_id`, which are no numbers.
OF_TUNE = frozenset(AUTO_RESULT_KEYS)

_verbose = False


def is_local(trial: Any) -> bool:
    """Return True if the storage path is a directory on this machine."""
    return isinstance(trial.storage.storage_filesystem, pyarrow.fs.LocalFileSystem)


def trial_path(trial: Any) -> AnyPath:
    """Return the trial's directory in the storage path."""
    return path_on(trial.storage.storage_filesystem, trial.path)


def trial_directory(trial: Any) -> Path:
    """Return the directory on this machine to which the callbacks write a trial's files.

    If the trial's directory is in an object store, return the local directory that the mirror
    copies to the store. That directory is not `trial.local_path`, which Tune copies to the store
    repeatedly.
    """
    own = trial_path(trial)
    if not isinstance(own, Path):
        staging = Path(trial.local_path)
        own = staging.parent.with_name(f"{staging.parent.name}-mirrored") / staging.name
    own.mkdir(parents=True, exist_ok=True)
    return own


def error_line(trial: Any) -> str:
    """Return the last line of a trial's latest error."""
    try:
        lines = Path(trial.error_file or "").read_text(errors="replace").strip().splitlines()
    except OSError as error:
        return f"its error file cannot be read ({error.strerror})"
    return without_module(lines[-1].strip()) if lines else "its error file is empty"


def continued_file(trial: Any, name: str) -> Path:
    """Return the path of a file that a trial continues to write. The file need not exist.

    If the file is missing on this machine but exists in the object store, it is fetched.
    """
    path, own = trial_directory(trial) / name, trial_path(trial)
    if not path.exists() and isinstance(own, StoredPath) and (own / name).exists():
        with replacing(path) as file:  # the mirror must never copy an incomplete file
            file.write((own / name).read_bytes())
    detach(path)
    return path


def continued_files(trial: Any, pattern: str) -> list[Path]:
    """Return `continued_file` for every matching name, on this machine or in an object store."""
    own = trial_path(trial)
    here = [path.name for path in trial_directory(trial).glob(pattern)]
    stored = own.names() if isinstance(own, StoredPath) else []
    names = {*here, *(name for name in stored if fnmatch(name, pattern))}
    return [continued_file(trial, name) for name in sorted(names)]


def parts_after(trial: StoredPath, last: int) -> list[str]:
    """Return the Parquet files of rounds after `last` in a trial's directory in an object store.

    The paths of the files are relative to that directory.
    """
    found = ((name, STORED_PART.fullmatch(name)) for name in trial.files())
    return [name for name, part in found if part is not None and int(part[1]) > last]


def detach(path: Path) -> None:
    """Replace a link, symbolic or hard, with a copy of its target.

    A copied experiment may consist of links. Continuing the copy must not change the files of the
    original.
    """
    if path.is_symlink() or (path.exists() and path.stat().st_nlink > 1):
        content = path.read_bytes() if path.exists() else b""
        with replacing(path) as file:
            file.write(content)


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a `result.json`, without rows that were cut short.

    A missing file has no rows.
    """
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
    """Return a trial's config, with defaults filled in."""
    return GRPOConfig.from_dict(expanded(trial.config))


def mixed_tasks(trial: Any) -> list[str]:
    """Return the labels of the tasks in a trial's `task.mix`, or [] if the trial has no mix."""
    task = expand_set(trial.config).get("task") or {}
    return list(mix_of(task.get("mix")))


def names_of(trial: Any) -> frozenset[str]:
    """Return the names of a trial's metrics, except metrics from the environments' `info`."""
    return names_with(mixed_tasks(trial))


def metrics_in(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers in a row by name, sorted, without the numbers that Tune adds.

    The user's callbacks and subclasses may have added numbers too, also in nested mappings. A
    number is a Python or NumPy scalar, not an array or a tensor.
    """
    flat = flatten_dict({k: v for k, v in row.items() if k not in OF_TUNE}, delimiter="/")
    return {
        name: float(flat[name])
        for name in sorted(flat)
        if isinstance(flat[name], Real) and not isinstance(flat[name], bool)
    }


def label(trial: Any) -> str:
    """Return the name that messages use for a trial: `arm/seed`.

    A trial keeps its name if PBT gives it the settings of another trial. If a trial's settings do
    not contain a valid arm, the trial has the name that Tune gave it.
    """
    own = trial.evaluated_params
    first = {key: own[key] for key in ("arm", "seed") if key in own}
    return arm_and_seed({**trial.config, **first}) or str(trial)


def set_verbose(on: bool) -> None:
    """Set whether the callbacks of this process print more lines.

    The flag is a global variable, because Tune pickles callbacks with the experiment, and a resumed
    experiment may be more or less verbose than the original one.
    """
    global _verbose
    _verbose = on


def is_verbose(trial: Any) -> bool:
    """Return True if the command or the trial's `callbacks.verbose` requests more lines."""
    return _verbose or config_of(trial).callbacks.verbose


def cut_lines(path: Path, last: int, iteration: Callable[[bytes], int | None]) -> None:
    """Keep the lines before the first line whose iteration is greater than `last`.

    Unreadable lines at the end are removed too, because they were cut short.

    Args:
        path: The file, which need not exist.
        last: The last iteration to keep.
        iteration: Returns the iteration of a line, or None if the line belongs to no iteration.
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
    """Write the Parquet file of a round, and replace any earlier file of the same round."""
    directory.mkdir(parents=True, exist_ok=True)
    with replacing(directory / f"part-{iteration:08d}.parquet") as file:
        pq.write_table(table, file, compression="zstd")


def read_parts(trial: Any, kind: str, columns: list[str]) -> Iterator[pa.Table]:
    """Yield the tables that `write_part` wrote, in order.

    If a trial continues on another machine, its first parts may exist only in the object store.
    """
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
    """Remove the files of rounds after `last`, and files that a killed `write_part` left behind."""
    for path in [*directory.glob("part-*"), *directory.glob(".part-*")]:
        match = PART.fullmatch(path.name)
        if match is None or int(match[1]) > last:
            path.unlink()
