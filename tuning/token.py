"""Ray's token, by which a cluster that we start keeps others out."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path


def make_token(home: Path, environment: Mapping[str, str]) -> None:
    """Makes the token that Ray looks for in a home directory, where there is none and the
    environment names no other. Ray would make it too, but readable for everybody whom the umask
    allows."""
    other = environment.keys() & {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}
    if other or environment.get("RAY_AUTH_MODE", "token") != "token":
        return
    path = home / ".ray" / "auth_token"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    with open(descriptor, "w") as file:
        file.write(secrets.token_hex(32))
