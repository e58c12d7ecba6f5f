"""Lookup of the machine of each bundle in a placement group."""

from __future__ import annotations

from grpo_trainable.cluster.bundles import node_of

NODES = [
    {"NodeID": "a", "Alive": True, "NodeManagerAddress": "10.0.0.1"},
    {"NodeID": "b", "Alive": False, "NodeManagerAddress": "10.0.0.2"},
]


def test_a_bundle_lies_where_ray_put_it():
    assert node_of(2, {0: "b", 2: "a"}, NODES) == NODES[0]


def test_a_bundle_of_a_dead_machine_has_no_room():
    assert node_of(2, {0: "a", 2: "b"}, NODES) is None


def test_a_bundle_that_waits_for_a_machine_has_no_room():
    # Ray clears the machine of a bundle that it has to place again.
    assert node_of(2, {0: "a", 2: ""}, NODES) is None
    assert node_of(2, {0: "a"}, NODES) is None
