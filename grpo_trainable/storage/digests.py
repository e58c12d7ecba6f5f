"""SHA-256 digests of files and of this package.

This module imports only the standard library, because commands compare files before torch loads.
"""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path

CHUNK_BYTES = 1 << 20


def digest_of(key: str, path: str | Path) -> str:
    """Return the SHA-256 of a file.

    Args:
        key: The setting that names the file.
        path: The file.

    Raises:
        ValueError: The file cannot be read. The message is one line that names the key and
            the path.
    """
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            for chunk in iter(partial(file.read, CHUNK_BYTES), b""):
                digest.update(chunk)
    except OSError as error:
        raise ValueError(f"{key}: {path} cannot be read ({error.strerror})") from None
    return digest.hexdigest()


def package_digest() -> str:
    """Return the SHA-256 of this package's Python files, including their names."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
