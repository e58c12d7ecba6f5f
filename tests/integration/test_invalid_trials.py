"""Invalid settings in a user's own Tuner. Invalid trials fail with a reason, and the others run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import assert_no_actor_left, fit, rows, trial_config
from ray import cloudpickle, tune

from callbacks import grpo_callbacks
from grpo_trainable.config import ConfigError
from grpo_trainable.trainable import DetailedGRPO, GRPOTrainable
from reports.experiment import read_experiment
from tuning.schedulers import PBT

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's workers cannot import tests

REASON = "lag=1: needs placement=disaggregated, got colocated; or set lag_mode=exact"
SHORT = {"rounds": 1, "checkpoint": {"every": 1}, "eval": {"every": 1}}


def outcomes(grid: tune.ResultGrid) -> dict[str, str | None]:
    """Return the reason for each trial's failure by placement, or None if the trial finished."""
    return {
        result.config["placement"]: result.error and str(result.error).splitlines()[-1]
        for result in grid
        if result.config is not None
    }


@pytest.fixture(scope="module")
def grid(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> tune.ResultGrid:
    """Run a grid over both placements, with retries. With lag 1, `colocated` is invalid."""
    found = fit(
        {
            **trial_config(**SHORT),
            "placement": tune.grid_search(["colocated", "disaggregated"]),
            "lag": 1,
            "k": tune.quniform(2, 2, 1),
        },
        tmp_path_factory.mktemp("grid"),
        DetailedGRPO,
        callbacks=grpo_callbacks(console=False),
        failure_config=tune.FailureConfig(max_failures=2),
    )
    assert_no_actor_left()
    return found


EXPECTED = {
    "colocated": f"grpo_trainable.config.values.ConfigError: {REASON}",
    "disaggregated": None,
}


def test_only_the_invalid_trial_fails(grid: tune.ResultGrid) -> None:
    assert outcomes(grid) == EXPECTED
    (error,) = grid.errors
    assert isinstance(error, ConfigError)
    steps = [rows(result.path)[-1]["version/learner"] for result in grid if not result.error]
    assert steps == [2]  # one round of k=2 steps, although k is the float 2.0


def test_an_invalid_trial_is_not_retried_and_leaves_its_reason(grid: tune.ResultGrid) -> None:
    (failed,) = (result for result in grid if result.error)
    text = (Path(failed.path) / "error.txt").read_text()
    assert text.count("Failure #") == 1
    assert text.strip().splitlines()[-1].endswith(REASON)
    problems = read_experiment(Path(grid.experiment_path)).problems
    assert any(p.startswith(Path(failed.path).name) and REASON in p for p in problems)


def test_an_experiment_with_an_invalid_trial_is_restored(grid: tune.ResultGrid) -> None:
    restored = tune.Tuner.restore(grid.experiment_path, DetailedGRPO, resume_errored=True)

    assert outcomes(restored.fit()) == EXPECTED


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"rollout": {"max_new_tokens": 5000}},
            "ConfigError: rollout.max_new_tokens=5000: the model",
        ),
        ({"task": {"name": "math", "train_file": "EMPTY"}}, "ConfigError: task.train_file"),
    ],
)
def test_a_mistake_that_only_the_model_or_the_data_show_is_not_retried(
    ray_session: None, tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"no": "prompt"}\n')
    text = json.dumps({**trial_config(**SHORT), **settings}).replace("EMPTY", str(empty))
    (failed,) = fit(
        json.loads(text),
        tmp_path / "results",
        DetailedGRPO,
        callbacks=grpo_callbacks(console=False),
        failure_config=tune.FailureConfig(max_failures=1),
    )
    assert (Path(failed.path) / "error.txt").read_text().count("Failure #") == 1
    assert said in str(failed.error).splitlines()[-1]
    assert_no_actor_left()


