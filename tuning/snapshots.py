"""Keep Tune's snapshots of an experiment whole, and refuse to resume from a damaged one.

`--resume` continues from the newest snapshot. Once per second, Tune copies the snapshot over its
previous copy. On a full disk, both the snapshot and its copy would be cut short. The copy of a
snapshot that Tune is still writing would be incomplete. If Tune cannot read a snapshot, it silently
restarts all trials from the beginning.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from pyarrow.fs import FileSystem

from grpo_trainable.storage.atomic import replacing
from grpo_trainable.storage.object_store import AnyPath, StoredPath, reason
from grpo_trainable.storage.ray_private import TuneController, _FilesystemSyncer
from grpo_trainable.storage.trial_storage import path_on


def keep_whole() -> None:
    """Make Tune, in this process, copy each file of a snapshot completely or not at all."""
    _FilesystemSyncer._sync_up_command = _sync_up_command  # Tune has no public way to do this


def _sync_up_command(
    self: Any, local_path: str, uri: str, exclude: list[str] | None = None
) -> tuple[Callable[..., None], dict[str, Any]]:
    assert not exclude, "Tune excludes no file of an experiment"
    return bring, {"local_path": local_path, "fs": self.storage_filesystem, "fs_path": uri}


# (source, target) -> the file's time of last change and its size, both at the time of the copy.
_brought: dict[tuple[str, str], tuple[int, int]] = {}


def bring(local_path: str, fs: FileSystem, fs_path: str) -> None:
    """Copy the changed files of a directory into another directory, or into a store.

    Raises:
        OSError: A file cannot be written. The previous copy of the file remains.
    """
    source, target = Path(local_path), path_on(fs, fs_path)
    for path in sorted(source.rglob("*")):
        if path.is_file():
            _bring(path, target / path.relative_to(source).as_posix())


def _bring(path: Path, target: AnyPath) -> None:
    way = (str(path), str(target))
    try:
        status = path.stat()
        state = (status.st_mtime_ns, status.st_size)
        if _brought.get(way) == state:
            return
        content = path.read_bytes()
    except FileNotFoundError:
        return  # it was a temporary file of Tune
    if _is_snapshot(path.name) and not _is_whole(content):
        return  # Tune is still writing it; the next call copies it
    if isinstance(target, StoredPath):
        target.write_bytes(content)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as file:
            file.write(content)
    _brought[way] = state


class StateUnreadable(BaseException):
    """Error raised if Tune cannot read the state of an experiment.

    This is not an `Exception`, because Tune catches every `Exception` and silently restarts all
    trials.
    """


def refuse_to_begin_anew() -> None:
    """Make Tune, in this process, raise `StateUnreadable` if it cannot read a snapshot.

    An experiment that ended before its first snapshot still restarts from the beginning.
    """
    TuneController.resume = _resume  # Tune has no public way to do this


_tunes_resume = TuneController.resume


def _resume(self: TuneController, resume_config: Any) -> None:
    try:
        _tunes_resume(self, resume_config=resume_config)
    except Exception as error:
        context: Any = self._storage
        directory = path_on(context.storage_filesystem, context.experiment_fs_path)
        if isinstance(error, OSError) or _has_snapshot(directory):
            raise StateUnreadable(_in_a_line(error)) from error
        raise


def _in_a_line(error: Exception) -> str:
    said = reason(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    return " ".join(said.split())[:200]


def _has_snapshot(directory: AnyPath) -> bool:
    names = directory.names() if isinstance(directory, StoredPath) else os.listdir(directory)
    return any(map(_is_snapshot, names))


def _is_snapshot(name: str) -> bool:
    return fnmatch(name, TuneController.CKPT_FILE_TMPL.format("*"))


def _is_whole(content: bytes) -> bool:
    try:
        json.loads(content)
    except ValueError:
        return False
    return True
