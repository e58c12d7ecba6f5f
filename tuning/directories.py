"""Directories that a user names: storage for experiments, and checks before a resume."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shlex
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_trainable.command_line import UsageError
from grpo_trainable.storage.atomic import replacing
from reports import EXPERIMENT_FILE

if TYPE_CHECKING:
    from grpo_trainable.storage.object_store import AnyPath

# Files that a resume reads. Tune's files, even its JSON files, contain pickled data. Our own file,
# `EXPERIMENT_FILE`, does not.
STATE_FILES = (EXPERIMENT_FILE, "*state-*.json", "*.pkl")
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
# Errors of file systems without locks.
WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


def directory_named(text: str) -> AnyPath:
    """Return the directory that `text` names: s3://BUCKET/PATH, or a directory on this machine.

    Raises:
        ValueError: The text is another URI, or contains credentials. The message is one line.
    """
    if text.startswith("s3:"):
        from grpo_trainable.storage.object_store import stored_path  # imports pyarrow, slowly

        return stored_path(text)
    return local_directory(text)


def local_directory(text: str) -> Path:
    """Return the absolute path of the directory on this machine that `text` names.

    Raises:
        ValueError: The text is a URI. The message is one line.
    """
    if scheme := re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text):
        remedy = (
            "give only its path"
            if scheme[0] == "file://"
            else "give its path, or s3://BUCKET/PATH if a store is allowed"
        )
        raise ValueError(f"must be a directory on this machine, not a {scheme[0]} URI; {remedy}")
    return Path(os.path.abspath(os.path.expanduser(text)))


def has_results(experiment: AnyPath) -> bool:
    """Return True if a trial of the experiment has written a row or a checkpoint."""
    if isinstance(experiment, Path):
        rows = (path for path in experiment.glob("*/result.json") if path.stat().st_size)
        return any(rows) or any(experiment.glob("*/checkpoint_*"))
    sizes = experiment.files().items()
    rows = (name for name, size in sizes if size and name.endswith("/result.json"))
    return any(rows) or any("/checkpoint_" in name for name, _ in sizes)


def refuse_state_of_others(directory: Path) -> None:
    """Refuse an experiment if another user may have written its state, which Tune unpickles.

    Raises:
        ValueError: The directory, a directory in it or a file of the state belongs to another user,
            can be written by others, or is a link. The message is one line and says what to do.
        OSError: The directory cannot be read.
    """
    for path in _state(directory):
        status = path.lstat()
        if status.st_uid != os.getuid():
            problem, remedy = "belongs to another user", "resume only experiments that you started"
        elif stat.S_ISLNK(status.st_mode):
            problem, remedy = "is a link", "replace it with its target"
        elif status.st_mode & WRITABLE_BY_OTHERS:
            problem = "can be written by others"
            remedy = f"if nobody else wrote to it: chmod -R go-w {shlex.quote(str(directory))}"
        else:
            continue
        raise ValueError(
            f"{path} {problem}, and reading Tune's state runs the code that it contains; {remedy}"
        )


def _state(directory: Path) -> Iterator[Path]:
    """Yield the directory, the directories in it, and the state files in all of them."""
    yield directory
    for path in sorted(directory.iterdir()):
        if any(path.match(pattern) for pattern in STATE_FILES):
            yield path
        elif path.is_dir():
            yield path
            yield from sorted(path.glob("*.pkl"))


def refusal(directory: AnyPath) -> str | None:
    """Return a one-line reason why nothing can be stored in `directory`, or None."""
    if not isinstance(directory, Path):
        from grpo_trainable.storage import object_store

        return object_store.refusal(directory)
    nearest = next(path for path in (directory, *directory.parents) if os.path.exists(path))
    try:
        # Permissions alone do not show that a file system such as /proc accepts no files.
        tempfile.TemporaryFile(dir=nearest).close()
    except OSError as error:
        return f"cannot write there ({error.strerror})"
    return None


def is_taken(directory: AnyPath) -> bool:
    """Return True if the directory of an experiment exists.

    In a store, the directory must also contain a file, because a store may show empty directories.
    """
    return directory.exists() if isinstance(directory, Path) else bool(directory.files())


def removed(directory: AnyPath, name: str) -> None:
    """Remove a file, then its directory if it is empty. Errors are ignored."""
    with suppress(OSError):
        (directory / name).unlink()
        if isinstance(directory, Path):
            directory.rmdir()


def write_file(directory: AnyPath, name: str, content: bytes) -> None:
    """Write a file atomically, creating its directory first.

    Raises:
        OSError: The file cannot be written.
    """
    if not isinstance(directory, Path):
        (directory / name).write_bytes(content)
        return
    directory.mkdir(parents=True, exist_ok=True)
    with replacing(directory / name) as file:
        file.write(content)


@contextmanager
def held(directory: AnyPath, name: str = EXPERIMENT_FILE) -> Iterator[None]:
    """Hold a lock on an experiment while its command runs.

    The lock is an advisory lock on a file. It ends with the process, however the process ends.
    Object stores and some network file systems have no locks, so nothing is held there.

    Args:
        directory: The directory of the experiment.
        name: The name of the file to lock.

    Raises:
        UsageError: Another command holds the lock.
    """
    if not isinstance(directory, Path):
        yield
        return
    with open(directory / name, "rb+") as file:  # NFS locks only files that are open for writing
        if not _locked(file.fileno(), fcntl.LOCK_EX):
            raise UsageError(f"{directory}: another command is running here")
        yield


def is_running(directory: AnyPath) -> bool:
    """Return True if a command holds the lock of an experiment."""
    path = directory / EXPERIMENT_FILE
    if not isinstance(path, Path) or not path.is_file():
        return False
    with open(path, "rb") as file:
        return not _locked(file.fileno(), fcntl.LOCK_SH)


def _locked(descriptor: int, kind: int) -> bool:
    """Lock a file until it is closed, and return False if another process has locked it."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
    return True
