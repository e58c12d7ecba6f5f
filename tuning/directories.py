"""Directories that a user names: where experiments are kept, and whether one may be resumed."""

from __future__ import annotations

import os
import re
import shlex
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_trainable.storage.atomic import replacing
from reports import EXPERIMENT_FILE

if TYPE_CHECKING:
    from grpo_trainable.storage.object_store import AnyPath

# Files that a resume reads. Ours is JSON; those of Tune hold pickle, its JSON files as well.
STATE_FILES = (EXPERIMENT_FILE, "*state-*.json", "*.pkl")
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def directory_named(text: str) -> AnyPath:
    """The directory that a user calls `text`: s3://BUCKET/PATH, or one of this machine.

    Raises:
        ValueError: it is another URI, or one with credentials; the message is one line.
    """
    if text.startswith("s3:"):
        from grpo_trainable.storage.object_store import stored_path  # pyarrow, which takes its time

        return stored_path(text)
    return local_directory(text)


def local_directory(text: str) -> Path:
    """The absolute path of the directory of this machine that a user calls `text`.

    Raises:
        ValueError: it is a URI; the message is one line.
    """
    if scheme := re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text):
        remedy = "give its path alone" if scheme[0] == "file://" else "s3:// is the store it knows"
        raise ValueError(f"must be a directory of this machine, not a {scheme[0]} URI; {remedy}")
    return Path(os.path.abspath(os.path.expanduser(text)))


def refuse_state_of_others(directory: Path) -> None:
    """Refuses an experiment whose state, which Tune unpickles, others may have written.

    Raises:
        ValueError: the directory, one below it or a file of the state belongs to another user, can
            be written by others, or is a link; in one line that says how to mend it.
        OSError: it cannot be looked into.
    """
    for path in _state(directory):
        status = path.lstat()
        if status.st_uid != os.getuid():
            problem, remedy = "belongs to another user", "resume only experiments that you started"
        elif stat.S_ISLNK(status.st_mode):
            problem, remedy = "is a link", "put what it leads to in its place"
        elif status.st_mode & WRITABLE_BY_OTHERS:
            problem = "can be written by others"
            remedy = f"if nobody did: chmod -R go-w {shlex.quote(str(directory))}"
        else:
            continue
        raise ValueError(f"{path} {problem}, and reading Tune's state runs code in it; {remedy}")


def _state(directory: Path) -> Iterator[Path]:
    """Yields the directory, the directories in it, and the state files in all of them."""
    yield directory
    for path in sorted(directory.iterdir()):
        if any(path.match(pattern) for pattern in STATE_FILES):
            yield path
        elif path.is_dir():
            yield path
            yield from sorted(path.glob("*.pkl"))


def refusal(directory: AnyPath) -> str | None:
    """Why no experiment can be kept in `directory`, in a line; None where one can."""
    if not isinstance(directory, Path):
        from grpo_trainable.storage import object_store

        return object_store.refusal(directory)
    nearest = next(path for path in (directory, *directory.parents) if os.path.exists(path))
    writable = nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
    return None if writable else "cannot write there"


def is_taken(directory: AnyPath) -> bool:
    """Whether there is something under the name of an experiment. A store may show a directory in
    which nothing is."""
    return directory.exists() if isinstance(directory, Path) else bool(directory.files())


def removed(directory: AnyPath, name: str) -> None:
    """Removes a file of a directory, and the directory if it was the only one; as far as can be."""
    with suppress(OSError):
        (directory / name).unlink()
        if isinstance(directory, Path):
            directory.rmdir()


def write_file(directory: AnyPath, name: str, content: bytes) -> None:
    """Writes a file whole, in a directory that is made first.

    Raises:
        OSError: it cannot be written.
    """
    if not isinstance(directory, Path):
        (directory / name).write_bytes(content)
        return
    directory.mkdir(parents=True, exist_ok=True)
    with replacing(directory / name) as file:
        file.write(content)
