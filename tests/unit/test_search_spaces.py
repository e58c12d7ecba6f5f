"""Every space resolves to valid trials, and Tune resolves its param_space to the same ones."""

from __future__ import annotations

import pytest
from ray.tune.search.variant_generator import generate_variants

from grpo_trainable.config import ConfigError, GRPOConfig
from search_spaces import SPACES
from search_spaces.base import param_space

SPACE = SPACES["async_vs_sync"]


@pytest.mark.parametrize("name", SPACES)
def test_every_space_resolves_to_valid_and_different_trials(name):
    trials = SPACES[name].trials({}, [0, 1])

    assert len(trials) == 2 * len(SPACES[name].arms)
    assert len({repr({**t.to_dict(), "arm": ""}) for t in trials}) == len(trials)


def test_every_arm_of_async_vs_sync_trains_on_the_same_number_of_samples():
    samples = {t.rounds * t.prompts_per_round * t.rollout.group_size for t in SPACE.trials({}, [0])}

    assert samples == {64 * 16 * 4}


def test_async_vs_sync_has_the_arms_that_the_question_needs():
    arms = {(t.placement, t.lag, t.k) for t in SPACE.trials({}, [0])}

    assert arms == {
        *(("colocated", 0, k) for k in (1, 2, 4, 8)),
        ("disaggregated", 0, 1),
        ("disaggregated", 1, 1),
        ("disaggregated", 1, 4),
    }


def test_tune_resolves_the_param_space_to_the_same_configs():
    trials = SPACE.trials({"optim.lr": 2e-4}, [3, 4])

    resolved = [config for _, config in generate_variants(param_space(trials))]

    assert {repr(GRPOConfig.from_dict(config)) for config in resolved} == set(map(repr, trials))


def test_a_fixed_key_replaces_what_the_arm_says_in_every_trial():
    assert {t.rounds for t in SPACE.trials({"rounds": 5}, [0])} == {5}


def test_trials_that_a_fixed_key_makes_equal_are_merged():
    trials = SPACE.trials({"k": 1, "rounds": 8, "eval.every": 4}, [0])

    assert [t.arm for t in trials] == ["colocated_k1", "sync", "async_k1"]


def test_fixing_the_arm_runs_that_arm_only():
    assert [t.arm for t in SPACE.trials({"arm": "sync"}, [0])] == ["sync"]


def test_an_unknown_arm_suggests_the_nearest():
    with pytest.raises(ConfigError, match="did you mean async_k1"):
        SPACE.trials({"arm": "asynck1"}, [0])


def test_one_invalid_trial_refuses_the_space_and_names_the_arm():
    with pytest.raises(ConfigError, match=r"lag=1: needs placement=disaggregated.*colocated_k1"):
        SPACE.trials({"lag": 1}, [0])
