"""What the tests of adapters share, for the environment of `make test-adapters`: a policy whose
context holds long prompts, trials of two rounds, and the sample of OpenEnv on a server."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from openenv_sample import serving_sample
from policies import write_quick_policy

from grpo_trainable.trainable import GRPOTrainable
from launch import check_env

# Read when Ray starts its processes.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")


PATIENT_S = 100.0  # for an answer on a busy machine


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A policy with random weights that can read what these environments say."""
    return write_quick_policy(tmp_path_factory.mktemp("policy"), context_length=2048)


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    ray.init("local", num_cpus=8, num_gpus=0, include_dashboard=False, log_to_driver=False)
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
                "env": {"name": f"{path}:Game", "step_deadline_s": PATIENT_S},
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
        longer = f"env.step_deadline_s={PATIENT_S}"
        fixed = (f"model.path={policy}", "rollout.max_new_tokens=700", longer)
        settings = [word for setting in fixed for word in ("--set", setting)]
        command = [f"{path}:Game", "--task", f"{path}:Games", "--specs", "3", *given, *settings]
        status = check_env.main(command)
        print(capsys.readouterr().out)  # shown where the test fails
        return status == 0

    return sound


@pytest.fixture(scope="session")
def echo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server with the sample of OpenEnv, as it is."""
    pytest.importorskip("openenv", reason="OpenEnv is not installed: make test-adapters")
    with serving_sample(tmp_path_factory.mktemp("openenv")) as address:
        yield address
