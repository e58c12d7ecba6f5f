"""Files inside an experiment's directory, read and written without following a link out of it.

An experiment may come from anybody. A link in it could put a secret of its reader on the report, or
have the report overwrite a file of his; a FIFO would keep the report waiting for ever. So every
path is walked from the directory that the user named, one component at a time and by descriptor: a
link is refused wherever it stands, and nothing can be exchanged for one between check and use.
How the user's directory itself is reached is his own choice, through links as well. A hard link
cannot be told from the file it shares; whoever makes one must own that file, or be allowed to write
to it, where the kernel protects hard links (Linux: `fs.protected_hardlinks`, on by default).

Every error is an OSError whose `strerror` names the component and says what is wrong with it.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

MAX_BYTES = 256 << 20  # of one file: the rows of 40,000 rounds, or one round's responses


def read(root: Path, *names: str) -> bytes:
    """The content of a regular file, `root/a/b` for the names a, b.

    Raises:
        FileNotFoundError: it is not there.
        OSError: it or a directory above it is a link, it is no regular file, or above `MAX_BYTES`.
    """
    *directories, name = names
    with _entered(root, directories) as directory:
        _refuse_all_but_files(name, os.lstat(name, dir_fd=directory))
        # Not waiting for a writer: what was checked may be a FIFO by now.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        with open(os.open(name, flags, dir_fd=directory), "rb") as file:
            _refuse_all_but_files(name, os.fstat(file.fileno()))
            content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise OSError(errno.EFBIG, f"{name} is larger than {MAX_BYTES >> 20} MiB")
    return content


def entries(root: Path, *names: str) -> dict[str, str]:
    """What the directory `root/a/b` holds, sorted: name -> file, directory, link or other."""
    with _entered(root, names) as directory, os.scandir(directory) as found:
        return {entry.name: _kind(entry) for entry in sorted(found, key=lambda entry: entry.name)}


def _kind(entry: os.DirEntry[str]) -> str:
    # Not `stat`: of a running experiment some files are gone by now.
    if entry.is_symlink():
        return "link"
    if entry.is_dir(follow_symlinks=False):
        return "directory"
    return "file" if entry.is_file(follow_symlinks=False) else "other"


def make_directory(root: Path, name: str) -> None:
    """Nothing happens where there is one."""
    with _entered(root, ()) as directory, suppress(FileExistsError):
        os.mkdir(name, dir_fd=directory)
    with _entered(root, (name,)):
        pass


def write(root: Path, *names: str, content: bytes) -> None:
    """All or nothing: a reader may have the file open, and the disk may be full."""
    *directories, name = names
    with _entered(root, directories) as directory:
        # The file that is renamed below replaces a link and does not follow it. But a user who made
        # one shall hear of it.
        with suppress(FileNotFoundError):
            _refuse_all_but_files(name, os.lstat(name, dir_fd=directory))
        temporary = f".{name}.{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        try:
            with open(os.open(temporary, flags, 0o666, dir_fd=directory), "wb") as file:
                file.write(content)
            os.replace(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=directory)


def remove(root: Path, *names: str) -> None:
    """Of a link the link itself."""
    *directories, name = names
    with _entered(root, directories) as directory:
        os.unlink(name, dir_fd=directory)


@contextmanager
def _entered(root: Path, names: Sequence[str]) -> Iterator[int]:
    """A descriptor of the directory `root/a/b`."""
    flags = os.O_RDONLY | os.O_DIRECTORY
    descriptor = os.open(root, flags)
    try:
        for name in names:
            mode = os.lstat(name, dir_fd=descriptor).st_mode
            if not stat.S_ISDIR(mode):
                raise NotADirectoryError(errno.ENOTDIR, _reason(name, mode, "directory"))
            above = descriptor
            descriptor = os.open(name, flags | os.O_NOFOLLOW, dir_fd=above)
            os.close(above)
        yield descriptor
    finally:
        os.close(descriptor)


def _refuse_all_but_files(name: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, _reason(name, status.st_mode, "regular file"))


def _reason(name: str, mode: int, wanted: str) -> str:
    return f"{name} is a link" if stat.S_ISLNK(mode) else f"{name} is no {wanted}"
