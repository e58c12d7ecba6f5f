"""The placement of a trial's actors on the nodes of a cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_trainable.command_line import UsageError
from grpo_trainable.config import ConfigError, GRPOConfig, resources
from grpo_trainable.config.placement import room_beside
from tuning.nodes import at_once, check_resources, this_machine, total


def cpus(*counts: float) -> list[dict[str, float]]:
    return [{"CPU": float(count)} for count in counts]


def trial(**resources: float | str) -> GRPOConfig:
    return GRPOConfig.from_dict({"placement": "disaggregated", "resources": resources})


def left_cpus(bundles, nodes, strategy="PACK"):
    left = room_beside(cpus(*bundles), cpus(*nodes), strategy)
    return None if left is None else [node["CPU"] for node in left]


def test_pack_fills_the_roomiest_node_before_it_takes_another():
    # The bundle of 3 CPUs goes to the node with 4, and the bundle of 1 still fits there. The bundle
    # of 2 goes to the node with 3.
    assert left_cpus((1, 2, 3), (4, 2, 3)) == [0, 2, 1]
    # The bundle of 2.9 CPUs goes to the node with 4, which then has no room for 2. The node with 3
    # has room for one bundle of 2, but not for both.
    assert left_cpus((0.1, 2.9, 2, 2), (4, 3)) is None
    # Both bundles of 2.9 go to the node with 6 CPUs, and both bundles of 1.9 to the node with 4.
    assert left_cpus((0.1, 2.9, 2.9, 1.9, 1.9), (6, 4)) == [0.1, 0.2]


def test_spread_takes_another_node_while_there_is_one():
    # Bundles of 3, 2 and 1 go to the nodes with 4, 3 and 2 CPUs. A second bundle of 1 goes to the
    # roomiest node.
    assert left_cpus((1, 2, 3), (4, 2, 3), "SPREAD") == [1, 1, 1]
    assert left_cpus((1, 1, 2, 3), (4, 2, 3), "SPREAD") == [0, 1, 1]
    assert left_cpus((3, 3), (6, 2), "SPREAD") == [0, 2]


def test_a_bundle_needs_its_room_on_one_node():
    assert room_beside(cpus(3), cpus(2, 2)) is None
    assert room_beside(cpus(2, 2), cpus(2, 2)) is not None
    assert room_beside(cpus(0.1, 0.95, 0.95), cpus(2)) is not None


def test_what_needs_a_gpu_is_placed_first():
    nodes = [{"CPU": 8.0, "GPU": 1.0}, {"CPU": 2.0}]
    # Actors that need no GPU may take the CPUs next to a GPU: Ray does not reserve them.
    assert room_beside(cpus(8), nodes) == [{"CPU": 0, "GPU": 1}, {"CPU": 2, "GPU": 0}]
    assert room_beside([{"CPU": 2.0}, {"CPU": 7.0, "GPU": 1.0}], nodes) is not None
    assert room_beside([{"CPU": 1.0, "GPU": 2.0}], nodes) is None


@pytest.mark.slow
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=6),
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
)
def test_what_is_left_and_what_is_placed_add_up(bundles, sizes):
    nodes = cpus(*sizes)
    left = room_beside(cpus(*bundles), nodes)
    if left is None:
        # The bundle that found no room needs at most 4 CPUs, so every node has at most 3 left.
        assert sum(bundles) > sum(sizes) - 3 * len(sizes)
    else:
        assert total(left, "CPU") == sum(sizes) - sum(bundles)
        assert all(node["CPU"] >= 0 for node in left)


def test_a_trial_that_fits_no_node_is_refused_though_the_cluster_has_enough():
    wide = trial(learner_cpus=3, num_generators=1, generator_cpus=1)
    check_resources([wide], cpus(4, 2), "the cluster")
    with pytest.raises(UsageError) as caught:
        check_resources([wide], cpus(2, 2, 2), "the cluster")
    assert str(caught.value) == (
        f"arm {wide.arm} has actors that need 0.1 CPUs, 3 CPUs, 1 CPU, each on one node, but the "
        "nodes of the cluster (2 CPUs, 2 CPUs, 2 CPUs) have no room for them; lower "
        "resources.generator_cpus or resources.learner_cpus"
    )


def test_a_trial_that_needs_more_than_there_is_is_told_how_much():
    needs = r"needs 4\.1 CPUs, but this machine has 2; lower resources"
    with pytest.raises(UsageError, match=needs):
        check_resources([trial(learner_cpus=3, generator_cpus=1)], cpus(2), "this machine")


def test_one_gpu_is_not_called_gpus():
    with pytest.raises(UsageError, match=r"needs 1 GPU, but this machine has 0; lower"):
        check_resources([trial(learner_gpus=1)], cpus(2), "this machine")


def test_a_generator_of_vllm_fits_on_a_machine_that_claims_a_gpu(monkeypatch):
    def sampled(gpus: float) -> list[GRPOConfig]:
        return [replace(trial(generator_gpus=gpus), engine="vllm")]

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    (machine,) = this_machine(sampled(1))
    assert machine["GPU"] == 1
    nodes = [{**machine, "CPU": 3.0}]
    check_resources(sampled(1), nodes, "this machine")
    with pytest.raises(UsageError, match=r"needs 2 GPUs, but this machine has 1; lower"):
        check_resources(sampled(2), nodes, "this machine")


def test_more_learners_than_cpus_are_refused():
    four = trial(num_learners=4, learner_cpus=1, generator_cpus=0.9)
    assert len(resources.bundles(four)) == 6
    assert resources.devices(four) == 4.9
    with pytest.raises(UsageError) as caught:
        check_resources([four], cpus(2), "this machine")
    assert str(caught.value) == (
        f"arm {four.arm} needs 5 CPUs, but this machine has 2; lower resources.generator_cpus or "
        "resources.learner_cpus or resources.num_learners"
    )


def test_as_many_trials_run_as_find_room_beside_each_other():
    narrow = trial(learner_cpus=1, generator_cpus=0.9)
    wide = trial(learner_cpus=3, generator_cpus=0.9)
    assert at_once([narrow] * 9, cpus(2)) == 1
    assert at_once([narrow] * 9, cpus(2, 2, 2)) == 3
    assert at_once([narrow] * 2, cpus(2, 2, 2)) == 2
    assert at_once([narrow, wide, narrow], cpus(4, 2, 2)) == 1


# ---- Learners on one node ----------------------------------------------------------------------


def together(**resources: float) -> GRPOConfig:
    return trial(spread="one_node_learners", **resources)


def test_learners_of_one_node_share_a_bundle_which_is_never_divided():
    three = together(num_learners=3, learner_cpus=2, num_generators=2, generator_cpus=1)
    assert resources.bundles(three) == cpus(0.1, 6, 1, 1)
    assert [resources.bundle_of(three, actor) for actor in range(5)] == [1, 1, 1, 2, 3]
    assert resources.devices(three) == 8.0
    apart = trial(num_learners=3, learner_cpus=2, num_generators=2, generator_cpus=1)
    assert resources.bundles(apart) == cpus(0.1, 2, 2, 2, 1, 1)
    assert [resources.bundle_of(apart, actor) for actor in range(5)] == [1, 2, 3, 4, 5]


@settings(max_examples=20)
@given(
    st.integers(2, 5),
    st.integers(1, 5),
    st.sampled_from([0.3333, 0.45, 0.95, 2.0]),
    st.sampled_from(["pack", "spread", "one_node_learners"]),
)
def test_every_bundle_has_just_the_room_for_its_actors(learners, generators, learner_cpus, spread):
    config = trial(
        num_learners=learners,
        learner_cpus=learner_cpus,
        num_generators=generators,
        generator_cpus=0.5,
        spread=spread,
    )
    needed = [0.1] + [0.0] * (len(resources.bundles(config)) - 1)
    for actor, own in enumerate([learner_cpus] * learners + [0.5] * generators):
        needed[resources.bundle_of(config, actor)] += own
    assert [bundle["CPU"] for bundle in resources.bundles(config)] == pytest.approx(
        needed, abs=1e-6
    )


def test_learners_that_fit_no_node_together_are_told_so():
    config = together(num_learners=2, learner_cpus=2, generator_cpus=1)
    check_resources([config], cpus(4, 2), "the cluster")
    with pytest.raises(
        UsageError, match=r"spread=pack, because one_node_learners puts all learners on one node$"
    ):
        check_resources([config], cpus(3, 3), "the cluster")
    check_resources([trial(num_learners=2, learner_cpus=2, generator_cpus=1)], cpus(3, 3), "it")


def test_ray_divides_no_bundle_so_the_rest_is_a_preference():
    names = ("pack", "spread", "one_node_learners")
    strategies = [
        resources.placement_strategy(trial(num_learners=2, spread=name)) for name in names
    ]
    assert strategies == ["PACK", "SPREAD", "PACK"]


def test_a_learner_alone_is_on_one_node_anyway():
    with pytest.raises(ConfigError, match=r"spread.*needs resources\.num_learners >= 2, got 1"):
        together(generator_cpus=1)
