"""The token of a cluster that the command starts, and trials that share processes."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest
from ray._raylet import AuthenticationMode, Config, get_authentication_mode

from grpo_trainable.config import GRPOConfig
from tuning.run import leaves_no_state, make_token, require_token


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, True),
        ({"task": {"reward": "mine.py:score"}}, True),  # the reward runs in a process that ends
        (
            {"task": {"mix": {"a": {"name": "keyword", "weight": 1, "reward": "mine.py:score"}}}},
            True,
        ),
        ({"loss": {"type": "mine.py:loss"}}, False),
        ({"loss": {"advantage": "mine.py:advantage"}}, False),
        ({"engine": "mine.py:engine"}, False),
        ({"placement": "disaggregated", "transport": "mine.py:Disk"}, False),
    ],
)
def test_no_trial_runs_in_processes_that_have_executed_a_users_module(
    settings: dict[str, Any], expected: bool
) -> None:
    assert leaves_no_state(GRPOConfig.from_dict(settings)) == expected


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


def test_a_token_is_required_unless_the_environment_names_a_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.delenv("RAY_AUTH_MODE", raising=False)
        require_token()
        assert get_authentication_mode() == AuthenticationMode.TOKEN
        patch.setenv("RAY_AUTH_MODE", "disabled")
        require_token()
        assert os.environ["RAY_AUTH_MODE"] == "disabled"
    Config.initialize("")  # reads the environment again
