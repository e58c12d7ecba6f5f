"""`room_beside` predicts whether Ray has room for a trial, and Ray must agree."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, remove_placement_group

from grpo_trainable.config.placement import room_beside

SIZES = (6.0, 4.0, 3.0)  # CPUs of each node
CASES = [
    [0.1, 2.9, 2.0, 2.0],
    [0.1, 2.9, 2.9, 1.9, 1.9],
    [3.9, 3.9],
    [3.9, 2.9, 2.9],
    [5.0, 4.0, 3.0],
    [4.0, 4.0, 4.0],
    [3.0, 3.0, 3.0, 3.0],
    [3.5, 2.5, 2.5, 2.5],
    [2.0, 2.0, 2.0, 2.0, 2.0, 2.0],
    [2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 1.0],
]


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[dict[str, float]]]:
    ray.shutdown()  # end the Ray of earlier modules
    head, *others = SIZES
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": head, "num_gpus": 0, "include_dashboard": False},
    )
    for size in others:
        cluster.add_node(num_cpus=size, num_gpus=0)
    ray.init(address=cluster.address, logging_level="ERROR")
    cluster.wait_for_nodes()
    yield [{"CPU": size} for size in SIZES]
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.parametrize("strategy", ["PACK", "SPREAD"])
def test_what_is_said_to_fit_is_what_ray_places(
    nodes: list[dict[str, float]], strategy: str
) -> None:
    said, placed = {}, {}
    for cpus in CASES:
        bundles = [{"CPU": size} for size in cpus]
        said[str(cpus)] = room_beside(bundles, nodes, strategy) is not None
        group = placement_group(bundles, strategy=strategy)
        placed[str(cpus)] = group.wait(timeout_seconds=30 if said[str(cpus)] else 1)
        remove_placement_group(group)
    assert placed == said
    assert set(said.values()) == {True, False}
