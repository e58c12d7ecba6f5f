"""One Ray session a test module, small trials, and what is left of them afterwards."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray import tune

from grpo_trainable.trainable import GRPOTrainable

# Read when Ray starts its processes, which share two cores with everything else.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


@pytest.fixture(scope="module")
def ray_session() -> Iterator[None]:
    # More than this machine may have: the trials are tiny, and two of them run at once.
    ray.init(num_cpus=4, num_gpus=0, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def trial_config(**values: Any) -> dict[str, Any]:
    """A trial of seconds: disaggregated, each side on one thread, unless it says otherwise."""
    data: dict[str, Any] = {
        "placement": "disaggregated",
        "rounds": 4,
        "seed": 7,
        "rollout": {"prompts": 4, "unit_prompts": 2, "group_size": 4, "max_new_tokens": 12},
        "optim": {"lr": 1e-3, "schedule": "linear"},
        "task": {"match": "substring"},
        "eval": {"every": 3, "prompts": 6, "samples": 2},
        "checkpoint": {"every": 3, "keep": None},
        "resources": {"worker_cpus": 0.95, "deadline_s": 120.0},
    }
    for name, value in values.items():
        data[name] = {**data[name], **value} if isinstance(data.get(name), dict) else value
    if "reward" in data["task"]:
        del data["task"]["match"]  # which only the task's own reward reads
    return data


def written_by_the_page(page: str, title: str, directory: Path) -> Path:
    """The file of this title that a page of docs/howto tells its reader to write."""
    text = (Path(__file__).parents[2] / "docs" / "howto" / page).read_text(encoding="utf-8")
    _, _, rest = text.partition(f'```python title="{title}"\n')
    path = directory / title
    path.write_text(rest.partition("```\n")[0], encoding="utf-8")
    return path


def wait_for(condition: Callable[[], Any], timeout_s: float) -> Any:
    """What `condition` gives once that is true."""
    end = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.2)
    return found


def actor_processes() -> dict[int, str]:
    """Our actors' processes under this one and their names, Ray's idle workers not counted."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        try:
            title = " ".join(process.cmdline())
        except psutil.Error:
            continue  # ended meanwhile
        if any(f"ray::{role}" in title for role in ("Generator", "Learner", "Colocated", "GRPO")):
            found[process.pid] = title
    return found


def assert_no_actor_left(seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while (left := actor_processes()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


@pytest.fixture
def trainable(ray_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Builds Trainables outside Tune, and ends them."""
    monkeypatch.setattr("ray.tune.trainable.trainable.DEFAULT_STORAGE_PATH", str(tmp_path))
    built = []

    def build(config: dict[str, Any]) -> GRPOTrainable:
        built.append(GRPOTrainable(config))
        return built[-1]

    yield build
    for trainable in built:
        trainable.stop()


def fit(space: dict[str, Any], storage: Path, **options: Any) -> tune.ResultGrid:
    return tune.Tuner(
        GRPOTrainable,
        param_space=space,
        run_config=tune.RunConfig(
            name="experiment", storage_path=str(storage), verbose=0, **options
        ),
    ).fit()
