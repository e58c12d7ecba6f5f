"""Read and write files inside an experiment's directory without following a link out of it.

An experiment can come from anyone. A link in its directory could bring one of the reader's files
into the report, or make the report overwrite one of them. A FIFO would block the report for ever.
So every path is walked from the directory that the user named, one component at a time, through
file descriptors. A link anywhere on the path is rejected, and nothing can be replaced by a link
between the check and the use.

The path to the user's directory is the user's choice and may contain links. A hard link cannot be
distinguished from the original file. If the kernel protects hard links (Linux:
`fs.protected_hardlinks`, on by default), only someone who owns a file or may write to it can make a
hard link to it.

Every error is an OSError whose `strerror` names the component and its problem.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from grpo_trainable.storage.atomic import replacing

MAX_BYTES = 256 << 20  # limit for one file: enough for 40,000 rows, or for the responses of a round


def read(root: Path, *names: str) -> bytes:
    """Return the content of the regular file `root/a/b`, given the names a, b.

    Raises:
        FileNotFoundError: The file does not exist.
        OSError: The file is not a regular file or exceeds `MAX_BYTES`, or the path contains a link.
    """
    *directories, name = names
    with _entered(root, directories) as directory:
        _refuse_all_but_files(name, os.lstat(name, dir_fd=directory))
        # Do not block: since the check, a FIFO without a writer may have replaced the file.
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
    """Return the content of a file, or None if it cannot be read.

    Args:
        root: The directory that the user named.
        names: The components of the path below `root`.
        problems: Receives a line if the file cannot be read.
        needed: Also report a missing file.
    """
    try:
        return read(root, *names)
    except FileNotFoundError:
        problems += [f"{name_of(root, names)} is missing"] if needed else []
    except OSError as error:
        problems.append(f"{name_of(root, names)} cannot be read ({error.strerror})")
    return None


def name_of(root: Path, names: Sequence[str]) -> str:
    """Return the name of a file for a message: TRIAL/FILE, or EXPERIMENT/FILE."""
    return "/".join(names if len(names) > 1 else [root.name, *names])


def one_line(error: Exception) -> str:
    """Return an error's message as one line, or its type if it has no message."""
    return " ".join(str(error).split()) or type(error).__name__


def entries(root: Path, *names: str) -> dict[str, str]:
    """Return the entries of the directory `root/a/b`, sorted.

    Returns:
        name -> "file", "directory", "link" or "other".
    """
    with _entered(root, names) as directory, os.scandir(directory) as found:
        return {entry.name: _kind(entry) for entry in sorted(found, key=lambda entry: entry.name)}


def _kind(entry: os.DirEntry[str]) -> str:
    # Do not call `stat`, because files of a running experiment can disappear.
    if entry.is_symlink():
        return "link"
    if entry.is_dir(follow_symlinks=False):
        return "directory"
    return "file" if entry.is_file(follow_symlinks=False) else "other"


def make_directory(root: Path, name: str) -> None:
    """Make a directory in `root` unless it already exists."""
    with _entered(root, ()) as directory, suppress(FileExistsError):
        os.mkdir(name, dir_fd=directory)
    with _entered(root, (name,)):
        pass


def write(root: Path, *names: str, content: bytes) -> None:
    """Replace a file as a whole, because a reader may have it open or the disk may fill up."""
    *directories, name = names
    with _entered(root, directories) as directory:
        # Writing would replace a link, not follow it. Reject links, so that the user notices them.
        with suppress(FileNotFoundError):
            _refuse_all_but_files(name, os.lstat(name, dir_fd=directory))
        with replacing(name, dir_fd=directory) as file:
            file.write(content)


def remove(root: Path, *names: str) -> None:
    """Remove a file or a link. The target of a link remains."""
    *directories, name = names
    with _entered(root, directories) as directory:
        os.unlink(name, dir_fd=directory)


@contextmanager
def _entered(root: Path, names: Sequence[str]) -> Iterator[int]:
    """Open the directory `root/a/b` and yield its descriptor."""
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
    return f"{name} is a link" if stat.S_ISLNK(mode) else f"{name} is not a {wanted}"
