"""Every space resolves to valid trials, and Tune resolves its param_space to the same trials."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from ray.tune.search.variant_generator import generate_variants

from grpo_trainable.algo import ADVANTAGES, AGGREGATIONS
from grpo_trainable.config import CHECKS, ConfigError, GRPOConfig, resources, schedule
from grpo_trainable.telemetry.metrics import NAMES
from search_spaces import SPACES
from search_spaces.columns import DERIVED
from tuning.grid import param_space

SPACE = SPACES["async_vs_sync"]


@pytest.mark.slow
@pytest.mark.parametrize("name", SPACES)
def test_every_space_resolves_to_valid_and_different_trials(name):
    # Arms that need GPUs are valid configs on this machine as well.
    trials = SPACES[name].trials({}, [0, 1])

    assert len(trials) == 2 * len(SPACES[name].arms)
    assert len({repr({**t.to_dict(), "arm": ""}) for t in trials}) == len(trials)


@pytest.mark.slow
@pytest.mark.parametrize("name", SPACES)
def test_every_arm_asks_for_the_same_number_of_samples_and_evaluates_as_often(name):
    trials = SPACES[name].trials({}, [0])

    assert {t.rounds * schedule.prompts_per_round(t) * t.rollout.group_size for t in trials} == {
        96 * 16 * 4
    }
    assert {t.rounds / t.eval.every for t in trials} == {6.0}


def test_async_vs_sync_has_the_arms_that_the_question_needs():
    arms = {(t.placement, t.lag, t.k, resources.devices(t)) for t in SPACE.trials({}, [0])}

    assert arms == {
        *(("colocated", 0, k, 0.95) for k in (1, 2, 4, 8)),
        *(("colocated", 0, 1, 1.9), ("disaggregated", 0, 1, 1.9)),
        *(("disaggregated", 1, 1, 1.9), ("disaggregated", 1, 4, 1.9)),
    }


def test_the_off_policy_spaces_have_the_arms_that_their_questions_need():
    steps = {(t.k_mode, t.k) for t in SPACES["gradient_steps"].trials({}, [0]) if t.k > 1}
    assert steps == {
        (k_mode, k) for k_mode in ("same_batch", "minibatches", "fresh_batches") for k in (2, 4, 8)
    }
    lags = {(t.lag, t.loss.importance_cap) for t in SPACES["lag"].trials({}, [0])}
    assert lags == {(lag, cap) for lag in (0, 1, 2, 4, 8) for cap in (None, 2.0)}
    exact = {(t.lag, t.lag_mode, t.placement) for t in SPACES["lag_exact"].trials({}, [0])}
    assert exact == {(lag, "exact", "colocated") for lag in (0, 1, 2, 4, 8)}
    replays = {(t.buffer_capacity, t.buffer_sampling) for t in SPACES["replay"].trials({}, [0])}
    assert replays == {
        (1, "recency"),
        (2, "recency"),
        *((capacity, s) for capacity in (4, 8) for s in ("fifo", "uniform", "mixed")),
    }


def test_the_spaces_of_the_objective_have_the_arms_that_their_questions_need():
    losses = {(t.loss.type, t.loss.dual_clip) for t in SPACES["losses"].trials({}, [0])}
    # no_baseline needs loss.advantage=none, and ppo needs one advantage per token.
    built_in = {*CHECKS["loss.type"].choices} - {"no_baseline", "ppo"}
    assert losses == {*((name, None) for name in built_in), ("grpo_clip", 3.0)}
    advantages = [t.loss.advantage for t in SPACES["baselines"].trials({}, [0])]
    assert {*advantages, "zero"} == ADVANTAGES.keys()
    assert len(advantages) == len(ADVANTAGES) - 1
    lengths = [t.loss.aggregation for t in SPACES["length_norm"].trials({}, [0])]
    assert lengths == list(AGGREGATIONS)
    stds = [t.loss.advantage for t in SPACES["std_norm"].trials({}, [0])]
    assert stds == ["group_std", "group_mean", "group_mean_batch_std"]
    rates = [t.optim.lr for t in SPACES["learning_rate"].trials({}, [0])]
    assert rates[0] == GRPOConfig().optim.lr
    assert {max(rates) / min(rates)} == {50.0}


@pytest.mark.slow
def test_the_atlas_crosses_at_least_14_objectives_with_three_lags():
    trials = SPACES["objectives_by_lag"].trials({}, [0])
    by_objective: dict[str, set[int]] = {}
    for trial in trials:
        by_objective.setdefault(repr(trial.loss), set()).add(trial.lag)
    assert len(by_objective) >= 14
    assert all(lags == {0, 4, 8} for lags in by_objective.values())
    # Only the objective and the lag differ.
    rest = {repr({**t.to_dict(), "arm": "", "lag": 0, "loss": {}}) for t in trials}
    assert len(rest) == 1


@pytest.mark.parametrize("name", SPACES)
def test_every_column_shows_a_metric_that_there_is(name):
    assert {column.metric for column in SPACES[name].columns} <= {*NAMES, *DERIVED}


def test_the_transport_space_leaves_out_what_this_machine_has_not():
    space = replace(SPACES["transport"], missing={"nixl": "no nixl"}.get)
    assert space.not_available() == {"nixl": "no nixl"}
    trials = space.trials({}, [0], without=space.not_available())
    assert [t.transport for t in trials] == ["object_store", "shm", "gloo", "nccl", "cuda_ipc"]
    # The user may still name this arm. The launcher then rejects the arm and gives the reason.
    (named,) = space.trials({"arm": "nixl"}, [0], without=space.not_available())
    assert named.transport == "nixl"


@pytest.mark.slow
def test_tune_resolves_the_param_space_to_the_same_configs():
    trials = SPACE.trials({"optim.lr": 2e-4}, [3, 4])

    resolved = [config for _, config in generate_variants(param_space(trials))]

    assert {repr(GRPOConfig.from_dict(config)) for config in resolved} == set(map(repr, trials))


def test_tune_resolves_arms_that_run_different_tasks_to_the_same_configs():
    own = {"task": {"name": "my:Task", "size": 3}}
    trials = [GRPOConfig.from_dict({"arm": "ours"}), GRPOConfig.from_dict({"arm": "mine", **own})]

    resolved = [config for _, config in generate_variants(param_space(trials))]

    assert [GRPOConfig.from_dict(config) for config in resolved] == trials


def test_only_named_arms_run_in_the_order_of_the_space():
    trials = SPACE.trials({"arm": "async_k1, sync,async_k1"}, [0, 1])
    assert [(t.arm, t.seed) for t in trials] == [
        ("sync", 0),
        ("sync", 1),
        ("async_k1", 0),
        ("async_k1", 1),
    ]
    with pytest.raises(ConfigError, match="arm=asynck1: not an arm of async_vs_sync; did you mean"):
        SPACE.trials({"arm": "sync,asynck1"}, [0])


def test_a_fixed_key_replaces_what_the_arm_says_in_every_trial():
    assert {t.rounds for t in SPACE.trials({"rounds": 5}, [0])} == {5}


def test_a_resource_of_one_placement_is_fixed_in_the_arms_of_that_placement():
    gpus = {f"resources.{name}_gpus": 0.5 for name in ("worker", "generator", "learner")}
    for trial in SPACE.trials(gpus, [0]):
        assert [bundle.get("GPU") for bundle in resources.bundles(trial)] in (
            [None, 0.5],
            [None, 0.5, 0.5],
        )


def test_a_resource_that_no_arm_reserves_is_refused():
    fixed = {"arm": "sync", "resources.worker_gpus": 1}
    with pytest.raises(
        ConfigError, match=r"worker_gpus=1\.0: has no effect with placement=disaggregated"
    ):
        SPACE.trials(fixed, [0])


def test_a_key_that_an_arm_does_not_read_is_refused_with_the_arm():
    with pytest.raises(ConfigError, match=r"lag >= 1 \(arm sync of async_vs_sync\)"):
        SPACE.trials(
            {"weight_update": "in_flight", "placement": "disaggregated", "arm": "sync"}, [0]
        )
    with pytest.raises(ConfigError, match=r"needs k_mode=minibatches \(arm k1 of gradient_steps\)"):
        SPACES["gradient_steps"].trials({"optim.epochs": 2}, [0])


def test_trials_that_a_fixed_key_makes_equal_are_merged():
    trials = SPACE.trials({"k": 1, "rounds": 8, "eval.every": 4}, [0])

    assert [t.arm for t in trials] == [
        *("colocated_k1", "colocated_k1_two_cores", "sync", "async_k1")
    ]


@pytest.mark.parametrize(
    ("fixed", "labels"),
    [
        ({"arm": "colocated_k1", "k": 4}, ["colocated_k1+k_4"]),
        ({"arm": "async_k1", "k": 4, "lag": 2}, ["async_k1+lag_2+k_4"]),
        # The number of rounds is not part of an arm's identity.
        ({"arm": "colocated_k1", "rounds": 5, "eval.every": 5}, ["colocated_k1"]),
        # The arm does not set this key.
        ({"arm": "colocated_k1", "optim.lr": 1e-3}, ["colocated_k1"]),
        # With equal numbers of rounds, colocated_k1 with k=4 equals colocated_k4.
        (
            {"k": 4, "rounds": 8, "eval.every": 4},
            ["colocated_k4", "colocated_k1_two_cores+k_4", "sync+k_4", "async_k4"],
        ),
    ],
)
def test_a_label_tells_the_settings_of_its_arm_that_a_fixed_key_changes(fixed, labels):
    trials = SPACE.trials(fixed, [0, 1])
    assert [t.arm for t in trials if t.seed == 0] == labels
    assert [t.arm for t in trials if t.seed == 1] == labels
    for label in labels:
        assert SPACE.arm_of(label) == label.partition("+")[0]


def test_a_label_has_only_characters_that_a_directory_may_have():
    space = replace(SPACE, arms={"own": {"model.path": "a", "rollout.stop": ["x"]}})
    (trial,) = space.trials({"model.path": "/home/me/my policy", "rollout.stop": ["</end>"]}, [0])
    assert trial.arm == "own+path_my-policy+stop_end"


def test_fixing_the_arm_runs_that_arm_only():
    assert [t.arm for t in SPACE.trials({"arm": "sync"}, [0])] == ["sync"]


def test_an_unknown_arm_suggests_the_nearest():
    with pytest.raises(ConfigError, match=r"did you mean async_k1\?"):
        SPACE.trials({"arm": "asynck1"}, [0])


def test_a_shortened_arm_suggests_the_arms_that_begin_with_it():
    with pytest.raises(ConfigError, match=r"did you mean async_k1 or async_k4\?"):
        SPACE.trials({"arm": "async"}, [0])


def test_the_page_about_running_asks_the_questions_of_the_spaces():
    page = Path(__file__).resolve().parents[3] / "docs" / "running.md"
    (table,) = re.findall(r"\| space \| question \|\n\|---\|---\|\n((?:\|.*\n)+)", page.read_text())
    assert dict(re.findall(r"\| `(\w+)` \| (.*) \|", table)) == {
        space.name: space.question for space in SPACES.values()
    }


def test_one_invalid_trial_refuses_the_space_and_names_the_arm():
    with pytest.raises(ConfigError, match=r"lag=1: needs placement=disaggregated.*colocated_k1"):
        SPACE.trials({"lag": 1}, [0])
