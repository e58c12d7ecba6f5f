"""One Ray for all tests in this directory, small trials, and a check that no actor is left."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Container, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from ray import tune

from grpo_trainable.config import GRPOConfig
from grpo_trainable.protocol.calls import await_call
from grpo_trainable.telemetry.metrics import NAMES, TIMED, is_named_by_user
from grpo_trainable.trainable import DetailedGRPO, GRPOTrainable
from grpo_trainable.trial import BUILT_INTO_ACTORS

# One thread per process, because all processes share two cores. Ray reads this variable when
# it starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# By default, Ray gives actors a low priority. While a test computes, such actors could get no CPU
# until a deadline has passed.
os.environ.setdefault("RAY_worker_niceness", "0")
# By default Ray starts a process for each of the 16 CPUs below, whether or not it is used.
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")


HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def ray_session() -> None:
    """Start Ray for the first module that needs it. Later modules use the same Ray."""
    if not ray.is_initialized():
        # More CPUs than this machine may have: the trials are tiny, and most of their actors wait.
        # With `address="local"`, Ray never joins another user's Ray on this machine.
        ray.init(
            address="local", num_cpus=16, num_gpus=0, include_dashboard=False, log_to_driver=False
        )


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """End Ray after the last test in this directory, because the unit tests use no Ray."""
    if nextitem is None or not nextitem.path.is_relative_to(HERE):
        ray.shutdown()


def trial_config(**values: Any) -> dict[str, Any]:
    """Return the config of a trial that takes a few seconds, updated with `values`.

    By default the trial is disaggregated, and learner and generator have one thread each.
    """
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
    if "reward" in data["task"] or "name" in data["task"]:
        del data["task"]["match"]  # only the reward of the task `keyword` reads this setting
    return data


def untimed(
    row: dict[str, Any], names: Container[str] = NAMES, apart: tuple[str, ...] = ()
) -> dict[str, float]:
    """Return a row's columns about training, and the numbers that environments report.

    Times, and measurements of the machine, are left out.

    Args:
        row: A row of metrics.
        names: The columns to choose from.
        apart: Prefixes of further columns to leave out.
    """
    left_out = (*TIMED, "fleet/", *apart)
    return {
        k: row[k] for k in row if (k in names or is_named_by_user(k)) and not k.startswith(left_out)
    }


def rows(trial: Path | str) -> list[dict[str, Any]]:
    """Return the rows of metrics in the directory of a trial, which may be writing the next one."""
    lines = (Path(trial) / "result.json").read_text().split("\n")
    return [json.loads(line) for line in lines[:-1]]


def checkpoints(trial: Path | str) -> list[Path]:
    return sorted(Path(trial).glob("checkpoint_*"))


def written_by_the_page(page: str, title: str, directory: Path) -> Path:
    """Write the file that a page of docs/howto shows under `title`, and return its path."""
    text = (HERE.parents[1] / "docs" / "howto" / page).read_text(encoding="utf-8")
    _, _, rest = text.partition(f'```python title="{title}"\n')
    path = directory / title
    path.write_text(rest.partition("```\n")[0], encoding="utf-8")
    return path


def wait_for(condition: Callable[[], Any], timeout_s: float) -> Any:
    """Wait until `condition` returns a true value, and return that value."""
    end = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.2)
    return found


def actor_processes() -> dict[int, str]:
    """Return the titles of our actors' processes, by pid, without Ray's idle workers."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        try:
            title = " ".join(process.cmdline())
        except psutil.Error:
            continue  # the process has ended meanwhile
        if any(f"ray::{role}" in title for role in ("Generator", "Learner", "Colocated", "GRPO")):
            found[process.pid] = title
    return found


def assert_no_actor_left(seconds: float = 60.0, before: Collection[int] = ()) -> None:
    """Check that our actors end in time.

    Args:
        seconds: Maximum time to wait for their end.
        before: Pids of actors that existed before the test and may stay, such as those that the
            fixture `begun` keeps.
    """
    deadline = time.monotonic() + seconds
    while (left := actor_processes().keys() - before) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


def own_processes(trainable: GRPOTrainable) -> dict[str, int]:
    """Return the pids of a trial's actors by the actors' names."""
    trial = trainable.trial
    calls = [actor.submit_function("probe", os.getpid) for actor in trial.actors]
    return {call.actor.name: await_call(trial.runtime, call, 60.0) for call in calls}


def kill(trainable: GRPOTrainable, name: str) -> None:
    next(actor for actor in trainable.trial.actors if actor.name == name).kill()


@pytest.fixture
def trainable(ray_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield a function that builds Trainables in new processes, outside Tune.

    The fixture stops the Trainables after the test.
    """
    monkeypatch.setattr("ray.tune.trainable.trainable.DEFAULT_STORAGE_PATH", str(tmp_path))
    built = []

    def build(config: dict[str, Any]) -> GRPOTrainable:
        built.append(GRPOTrainable(config))
        return built[-1]

    yield build
    for trainable in built:
        trainable.stop()


@pytest.fixture(scope="module")
def begun(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Yield a function that begins trials outside Tune and reuses earlier actors if possible.

    PBT reuses actors in the same way for a clone. Starting actors takes most of a short trial's
    time. test_arms.py shows that nothing of the earlier trial remains.
    """
    patch = pytest.MonkeyPatch()
    storage = str(tmp_path_factory.mktemp("begun"))
    patch.setattr("ray.tune.trainable.trainable.DEFAULT_STORAGE_PATH", storage)
    kept: list[DetailedGRPO] = []

    def begin(config: dict[str, Any]) -> DetailedGRPO:
        wanted = GRPOConfig.from_dict(config)
        for earlier in kept:
            had = earlier.trial.config
            if all(wanted[key] == had[key] for key in BUILT_INTO_ACTORS):
                assert earlier.reset(dict(config))
                return earlier
        kept.append(DetailedGRPO(dict(config)))
        return kept[-1]

    yield begin
    for trainable in kept:
        trainable.stop()
    patch.undo()


def fit(
    space: dict[str, Any],
    storage: Path,
    trainable: type = GRPOTrainable,
    one_by_one: bool = False,
    **options: Any,
) -> tune.ResultGrid:
    """Run trials under Tune and return their results.

    Args:
        space: The search space.
        storage: The directory for the experiment.
        trainable: The class to run.
        one_by_one: Run one trial at a time, each in the actors of the previous trial if both
            reserve the same resources.
        **options: Options of the RunConfig.
    """
    return tune.Tuner(
        trainable,
        param_space=space,
        tune_config=tune.TuneConfig(
            reuse_actors=one_by_one, max_concurrent_trials=1 if one_by_one else None
        ),
        run_config=tune.RunConfig(
            name="experiment", storage_path=str(storage), verbose=0, **options
        ),
    ).fit()


@pytest.fixture
def in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Prepare the test's process for commands that are called as functions.

    The test's temporary directory becomes the current directory. Settings of the process are
    restored after the test.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAYON_NUM_THREADS", os.environ.get("RAYON_NUM_THREADS", "1"))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
