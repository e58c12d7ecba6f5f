"""What the tests of adapters share, for the environment of `make test-adapters`: a policy whose
context holds long prompts, trials of two rounds, and the sample of OpenEnv on a server."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from policies import write_quick_policy

from grpo_trainable.trainable import GRPOTrainable
from launch import check_env

# Read when Ray starts its processes.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")

SERVE = """
import sys
import uvicorn
from models import EchoGameAction, EchoGameObservation
from openenv.core.env_server.http_server import create_app
from server.echo_game_environment import EchoGameEnvironment

sample = (EchoGameEnvironment, EchoGameAction, EchoGameObservation)
app = create_app(*sample, env_name="echo_game", max_concurrent_envs=64)
uvicorn.run(app, fd=int(sys.argv[1]), log_level="critical")
"""


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A policy with random weights that can read what these environments say."""
    return write_quick_policy(tmp_path_factory.mktemp("policy"), context_length=1024)


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    ray.init(num_cpus=8, num_gpus=0, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def train(
    ray_session: None, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Path], list[dict[str, Any]]]:
    """The rows of a trial of two rounds, of `Game` and `Games` in a file."""
    monkeypatch.setattr("ray.tune.trainable.trainable.DEFAULT_STORAGE_PATH", str(tmp_path))

    def rows(path: Path) -> list[dict[str, Any]]:
        trainable = GRPOTrainable(
            {
                "task": {"name": f"{path}:Games"},
                "env": {"name": f"{path}:Game"},
                "model": {"path": policy},
                "rollout": {"prompts": 2, "group_size": 2, "max_new_tokens": 700},
                "eval": {"prompts": 2, "samples": 1},
                "rounds": 2,
            }
        )
        try:
            return [trainable.step() for _ in range(2)]
        finally:
            trainable.stop()

    return rows


@pytest.fixture
def is_sound(policy: str, capsys: pytest.CaptureFixture[str]) -> Callable[..., bool]:
    """Whether `check_env` finds nothing in `Game` of a file, played with `Games` and these
    actions."""

    def sound(path: Path, *actions: str) -> bool:
        given = [word for action in actions for word in ("--action", action)]
        settings = ["--set", f"model.path={policy}", "--set", "rollout.max_new_tokens=700"]
        command = [f"{path}:Game", "--task", f"{path}:Games", "--specs", "3", *given, *settings]
        status = check_env.main(command)
        print(capsys.readouterr().out)  # shown where the test fails
        return status == 0

    return sound


@pytest.fixture(scope="session")
def echo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server with the environment that `openenv init` writes, as it is."""
    pytest.importorskip("openenv", reason="OpenEnv is not installed: make test-adapters")
    folder = tmp_path_factory.mktemp("openenv")
    init = [sys.executable, "-m", "openenv.cli", "init", "echo_game"]
    subprocess.run(init, cwd=folder, check=True, capture_output=True, timeout=120)
    # It listens before the server is up, so that who connects waits.
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        server = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(listening.fileno())],
            cwd=folder / "echo_game",
            pass_fds=[listening.fileno()],
        )
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.terminate()
            server.wait()
