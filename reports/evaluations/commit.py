"""Which commit of this repository runs."""

from __future__ import annotations

import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent


def running_commit() -> str | None:
    """The commit that is checked out, with "+" behind it where files differ from it. None where
    this is no checkout of the repository, as after an installation."""
    try:
        # The directory may lie in a repository of the user's, which does not track it.
        _git("ls-files", "--error-unmatch", Path(__file__).name)
        changed = _git("status", "--porcelain", "--untracked-files=no")
        return _git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*words: str) -> str:
    command = ["git", "-C", str(HERE), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
