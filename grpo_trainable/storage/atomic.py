"""A file or a directory is written whole or not at all, here and nowhere else in the project.

The standard library only: callbacks, reports and command lines write through it as well.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(
    path: str | Path, *, durable: bool = False, dir_fd: int | None = None
) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` when the block ends, and is removed if it raises.

    A reader sees the old content or the new one, never a part of it. With `durable` the new content
    also survives a crash of the machine. `path` is relative to the directory that `dir_fd` has
    open, if given; a link at `path` is replaced, not followed. A killed process may leave the file
    `.NAME.RANDOM` beside `path`.

    Raises:
        OSError: the file cannot be written or renamed; `path` is as it was.
    """
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name}.{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    descriptor = os.open(temporary, flags, 0o666, dir_fd=dir_fd)
    try:
        with open(descriptor, "wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(descriptor)
        os.replace(temporary, path, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=dir_fd)
        raise
    if durable:
        _sync_directory(folder or ".", dir_fd)


def append(path: str | Path, data: bytes) -> None:
    """Append to a file, which is made if there is none.

    Raises:
        OSError: It cannot be written; what was written of `data` is removed again.
    """
    with open(path, "ab", buffering=0) as file:
        size = file.tell()
        try:
            if file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        except OSError:
            file.truncate(size)
            raise


def _sync_directory(folder: str, dir_fd: int | None) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY, dir_fd=dir_fd)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def new_directory(path: str | Path) -> Iterator[Path]:
    """A directory to fill, which becomes `path` when the block ends, and is removed if it raises.

    `path` must not exist, or be an empty directory; parents that are missing are made. A killed
    process may leave the directory `.NAME.RANDOM` beside `path`.

    Raises:
        FileExistsError: something is at `path`.
        OSError: the directory cannot be made or renamed.
    """
    path = Path(os.path.abspath(path))
    refuse_occupied(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.{secrets.token_hex(8)}"
    temporary.mkdir()
    try:
        yield temporary
        os.replace(temporary, path)  # an empty directory may be there: this takes its place
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def refuse_occupied(path: Path) -> None:
    """FileExistsError where `path` is anything but free, or an empty directory."""
    is_empty = path.is_dir() and not path.is_symlink() and not any(path.iterdir())
    if not is_empty and (path.exists() or path.is_symlink()):
        raise FileExistsError(errno.EEXIST, "is not a new or empty directory", str(path))
