"""Bundles of a placement group: their sizes, and the machine of each."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from grpo_trainable.cluster import bundles
from grpo_trainable.cluster.bundles import node_of, refuse_other_bundles
from grpo_trainable.config import ConfigError, GRPOConfig

NODES = [
    {"NodeID": "a", "Alive": True, "NodeManagerAddress": "10.0.0.1"},
    {"NodeID": "b", "Alive": False, "NodeManagerAddress": "10.0.0.2"},
]


def test_a_bundle_lies_where_ray_put_it():
    assert node_of(2, {0: "b", 2: "a"}, NODES) == NODES[0]


def test_a_bundle_of_a_dead_machine_has_no_room():
    assert node_of(2, {0: "a", 2: "b"}, NODES) is None


def test_a_bundle_that_waits_for_a_machine_has_no_room():
    # Ray names no machine for a bundle that it has to place again.
    assert node_of(2, {0: "a", 2: ""}, NODES) is None
    assert node_of(2, {0: "a"}, NODES) is None


# ---- Sizes ---------------------------------------------------------------------------------------

TWO = GRPOConfig.from_dict({"placement": "disaggregated", "resources": {"learner_gpus": 1}})


def reserve(monkeypatch, *reserved):
    group = SimpleNamespace(bundle_specs=list(reserved))
    monkeypatch.setattr(bundles.ray.util, "get_current_placement_group", lambda: group)


@pytest.mark.parametrize(
    "reserved",
    [
        ({"CPU": 0.1}, {"CPU": 0.95, "GPU": 1.0}, {"CPU": 0.95}),
        ({"CPU": 0.1}, {"CPU": 0.94999, "GPU": 1.0}, {"CPU": 0.95}),  # rounded
        ({"CPU": 1.0}, {"CPU": 2.0, "GPU": 1.0}, {"CPU": 1.0}, {"CPU": 1.0}),
    ],
)
def test_bundles_that_suffice_are_taken(monkeypatch, reserved):
    reserve(monkeypatch, *reserved)
    refuse_other_bundles(TWO)


@pytest.mark.parametrize(
    "reserved",
    [
        ({"CPU": 4.0},),
        ({"CPU": 0.1}, {"CPU": 0.95, "GPU": 1.0}),
        ({"CPU": 0.1}, {"CPU": 0.95}, {"CPU": 0.95}),
        ({"CPU": 0.1}, {"CPU": 0.5, "GPU": 1.0}, {"CPU": 0.95}),
    ],
)
def test_a_missing_or_small_bundle_is_refused(monkeypatch, reserved):
    reserve(monkeypatch, *reserved)
    with pytest.raises(
        ConfigError, match=r"^placement=disaggregated: needs the bundles .*with_res"
    ):
        refuse_other_bundles(TWO)


def test_outside_tune_no_bundle_is_needed(monkeypatch):
    monkeypatch.setattr(bundles.ray.util, "get_current_placement_group", lambda: None)
    refuse_other_bundles(TWO)
