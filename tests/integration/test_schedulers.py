"""Tune's schedulers on our Trainable: clones continue, and stopped trials leave no actors."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from conftest import assert_no_actor_left, checkpoints, rows, trial_config
from ray import cloudpickle, tune
from ray.tune.schedulers import ASHAScheduler

from callbacks import grpo_callbacks
from grpo_trainable.storage.checkpointing import checkpoint_round, read_checkpoint
from grpo_trainable.trainable import DetailedGRPO
from tuning.grid import OrderedGrid
from tuning.schedulers import FIFO, PBT

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's workers cannot import tests


def run(
    space: dict[str, Any], storage: Path, scheduler: Any, **options: Any
) -> dict[str, tune.Result]:
    """Run trials that a scheduler ranks by learning rate; return results by initial settings."""
    grid = tune.Tuner(
        DetailedGRPO,
        param_space=space,
        tune_config=tune.TuneConfig(
            metric="optim/lr",
            mode="max",
            scheduler=scheduler,
            trial_dirname_creator=lambda trial: trial.experiment_tag,
            **options,
        ),
        run_config=tune.RunConfig(
            name="experiment",
            storage_path=str(storage),
            verbose=0,
            callbacks=grpo_callbacks(console=False),
        ),
    ).fit()
    assert [str(error) for error in grid.errors] == []
    assert_no_actor_left()
    return {Path(result.path).name: result for result in grid}


def pbt(mutations: dict[str, Any], **options: Any) -> PBT:
    scheduler = PBT(
        time_attr="training_iteration",
        perturbation_interval=4,
        hyperparam_mutations=mutations,
        quantile_fraction=0.5,
        synch=True,
        **options,
    )
    scheduler.limit(max_failures=0, max_concurrent=0)
    return scheduler


class Saving(tune.Trainable):
    """One of two trials. While the trial with score 0 saves round 4, the other reports round 4."""

    def setup(self, config: dict[str, Any]) -> None:
        self.score, self.saving = config["score"], Path(config["saving"])

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.score = new_config["score"]
        return True

    def step(self) -> dict[str, Any]:
        if self.iteration == 3 and self.score == 1:
            wait_for(self.saving)
        done = self.iteration == 5
        return {"score": self.score, "done": done, "should_checkpoint": True}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        if self.iteration == 4 and self.score == 0:
            self.saving.touch()
            time.sleep(2)  # meanwhile Tune receives round 4 of the other trial
        (Path(checkpoint_dir) / "score").write_text(str(self.score))

    def load_checkpoint(self, checkpoint: str) -> None:
        pass


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.05)


def test_pbt_goes_on_with_a_trial_that_was_saving_when_it_was_replaced(
    ray_session: None, tmp_path: Path
) -> None:
    space = {"score": tune.grid_search([0, 1]), "saving": str(tmp_path / "saving")}
    grid = tune.Tuner(
        tune.with_resources(Saving, {"cpu": 0.5}),
        param_space=space,
        tune_config=tune.TuneConfig(
            metric="score", mode="max", scheduler=pbt({"score": [2]}), reuse_actors=True
        ),
        run_config=tune.RunConfig(name="experiment", storage_path=str(tmp_path), verbose=0),
    ).fit()

    assert [result.metrics["training_iteration"] for result in grid] == [6, 6]


class Interrupted(tune.Trainable):
    """A trial of 16 rounds that fails in round 10 until a file exists."""

    def setup(self, config: dict[str, Any]) -> None:
        self.config = config

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.config = new_config
        return True

    def step(self) -> dict[str, Any]:
        if self.iteration == 9 and not Path(self.config["repaired"]).exists():
            raise RuntimeError("not repaired")
        done = self.iteration == 15
        return {"score": self.config["score"], "done": done, "should_checkpoint": True}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        (Path(checkpoint_dir) / "round").write_text(str(self.iteration))

    def load_checkpoint(self, checkpoint: str) -> None:
        pass


def test_pbt_goes_on_after_a_restore(ray_session: None, tmp_path: Path) -> None:
    repaired = tmp_path / "repaired"
    trainable = tune.with_resources(Interrupted, {"cpu": 0.5})
    grid = tune.Tuner(
        trainable,
        param_space={"score": tune.grid_search([0, 1]), "repaired": str(repaired)},
        tune_config=tune.TuneConfig(
            metric="score", mode="max", scheduler=pbt({"score": [2]}), reuse_actors=True
        ),
        run_config=tune.RunConfig(name="experiment", storage_path=str(tmp_path), verbose=0),
    ).fit()
    assert len(grid.errors) == 2

    repaired.touch()
    grid = tune.Tuner.restore(grid.experiment_path, trainable, resume_errored=True).fit()

    assert [result.metrics["training_iteration"] for result in grid] == [16, 16]


class Shared(tune.Trainable):
    """A trial of one round, which may fail in its step or end its process in its reset."""

    def setup(self, config: dict[str, Any]) -> None:
        self.arm = config["arm"]

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.arm = new_config["arm"]
        if self.arm == "dies":
            os._exit(1)
        return True

    def step(self) -> dict[str, Any]:
        if self.arm == "fails":
            raise RuntimeError("no")
        return {"done": True}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        (Path(checkpoint_dir) / "arm").write_text(self.arm)


def test_processes_are_reused_only_after_success_and_never_keep_another_trial_waiting(
    ray_session: None, tmp_path: Path
) -> None:
    # Only one of these trials at a time fits into Ray's 16 CPUs.
    cpus = {"first": 9, "second": 9, "bigger": 10, "fails": 10, "next": 10, "dies": 10, "last": 9}
    scheduler = FIFO()
    scheduler.limit(max_failures=0, max_concurrent=1)
    grid = tune.Tuner(
        tune.with_resources(
            Shared, lambda config: tune.PlacementGroupFactory([{"CPU": cpus[config["arm"]]}])
        ),
        param_space={"arm": tune.grid_search(list(cpus)), "seed": tune.grid_search([0])},
        tune_config=tune.TuneConfig(
            scheduler=scheduler,
            search_alg=OrderedGrid([(arm, 0) for arm in cpus], scheduler.is_any_waiting),
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(name="experiment", storage_path=str(tmp_path), verbose=0),
    ).fit()

    by_arm = {arm: grid[index] for index, arm in enumerate(cpus)}
    assert [arm for arm in cpus if by_arm[arm].error] == ["fails", "dies"]
    pids = {arm: r.metrics["pid"] for arm, r in by_arm.items() if r.metrics and not r.error}
    assert pids["second"] == pids["first"]
    # The trial "fails" ran in the process of "bigger", which is not reused after the failure.
    assert len({pids[arm] for arm in ("first", "bigger", "next", "last")}) == 4


def test_pbt_clone_has_its_donors_state_and_its_own_settings(
    ray_session: None, tmp_path: Path
) -> None:
    def explored(config: dict[str, Any]) -> dict[str, Any]:
        settings = {"optim": {**config["optim"], "lr": 5e-4}, "loss": {"clip": 0.1}, "k": 2}
        return {**config, **settings}

    results = run(
        {
            **trial_config(lag=1, rounds=6, checkpoint={"every": 1, "keep": 1}),
            "optim": {"lr": tune.grid_search([1e-5, 1e-3])},
            "loss": {"clip": 0.2},
            "k": 1,
        },
        tmp_path,
        pbt({"optim": {"lr": [1e-5, 1e-3]}, "k": [1, 2]}, custom_explore_fn=explored),
        reuse_actors=True,
    )
    clone, donor = results["0_lr=0.0000"], results["1_lr=0.0010"]
    history, donors = rows(clone.path), rows(donor.path)
    for trial in (history, donors):
        assert [row["training_iteration"] for row in trial] == [1, 2, 3, 4, 5, 6]
        for row in trial:
            parts = ("trained", "dropped", "waiting", "in_flight")
            assert row["count/requested"] == sum(row[f"count/{part}"] for part in parts)
    assert [row["optim/lr"] for row in history] == [1e-5] * 4 + [5e-4] * 2
    assert [row["optim/lr"] for row in donors] == [1e-3] * 6
    named = [None] * 4 + [Path(donor.path).name, None]
    assert [row.get("copied_from") for row in history] == named
    # The donor had taken four gradient steps. The clone takes two per round.
    assert [row["version/learner"] for row in history] == [1, 2, 3, 4, 6, 8]
    # With its small learning rate, the trial stayed close to the reference. As a clone, it
    # continues from the donor, which has moved away.
    assert [row["kl/reference_k3_nats"] < 1e-3 for row in history] == [True] * 4 + [False] * 2
    # The donor's open chunks are requested again, so no prompt is lost. With k=2, the clone makes
    # two passes over a batch of the same prompts.
    assert history[-1]["count/dropped_lost"] == 0
    # The newest checkpoint stays, and so does the checkpoint of round 4, which PBT saves once or
    # twice for clones.
    kept = [checkpoint_round(path) for path in checkpoints(donor.path)]
    assert kept in ([4, 6], [4, 4, 6])
    loaded = read_checkpoint(checkpoints(clone.path)[-1])
    assert loaded.state["config"]["k"] == 2
    assert loaded.state["config"]["loss"]["clip"] == 0.1


def test_asha_compares_at_equal_samples_and_leaves_no_actor_behind(
    ray_session: None, tmp_path: Path
) -> None:
    last = 1e-3  # learning rate of the trial with two rollout batches per round
    results = run(
        {
            **trial_config(placement="colocated", k_mode="fresh_batches"),
            # The better trial runs first, so the other trial is stopped at the first rung.
            "optim": {"lr": tune.grid_search([3e-3, last])},
            "k": tune.sample_from(lambda config: 2 if config["optim"]["lr"] == last else 1),
            "rounds": tune.sample_from(lambda config: 2 if config["optim"]["lr"] == last else 4),
        },
        tmp_path,
        # 16 groups are four rounds of four prompts, or two rounds of eight.
        ASHAScheduler(time_attr="count/trained", max_t=16, grace_period=8, reduction_factor=2),
        max_concurrent_trials=1,
    )
    samples = [[row["count/trained"] for row in rows(trial.path)] for trial in results.values()]
    assert sorted(samples) == [[4, 8, 12, 16], [8]]