def test_a_trial_whose_file_is_missing_is_counted_and_named(
    ray_session: None, tmp_path: Path
) -> None:
    """The file may be missing for a moment, so Tune retries the trial."""
    gone = tmp_path / "gone.py"
    settings = {**trial_config(**SHORT), "task": {"reward": tune.grid_search([None, f"{gone}:f"])}}
    found = fit(
        settings,
        tmp_path / "results",
        DetailedGRPO,
        callbacks=grpo_callbacks(console=False),
        failure_config=tune.FailureConfig(max_failures=1),
    )
    (failed,) = (result for result in found if result.error)
    assert (Path(failed.path) / "error.txt").read_text().count("Failure #") == 2
    assert str(failed.error).splitlines()[-1].startswith(f"ValueError: task.reward: {gone} cannot")
    assert failed.config is not None
    trials = read_experiment(Path(found.experiment_path)).trials
    assert [trial.failed for trial in trials] == [False, True]
    assert trials[1].error is not None
    assert f"{gone} cannot be read" in trials[1].error
    assert_no_actor_left()


def population(
    storage: Path, settings: dict[str, Any], change: dict[str, Any], *, reuse_actors: bool
) -> tune.ResultGrid:
    """Run two trials of three rounds. After round 2, one trial copies the other with `change`."""
    return tune.Tuner(
        GRPOTrainable,
        param_space={
            **trial_config(**settings, rounds=3, checkpoint={"every": 1}),
            "optim": {"lr": tune.grid_search([1e-5, 1e-3])},
        },
        tune_config=tune.TuneConfig(
            metric="optim/lr",
            mode="max",
            reuse_actors=reuse_actors,
            scheduler=PBT(
                time_attr="training_iteration",
                perturbation_interval=2,
                hyperparam_mutations={"optim": {"lr": [1e-5, 1e-3]}},
                custom_explore_fn=lambda config: {**config, **change},
                quantile_fraction=0.5,
                synch=True,
            ),
        ),
        run_config=tune.RunConfig(
            name="pbt",
            storage_path=str(storage),
            verbose=0,
            failure_config=tune.FailureConfig(max_failures=1),
        ),
    ).fit()


@pytest.mark.parametrize(
    ("change", "reuse_actors", "reason"),
    [
        ({"lag": 1}, True, REASON),
        ({"placement": "disaggregated"}, False, "placement=disaggregated: needs the bundles"),
    ],
)
def test_a_clone_with_invalid_settings_fails_and_its_donor_goes_on(
    ray_session: None, tmp_path: Path, change: dict[str, Any], reuse_actors: bool, reason: str
) -> None:
    results = population(tmp_path, {"placement": "colocated"}, change, reuse_actors=reuse_actors)
    (failed,) = (result for result in results if result.error)
    assert (
        str(failed.error)
        .splitlines()[-1]
        .startswith(f"grpo_trainable.config.values.ConfigError: {reason}")
    )
    assert (Path(failed.path) / "error.txt").read_text().count("Failure #") == 1
    (donor,) = (result for result in results if not result.error)
    assert donor.metrics is not None
    assert donor.metrics["training_iteration"] == 3
    assert_no_actor_left()


def test_a_clone_that_needs_fewer_bundles_goes_on_in_the_same_process(
    ray_session: None, tmp_path: Path
) -> None:
    change = {"placement": "colocated"}
    results = population(tmp_path, {"placement": "disaggregated"}, change, reuse_actors=True)
    assert [str(error) for error in results.errors] == []
    placements = [result.config["placement"] for result in results if result.config is not None]
    assert sorted(placements) == ["colocated", "disaggregated"]
    assert [r.metrics["training_iteration"] for r in results if r.metrics is not None] == [3, 3]
    assert_no_actor_left()


def test_resources_of_another_shape_are_refused_with_what_to_use_instead(
    ray_session: None, tmp_path: Path
) -> None:
    trainable = tune.with_resources(GRPOTrainable, {"cpu": 2})
    (result,) = fit(trial_config(**SHORT), tmp_path, trainable)

    assert str(result.error).splitlines()[-1] == (
        "grpo_trainable.config.values.ConfigError: placement=disaggregated: needs the bundles "
        "[{'CPU': 0.1}, {'CPU': 0.95}, {'CPU': 0.95}], but the trial has reserved [{'CPU': 2.0}]; "
        "remove tune.with_resources and set resources.* instead; do not let a scheduler change "
        "resources.* or placement"
    )


def test_resources_of_the_registered_name_are_refused_by_tune() -> None:
    """Check a statement of docs/howto/tuner.md."""
    with pytest.raises(ValueError, match="only works with function trainables or classes"):
        tune.with_resources("GRPO", {"cpu": 2})  # pyright: ignore[reportArgumentType]
