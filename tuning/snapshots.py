"""Tune's snapshots of an experiment, from which `--resume` goes on: whole, or refused.

Tune copies each snapshot over the one before, once a second. A disk that is full would cut them
both, and of a snapshot that it cannot read Tune says nothing: it begins all trials anew.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from pyarrow.fs import FileSystem, LocalFileSystem
from ray.train._internal import storage
from ray.tune.execution.tune_controller import TuneController

from grpo_trainable.atomic import replacing
from grpo_trainable.storage import Place, StoredPath, reason
from grpo_trainable.trial_storage import place


def keep_whole() -> None:
    """Has Tune, in this process, bring each file of a snapshot to a directory of this machine whole
    or not at all, as an object store does by itself."""
    storage._FilesystemSyncer._sync_up_command = _sync_up_command  # Tune has no public way


def _sync_up_command(
    self: Any, local_path: str, uri: str, exclude: list[str] | None = None
) -> tuple[Callable[..., None], dict[str, Any]]:
    arguments = {"fs": self.storage_filesystem, "fs_path": uri, "exclude": exclude}
    return bring, {"local_path": local_path, **arguments}


def bring(local_path: str, fs: FileSystem, fs_path: str, exclude: list[str] | None = None) -> None:
    """Copies a directory of this machine into another, or into a store.

    Raises:
        OSError: a file cannot be written; the one before stays.
    """
    if exclude or not isinstance(fs, LocalFileSystem):
        storage._upload_to_fs_path(local_path, fs, fs_path, exclude)
        return
    source, target = Path(local_path), Path(fs_path)
    for path in sorted(source.rglob("*")):
        if path.is_file():
            _replace(target / path.relative_to(source), path.read_bytes())


def _replace(path: Path, content: bytes) -> None:
    if _is_snapshot(path.name) and not _is_whole(content):
        return  # Tune is just writing it, and brings it again
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(content)


class StateUnreadable(BaseException):
    """Raised where Tune cannot read the state of an experiment.

    No `Exception`: Tune catches those, and begins all trials anew without a word.
    """


def refuse_to_begin_anew() -> None:
    """Have Tune, in this process, raise `StateUnreadable` where it cannot read a snapshot.

    An experiment that was ended before there was one begins anew, as before.
    """
    TuneController.resume = _resume  # Tune has no public way


_tunes_resume = TuneController.resume


def _resume(self: TuneController, resume_config: Any) -> None:
    try:
        _tunes_resume(self, resume_config=resume_config)
    except Exception as error:
        context: Any = self._storage
        directory = place(context.storage_filesystem, context.experiment_fs_path)
        if isinstance(error, OSError) or _has_snapshot(directory):
            raise StateUnreadable(_in_a_line(error)) from error
        raise


def _in_a_line(error: Exception) -> str:
    said = reason(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    return " ".join(said.split())[:200]


def _has_snapshot(directory: Place) -> bool:
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
