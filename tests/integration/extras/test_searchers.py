"""Optuna and HyperOpt search the space of whole systems, and an invalid sample costs one trial."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import assert_no_actor_left, trial_config
from ray import cloudpickle, tune
from ray.tune.search.hyperopt import HyperOptSearch
from ray.tune.search.optuna import OptunaSearch

from grpo_trainable.config import ConfigError, GRPOConfig
from grpo_trainable.trainable import GRPOTrainable
from search_spaces import system_space

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's workers cannot import tests

METRIC = {"metric": "reward/eval_mean", "mode": "max"}


def searcher(name: str) -> Any:
    return OptunaSearch(seed=3) if name == "optuna" else HyperOptSearch(random_state_seed=3)


@pytest.mark.parametrize("name", ["optuna", "hyperopt"])
def test_a_hundred_samples_are_valid_and_differ(name: str) -> None:
    space = {**system_space(), "optim": {"lr": tune.loguniform(1e-5, 1e-3)}}
    search = searcher(name)
    assert search.set_search_properties(METRIC["metric"], METRIC["mode"], space)

    found = []
    for number in range(100):
        trial = GRPOConfig.from_dict(search.suggest(str(number)))
        found.append(trial)
        result = {METRIC["metric"]: float(trial.lag), "training_iteration": 1}
        search.on_trial_result(str(number), result)
        search.on_trial_complete(str(number), result)

    assert {trial.placement for trial in found} == {"colocated", "disaggregated"}
    assert {trial.buffer_capacity for trial in found} == {1, 2, 4}
    # The reward is the lag, and each searcher learns to prefer larger lags.
    lags = [trial.lag for trial in found]
    assert sum(lags[-40:]) > sum(lags[:40])


def test_exactly_the_planted_invalid_samples_fail_and_the_search_is_restored(
    ray_session: None, tmp_path: Path
) -> None:
    space = {
        **trial_config(rounds=1, rollout={"prompts": 2}),
        "placement": tune.choice(["colocated", "disaggregated"]),
        "lag": tune.choice([0, 1]),
    }
    planted = [{"placement": "colocated", "lag": lag} for lag in (1, 0, 1)]
    results = run(space, tmp_path, OptunaSearch(points_to_evaluate=planted), samples=3)

    failed = [result.error is not None for result in results]
    assert failed == list(map(invalid, results)) == [True, False, True]
    assert all(isinstance(error, ConfigError) for error in results.errors)
    restored = tune.Tuner.restore(results.experiment_path, GRPOTrainable, resume_errored=True).fit()
    assert [result.error is not None for result in restored] == list(map(invalid, restored))
    assert len(restored.errors) == len(results.errors)


def run(space: dict[str, Any], storage: Path, search: Any, samples: int) -> tune.ResultGrid:
    results = tune.Tuner(
        GRPOTrainable,
        param_space=space,
        tune_config=tune.TuneConfig(search_alg=search, num_samples=samples, **METRIC),
        run_config=tune.RunConfig(name="search", storage_path=str(storage), verbose=0),
    ).fit()
    assert_no_actor_left()
    assert len(results) == samples
    return results


def invalid(result: tune.Result) -> bool:
    """Return True if the config of a trial is invalid."""
    try:
        GRPOConfig.from_dict(result.config or {})
    except ConfigError:
        return True
    return False
