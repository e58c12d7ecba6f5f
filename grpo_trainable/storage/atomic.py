"""Write a file or a directory completely or not at all, for all modules of the project.

This module imports only the standard library, because callbacks, reports and commands use it too.
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
    """Open a new file. It replaces `path` when the block ends, or is removed if the block raises.

    A reader sees the old or the new content, never a part of it. A link at `path` is replaced, not
    followed. A killed process may leave the file `.NAME.RANDOM` beside `path`.

    Args:
        path: The path to write.
        durable: Make the new content survive a crash of the machine.
        dir_fd: An open directory that `path` is relative to.

    Raises:
        OSError: The file cannot be written or renamed. `path` is unchanged.
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
    """Append to a file, creating it if it does not exist.

    Raises:
        OSError: `data` cannot be written. Any written part of `data` is removed again.
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
    """Create a directory. It becomes `path` when the block ends, or is removed if the block raises.

    `path` must not exist, or must be an empty directory. Missing parents are created. A killed
    process may leave the directory `.NAME.RANDOM` beside `path`. Everybody who may list the
    directory may read its files, including files that safetensors has created with read permission
    only for their owner.

    Raises:
        FileExistsError: `path` exists and is not an empty directory.
        OSError: The directory cannot be created or renamed.
    """
    path = Path(os.path.abspath(path))
    refuse_occupied(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.{secrets.token_hex(8)}"
    temporary.mkdir()
    try:
        yield temporary
        readers = temporary.stat().st_mode & 0o444
        for file in temporary.rglob("*"):
            file.chmod(file.stat().st_mode | readers)
        os.replace(temporary, path)  # an empty directory is replaced, too
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def refuse_occupied(path: Path) -> None:
    """Check that nothing is at `path`, except perhaps an empty directory.

    Raises:
        FileExistsError: `path` exists and is not an empty directory.
    """
    is_empty = path.is_dir() and not path.is_symlink() and not any(path.iterdir())
    if not is_empty and (path.exists() or path.is_symlink()):
        raise FileExistsError(errno.EEXIST, "is not a new or empty directory", str(path))
