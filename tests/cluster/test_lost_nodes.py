"""A cluster loses a machine during a trial, and the machine joins again later."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machines import Machine
from ray_cluster import Cluster

# Each machine has room for one actor, so none can take over the generator of a lost machine.
SPREAD = (
    *("--space", "async_vs_sync", "--set", "arm=async_k1", "--set", "rollout.prompts=4"),
    *("--set", "eval.prompts=8", "--set", "eval.samples=1", "--set", "eval.every=1000"),
    *("--set", "resources.learner_cpus=1.9", "--set", "resources.generator_cpus=1.9"),
    *("--set", "resources.num_generators=2", "--set", "rollout.unit_prompts=1"),
    *("--set", "rollout.max_new_tokens=8", "--iterations", "5000", "--name", "lost"),
)

# Most of the test waits for Ray, so it leaves the cores to other tests meanwhile.
UNHURRIED = """
import time


def score(response, ground_truth):
    time.sleep(0.1)
    return float(len(response) % 3)
"""


def rows(storage: Path) -> list[dict[str, Any]]:
    paths = list(storage.glob("lost/*/result.json"))
    lines = paths[0].read_text().splitlines() if paths else []
    return [json.loads(line) for line in lines]


def wait_for(condition: Callable[[], Any], seconds: float) -> Any:
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.5)
    return found


def titles(machine: Machine) -> str:
    paths = [Path(f"/proc/{pid}/cmdline") for pid in machine.processes()]
    return " ".join(path.read_text() for path in paths if path.exists())


def with_a_generator_alone(cluster: Cluster) -> Machine | None:
    """Return a machine that runs a generator, but neither the trial nor the head of the cluster."""
    for machine in cluster.machines[1:]:
        found = titles(machine)
        if "ray::Generator" in found and "ray::DetailedGRPO" not in found:
            return machine
    return None


def test_a_trial_goes_on_without_a_lost_machine_and_uses_the_one_that_comes(
    cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "unhurried.py").write_text(UNHURRIED)
    reward = f"task.reward={tmp_path}/unhurried.py:score"
    command = cluster.command(*SPREAD, "--set", reward, "--storage", str(tmp_path))
    with cluster.machines[0].start(command, cluster.environment) as running:
        wait_for(lambda: len(rows(tmp_path)) >= 3, 240.0)
        machine = wait_for(lambda: with_a_generator_alone(cluster), 10.0)
        machine.kill()
        wait_for(lambda: rows(tmp_path)[-1]["fleet/generators"] == 1, 120.0)
        reached = len(rows(tmp_path))
        wait_for(lambda: len(rows(tmp_path)) >= reached + 3, 120.0)
        cluster.join(machine)
        wait_for(lambda: rows(tmp_path)[-1]["fleet/generators"] == 2, 240.0)
        running.send_signal(signal.SIGINT)
        told, _ = running.communicate()
    assert running.returncode == 130, told
    assert "and no machine has room for another: continuing with 1 of 2 generators" in told
    assert "is back: 2 of 2 generators" in told
    rounds = [row["training_iteration"] for row in rows(tmp_path)]
    assert rounds == list(range(1, len(rounds) + 1))
    last = rows(tmp_path)[-1]
    parts = ("trained", "dropped", "waiting", "in_flight")
    assert last["count/requested"] == sum(last[f"count/{part}"] for part in parts)
