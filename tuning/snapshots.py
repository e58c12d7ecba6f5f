"""Tune's snapshots of an experiment, from which `--resume` goes on: whole, or refused.

Tune copies each snapshot over the one before, once a second. A disk that is full would cut them
both, and of a snapshot that it cannot read Tune says nothing: it begins all trials anew.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyarrow.fs import FileSystem, LocalFileSystem
from ray.train._internal import storage
from ray.tune.execution.tune_controller import TuneController

from grpo_trainable.atomic import replacing
from grpo_trainable.storage import Place, StoredPath

STATE = TuneController.CKPT_FILE_TMPL  # "{}" stands for when a command began


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
            whole = target / path.relative_to(source)
            whole.parent.mkdir(parents=True, exist_ok=True)
            with path.open("rb") as old, replacing(whole) as new:
                shutil.copyfileobj(old, new)


def newest(directory: Place) -> Place | None:
    """The newest snapshot of an experiment; None without any."""
    names = directory.names() if isinstance(directory, StoredPath) else os.listdir(directory)
    before, after = STATE.split("{}")
    found = [name for name in names if name.startswith(before) and name.endswith(after)]
    return directory / max(found) if found else None


def damage(directory: Place) -> str | None:
    """What is wrong with the snapshot that Tune would go on from, in a line; None when it is whole.

    Raises:
        OSError: it cannot be read.
    """
    path = newest(directory)
    if path is None:
        return f"there is no {STATE.format('*')} in {directory}"
    try:
        json.loads(path.read_bytes())
    except ValueError:
        return f"{path} is damaged or was cut short"
    return None
