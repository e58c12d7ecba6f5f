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
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from grpo_trainable.storage.atomic import replacing

MAX_BYTES = 256 << 20  # one file at most: the rows of 40,000 rounds, or a round's responses


def read(root: Path, *names: str) -> bytes:
    """The content of the regular file `root/a/b`, given the names a, b.

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


def content_of(
    root: Path, names: Sequence[str], problems: list[str], *, needed: bool = False
) -> bytes | None:
    """The content of a file, or None and a line in `problems` when it cannot be read; one that is
    not `needed` may be missing."""
    try:
        return read(root, *names)
    except FileNotFoundError:
        problems += [f"{name_of(root, names)} is missing"] if needed else []
    except OSError as error:
        problems.append(f"{name_of(root, names)} cannot be read ({error.strerror})")
    return None


def name_of(root: Path, names: Sequence[str]) -> str:
    """How a problem names a file: without the experiment where its trial says enough."""
    return "/".join(names if len(names) > 1 else [root.name, *names])


def one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


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
    """Makes a directory in `root`, unless there is one already."""
    with _entered(root, ()) as directory, suppress(FileExistsError):
        os.mkdir(name, dir_fd=directory)
    with _entered(root, (name,)):
        pass


def write(root: Path, *names: str, content: bytes) -> None:
    """Replaces a file whole, since a reader may have it open and the disk may be full."""
    *directories, name = names
    with _entered(root, directories) as directory:
        # Writing would replace a link, not follow it. But the user who made it should be told.
        with suppress(FileNotFoundError):
            _refuse_all_but_files(name, os.lstat(name, dir_fd=directory))
        with replacing(name, dir_fd=directory) as file:
            file.write(content)


def remove(root: Path, *names: str) -> None:
    """Removes a file, or a link itself and not what it leads to."""
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
