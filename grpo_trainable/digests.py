"""The SHA-256 of a file. The standard library only: commands compare files before torch loads."""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path

CHUNK_BYTES = 1 << 20


def digest_of(key: str, path: str | Path) -> str:
    """The SHA-256 of the file at `path`, which `key` names.

    Raises:
        ValueError: it cannot be read, in one line that names both.
    """
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            for chunk in iter(partial(file.read, CHUNK_BYTES), b""):
                digest.update(chunk)
    except OSError as error:
        raise ValueError(f"{key}: {path} cannot be read ({error.strerror})") from None
    return digest.hexdigest()
