"""All combinations in the space of whole systems are valid and use equal numbers of samples."""

from __future__ import annotations

import ast
import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray.tune.search.variant_generator import generate_variants

from grpo_trainable.config import ConfigError, GRPOConfig, resources, schedule
from search_spaces import system_space

ROOT = Path(__file__).resolve().parents[3]


def corners(**options: Any) -> list[GRPOConfig]:
    space = system_space(grid=True, **options)
    return [GRPOConfig.from_dict(config) for _, config in generate_variants(space)]


@pytest.mark.slow
def test_every_corner_is_valid_and_none_appears_twice():
    trials = corners()

    assert len(trials) == len({repr(trial) for trial in trials}) == 630
    system = ("placement", "lag", "weight_update", "transport")
    assert {tuple(trial[key] for key in system) for trial in trials} == {
        ("colocated", 0, "between_batches", "auto"),
        *(
            ("disaggregated", lag, update, transport)
            for lag, update in [
                (0, "between_batches"),
                *itertools.product(
                    (1, 2, 4), ("between_batches", "interrupt_recompute", "in_flight")
                ),
            ]
            for transport in ("auto", "object_store")
        ),
    }
    assert {(trial.k, trial.k_mode) for trial in trials} == {
        (1, "same_batch"),
        *itertools.product((2, 4, 8), ("same_batch", "minibatches", "fresh_batches")),
    }
    assert {trial.buffer_capacity for trial in trials} == {1, 2, 4}


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [8, 24, 96])
def test_every_corner_asks_for_the_same_number_of_samples_and_evaluates_as_often(rounds):
    trials = corners(rounds=rounds, lags=[1])

    samples = {trial.rounds * schedule.responses_per_round(trial) for trial in trials}
    assert samples == {rounds * 16 * 4}
    (evaluations,) = {trial.rounds / trial.eval.every for trial in trials}
    assert evaluations == {8: 1, 24: 3, 96: 6}[rounds]


def test_a_random_sample_is_a_corner():
    space = {**system_space(), "optim": {"lr": 1e-4}}
    (config,) = (config for _, config in generate_variants(space, random_state=3))

    assert isinstance(config["set"]["actors"], str)
    assert GRPOConfig.from_dict(config).optim.lr == 1e-4


def test_every_sample_is_valid_with_the_settings_of_the_page():
    blocks = re.findall(r"^SMALL = (.*)$", (ROOT / "docs/howto/tuner.md").read_text(), re.M)
    (small,) = map(ast.literal_eval, blocks)
    space = system_space(small)
    random_state = np.random.RandomState(0)
    drawn = [
        config
        for _ in range(200)
        for _, config in generate_variants(space, random_state=random_state)
    ]

    trials = [GRPOConfig.from_dict(config) for config in drawn]  # raises if a sample is invalid
    assert len(trials) == 200
    assert {trial.rollout.prompts for trial in trials} == {small["rollout"]["prompts"]}
    assert {(trial.k, trial.k_mode) for trial in trials} == {
        (1, "same_batch"),
        *itertools.product((2, 4), ("same_batch", "minibatches", "fresh_batches")),
        *itertools.product((8,), ("same_batch", "fresh_batches")),
    }


@pytest.mark.parametrize(
    ("settings", "options", "left"),
    [
        ({"buffer_sampling": "uniform"}, {"buffer_capacities": [1, 2, 4]}, {2, 4}),
        ({"buffer": {"max_age": 8}}, {"buffer_capacities": [1, 2]}, {2}),
    ],
)
def test_values_are_checked_with_the_values_of_the_other_parameters(settings, options, left):
    trials = corners(settings=settings, ks=[1, 2], lags=[1], **options)
    assert {trial.buffer_capacity for trial in trials} == left


def test_settings_that_are_never_valid_are_refused():
    with pytest.raises(ConfigError, match=r"^optim.lr=fast"):
        system_space({"optim": {"lr": "fast"}})


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"rounds": 8}, r"^rounds=8: .* leave it out, and use system_space\(rounds=8\)$"),
        ({"buffer_capacity": 3}, r"^buffer_capacity=3: .*system_space\(buffer_capacities=\[3\]\)$"),
        ({"lag": 1}, r"^lag=1: .*system_space\(lags=\[1\]\)$"),
        ({"set": {"own": "k=2"}}, r"^k=2: .*system_space\(ks=\[2\]\)$"),
        ({"placement": "colocated"}, r"^placement=colocated: .*; leave it out$"),
        ({"eval": {"every": 2}}, r"^eval.every=2: .*; leave it out$"),
    ],
)
def test_settings_that_the_space_chooses_are_refused(settings, advice):
    with pytest.raises(ConfigError, match=advice):
        system_space(settings)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ks": []}, r"^ks=\[\]: must have at least one value$"),
        ({"ks": 3}, r"^ks=3: must be a list, such as \[3\]$"),
        ({"k_modes": "same_batch"}, r"^k_modes=same_batch: must be a list"),
        ({"buffer_capacities": ()}, r"^buffer_capacities=\[\]: must have at least one value$"),
        ({"rounds": None}, "^rounds=none: must be"),
        ({"rounds": "8"}, "^rounds=.*8.*: must be"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        system_space(**options)


def test_lag_0_is_included_whether_it_is_given_or_not():
    assert corners(lags=[0, 1], ks=[1]) == corners(lags=[1], ks=[1])


def test_single_values_fix_what_they_are_given_for():
    few = corners(lags=[2], weight_updates=["in_flight"], transports=["shm"], ks=[1])
    seen = {(t.placement, t.lag, t.transport) for t in few}

    assert seen == {
        ("colocated", 0, "auto"),
        ("disaggregated", 0, "shm"),
        ("disaggregated", 2, "shm"),
    }
    assert len(few) == 9


def test_each_placement_gets_the_resources_that_it_reads():
    gpus = {"worker_gpus": 1, "generator_gpus": 1, "learner_gpus": 1}
    trials = corners(resources=gpus, transports=["nccl"], lags=[1], ks=[1], buffer_capacities=[1])

    reserved = {t.placement: [b.get("GPU") for b in resources.bundles(t)] for t in trials}
    assert reserved == {"colocated": [None, 1.0], "disaggregated": [None, 1.0, 1.0]}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"rounds": 12}, "rounds=12: must be a multiple of 8, so that "),
        ({"transports": ["smh"]}, "transport=smh: must be one of "),
        ({"buffer_capacities": [0]}, "buffer_capacity=0: must be an integer >= 1"),
        ({"resources": {"worker_gpu": 1}}, "resources.worker_gpu: unknown key; did you mean "),
        ({"ks": [0]}, "k=0: must be an integer >= 1"),
    ],
)
def test_a_wrong_argument_is_refused_in_one_line(options, reason):
    with pytest.raises(ConfigError) as caught:
        system_space(**options)
    assert str(caught.value).startswith(reason)
