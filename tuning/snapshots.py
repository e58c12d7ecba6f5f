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
from grpo_trainable.storage import Place, StoredPath


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


def damaged(directory: Place) -> Place | None:
    """The snapshot that Tune would go on from, if it is damaged or was cut short. An experiment
    that was ended before there was one begins anew.

    Raises:
        OSError: it cannot be read.
    """
    names = directory.names() if isinstance(directory, StoredPath) else os.listdir(directory)
    snapshots = [name for name in names if _is_snapshot(name)]
    if not snapshots:
        return None
    newest = directory / max(snapshots)
    return None if _is_whole(newest.read_bytes()) else newest


def _is_snapshot(name: str) -> bool:
    return fnmatch(name, TuneController.CKPT_FILE_TMPL.format("*"))


def _is_whole(content: bytes) -> bool:
    try:
        json.loads(content)
    except ValueError:
        return False
    return True
