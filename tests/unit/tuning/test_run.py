"""The token of a cluster that the command starts."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from tuning.run import make_token


def test_a_token_is_made_that_nobody_else_can_read(tmp_path: Path) -> None:
    make_token(tmp_path, {})
    path = tmp_path / ".ray" / "auth_token"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(path.read_text()) == 64
    before = path.read_text()
    make_token(tmp_path, {})
    assert path.read_text() == before


@pytest.mark.parametrize(
    ("name", "value"),
    [("RAY_AUTH_MODE", "disabled"), ("RAY_AUTH_TOKEN", "a"), ("RAY_AUTH_TOKEN_PATH", "/a")],
)
def test_no_token_is_made_that_ray_would_not_read(tmp_path: Path, name: str, value: str) -> None:
    make_token(tmp_path, {name: value})
    assert list(tmp_path.iterdir()) == []
