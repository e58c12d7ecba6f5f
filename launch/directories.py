"""Which directories the commands take."""

from __future__ import annotations

import os
import re
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path

from reports import EXPERIMENT_FILE

# What a resume reads of an experiment: ours is JSON, Tune's is pickle, in its JSON files as well.
STATE_FILES = (EXPERIMENT_FILE, "*state-*.json", "*.pkl")
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def local_directory(text: str) -> Path:
    """The absolute path that a user's `text` means here.

    Raises:
        ValueError: it is a URI, in one line.
    """
    if scheme := re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text):
        remedy = (
            "give its path alone" if scheme[0] == "file://" else "other storage is not built yet"
        )
        raise ValueError(f"must be a directory of this machine, not a {scheme[0]} URI; {remedy}")
    return Path(os.path.abspath(os.path.expanduser(text)))


def refuse_state_of_others(directory: Path) -> None:
    """Tune unpickles an experiment's state, so nobody but the user may have written it.

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
    """The directory, those in it, and the state files in all of them."""
    yield directory
    for path in sorted(directory.iterdir()):
        if any(path.match(pattern) for pattern in STATE_FILES):
            yield path
        elif path.is_dir():
            yield path
            yield from sorted(path.glob("*.pkl"))
