"""Trials on a cluster of three machines with two CPUs each."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
from ray_cluster import Cluster

from grpo_trainable.tasks.keyword import NOUNS_FILE

TINY = (
    *("--space", "async_vs_sync", "--set", "arm=async_k1", "--set", "rollout.prompts=4"),
    *("--set", "eval.prompts=8", "--set", "eval.samples=1", "--name", "trial"),
)


def rows(storage: Path) -> list[dict]:
    (path,) = storage.glob("trial/*/result.json")
    return [json.loads(line) for line in path.read_text().splitlines()]


# Every machine has two CPUs, so none has room for both the learner and the generators.
APART = (
    *("--set", "resources.learner_cpus=2", "--set", "resources.num_generators=2"),
    *("--set", "resources.generator_cpus=1"),
)


def test_a_trial_whose_actors_are_on_different_machines_ends_with_gloo(cluster: Cluster, tmp_path):
    status, printed = cluster.tune(
        *(*TINY, *APART, "--iterations", "4", "--storage", str(tmp_path)),
        *("--set", "transport=gloo"),
    )
    assert status == 0, printed
    assert [row["training_iteration"] for row in rows(tmp_path)] == [1, 2, 3, 4]


def test_learners_share_a_machine_and_weights_travel_to_each_generator_by_what_leads_there(
    cluster: Cluster, tmp_path
):
    # The learners and one generator fill a machine, so the other generator is on another machine.
    status, printed = cluster.tune(
        *(*TINY, "--iterations", "4", "--storage", str(tmp_path)),
        *("--set", "resources.num_learners=2", "--set", "resources.learner_cpus=0.25"),
        *("--set", "resources.spread=one_node_learners", "--set", "resources.num_generators=2"),
        *("--set", "resources.generator_cpus=1.4"),
    )
    assert status == 0, printed
    assert [row["training_iteration"] for row in rows(tmp_path)] == [1, 2, 3, 4]
    (trial,) = tmp_path.glob("trial/*/versions")
    ways: dict[str, set[str]] = {}
    for change in pq.read_table(trial).to_pylist():
        if change["side"] == "generator":
            ways.setdefault(change["actor"], set()).add(change["transport"])
    assert sorted(map(sorted, ways.values())) == [["object_store"], ["shm"]], printed


def test_an_actor_larger_than_any_machine_is_refused(cluster: Cluster, tmp_path):
    status, printed = cluster.tune(
        *TINY, "--storage", str(tmp_path), "--set", "resources.learner_cpus=3"
    )
    assert status == 2
    (line,) = printed.splitlines()
    assert "find" in line or "(2 CPUs, 2 CPUs, 2 CPUs) have no room for them" in line


def test_an_address_at_which_nobody_listens_is_one_line(cluster: Cluster, tmp_path):
    status, printed = cluster.tune(
        *TINY, "--storage", str(tmp_path), "--address", f"{cluster.machines[1].address}:6380"
    )
    assert status == 2
    (line,) = printed.splitlines()
    assert "--address 10.77.0.2:6380: nothing answers there" in line


def test_a_cluster_with_another_token_is_one_line(cluster: Cluster, tmp_path):
    status, printed = cluster.tune(*TINY, "--storage", str(tmp_path), RAY_AUTH_TOKEN="0" * 64)
    assert status == 2
    assert f"--address {cluster.address}: Ray refuses the connection" in printed.splitlines()[-1]


def test_storage_that_not_every_machine_sees_is_refused(cluster: Cluster):
    own = cluster.disk / "runs"
    status, printed = cluster.tune(*TINY, "--storage", str(own))
    assert status == 2
    assert f"--storage {own}: node 10.77.0." in printed.splitlines()[-1]
    assert "choose a directory that all nodes share" in printed


def test_a_trial_whose_actors_are_on_different_machines_reads_files_of_the_first_and_ends(
    cluster: Cluster, tmp_path
):
    words = cluster.disk / "mine" / "words.txt"
    first, *others = cluster.machines
    status, printed = first.run(
        ["sh", "-ec", f"mkdir -p {words.parent}; cp {NOUNS_FILE} {words}"], {}
    )
    assert status == 0, printed
    reading = (*TINY, "--set", f"task.keywords_file={words}", "--iterations", "4")
    status, printed = cluster.tune(*reading, *APART, "--storage", str(tmp_path))
    assert status == 0, printed
    assert [row["training_iteration"] for row in rows(tmp_path)] == [1, 2, 3, 4]
    for machine in others:
        assert machine.run(["cat", str(words)], {}) == (0, NOUNS_FILE.read_text())

    # If another machine has a different file at this path, the file is reported and not touched.
    others[0].run(["sh", "-c", f"echo cat > {words}"], {})
    status, printed = cluster.tune(*reading, "--storage", str(tmp_path / "again"))
    assert status == 2
    told = (
        f"node {others[0].address} of the cluster has a different file at {words}; remove it there"
    )
    assert told in printed.splitlines()[-1]
    assert others[0].run(["cat", str(words)], {}) == (0, "cat\n")
