"""Shared fixtures of the adapter tests, which run in the environment of `make test-adapters`.

The fixtures provide a policy with a long context, trials of two rounds, a check of environments,
and a server that runs OpenEnv's sample environment.
"""

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

# Ray reads these variables when it starts its processes.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")


PATIENT_S = 100.0  # deadline for an environment's answer, even on a busy machine


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write a policy with random weights and a context long enough for these environments."""
    return write_quick_policy(tmp_path_factory.mktemp("policy"), context_length=2048)


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    ray.init(address="local", num_cpus=8, num_gpus=0, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def train(
    ray_session: None, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Path], list[dict[str, Any]]]:
    """Return a function that runs a trial of two rounds on the environment and task of a file.

    The file defines the environment as `Game` and the task as `Games`.
    """
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
    """Return a function that runs `check_env` on the environment and task of a file.

    The function plays the given actions, and returns True if `check_env` finds no fault.
    """

    def sound(path: Path, *actions: str) -> bool:
        given = [word for action in actions for word in ("--action", action)]
        longer = f"env.step_deadline_s={PATIENT_S}"
        fixed = (f"model.path={policy}", "rollout.max_new_tokens=700", longer)
        settings = [word for setting in fixed for word in ("--set", setting)]
        command = [f"{path}:Game", "--task", f"{path}:Games", "--specs", "3", *given, *settings]
        status = check_env.main(command)
        print(capsys.readouterr().out)  # pytest shows this if the test fails
        return status == 0

    return sound


@pytest.fixture(scope="session")
def echo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the address of a server that runs OpenEnv's unmodified sample environment."""
    pytest.importorskip("openenv", reason="OpenEnv is not installed: make test-adapters")
    with serving_sample(tmp_path_factory.mktemp("openenv")) as address:
        yield address
