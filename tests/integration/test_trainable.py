"""Real trials under Ray Tune, and the Trainable driven by hand."""

from __future__ import annotations

import json
import math
import os
import pickle
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import ray
from conftest import (
    actor_processes,
    assert_no_actor_left,
    fit,
    trial_config,
    written_by_the_page,
)
from ray import cloudpickle, tune
from ray.train._internal.session import _TrainingResult
from ray.train._internal.storage import StorageContext
from ray.tune.utils import validate_save_restore

from grpo_trainable.calls import ActorFailed, await_call
from grpo_trainable.checkpointing import CheckpointError, read_checkpoint
from grpo_trainable.config import GRPOConfig
from grpo_trainable.details import DETAILS, RoundDetails
from grpo_trainable.inputs import InputChanged, digests_of_all
from grpo_trainable.metrics import FRACTIONS, NAMES, SOMETIMES, TIMED
from grpo_trainable.models.directory import SHIPPED_POLICY
from grpo_trainable.tasks.keyword import NOUNS_FILE
from grpo_trainable.trainable import DetailedGRPO, GRPOTrainable
from grpo_trainable.trial import Trial
from grpo_trainable.trial_storage import TrialStorage

# Ray's processes cannot import this file.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

ARMS = {
    "colocated": trial_config(arm="colocated", placement="colocated"),
    "sync": trial_config(arm="sync"),
    "async": trial_config(arm="async", lag=1, resources={"reference": "generator"}),
    "mid-batch": trial_config(arm="mid-batch", lag=1, weight_update="interrupt_recompute"),
    "replay": trial_config(
        arm="replay",
        placement="colocated",
        buffer_capacity=3,
        buffer_sampling="mixed",
        buffer={"sample_batches": 2},
    ),
    "critic": trial_config(
        arm="critic",
        placement="colocated",
        k=2,
        loss={"type": "ppo", "advantage": "gae"},
        critic={"body": "own"},
    ),
    "vine": trial_config(
        arm="vine",
        placement="colocated",
        buffer_capacity=2,
        buffer_sampling="mixed",
        buffer={"sample_batches": 2},
        loss={"type": "ppo", "advantage": "vine"},
        vine={"samples": 2, "chunk_tokens": 5},
    ),
    "two-generators": trial_config(
        arm="two-generators", resources={"num_generators": 2, "generator_cpus": 0.95}
    ),
}


@pytest.fixture(scope="module")
def results(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tune.Result]:
    """One trial of each arm, run to its end."""
    grid = fit(
        {
            "arm": tune.grid_search(list(ARMS)),
            **{
                key: tune.sample_from(lambda spec, key=key: ARMS[spec.config.arm][key])
                for key in ("placement", "resources")
            },
            **{
                key: tune.sample_from(
                    lambda spec, key=key, value=value: ARMS[spec.config.arm].get(key, value)
                )
                for key, value in (
                    ("lag", 0),
                    ("weight_update", "between_batches"),
                    ("buffer_capacity", 1),
                    ("buffer_sampling", "recency"),
                    ("buffer", {}),
                    ("k", 1),
                    ("loss", {}),
                    ("critic", {}),
                    ("vine", {}),
                )
            },
            **{
                key: value
                for key, value in trial_config().items()
                if key not in ("placement", "resources")
            },
        },
        tmp_path_factory.mktemp("results"),
    )
    assert [str(error) for error in grid.errors] == []
    assert_no_actor_left()
    return {result.config["arm"]: result for result in grid}


def rows(result: tune.Result) -> list[dict[str, Any]]:
    lines = (Path(result.path) / "result.json").read_text().splitlines()
    return [json.loads(line) for line in lines]


def untimed(row: dict[str, Any]) -> dict[str, float]:
    """What a row tells of the training, Tune's own keys left out."""
    return {k: row[k] for k in row if k in NAMES and not k.startswith(TIMED)}


def checkpoints(result: tune.Result) -> list[Path]:
    return sorted(Path(result.path).glob("checkpoint_*"))


@pytest.mark.parametrize("arm", ARMS)
def test_trial_ends_itself_after_its_rounds(results: dict[str, tune.Result], arm: str) -> None:
    history = rows(results[arm])
    assert [row["training_iteration"] for row in history] == [1, 2, 3, 4]
    assert [row["done"] for row in history] == [False, False, False, True]
    assert len(checkpoints(results[arm])) == 2  # after round 3 and at the end


@pytest.mark.parametrize("arm", ARMS)
def test_result_json_has_every_metric_as_a_finite_float(
    results: dict[str, tune.Result], arm: str
) -> None:
    for row in rows(results[arm]):
        assert row.keys() >= NAMES - set(FRACTIONS) - SOMETIMES
        names = NAMES & row.keys()
        odd = {n: row[n] for n in names if type(row[n]) is not float or not math.isfinite(row[n])}
        assert not odd
        assert 0 <= row["time/disturbed_fraction"] <= 1


def test_lag_is_bounded_and_reached(results: dict[str, tune.Result]) -> None:
    for arm, config in ARMS.items():
        lags = [row["lag/max"] for row in rows(results[arm])]
        assert max(lags) == config.get("lag", 0)


def test_first_step_on_fresh_rollouts_has_ratio_one(results: dict[str, tune.Result]) -> None:
    for arm in ("colocated", "sync", "two-generators"):
        for row in rows(results[arm]):
            assert row["loss/ratio_max"] == pytest.approx(1.0, abs=1e-5)
            assert row["optim/grad_norm"] > 0 or row["group/zero_advantage_fraction"] == 1


@pytest.mark.parametrize("arm", ["sync", "two-generators"])
def test_placement_and_number_of_generators_never_change_a_synchronous_run(
    results: dict[str, tune.Result], arm: str
) -> None:
    expected, got = results["colocated"], results[arm]
    assert [untimed(row) for row in rows(got)] == [untimed(row) for row in rows(expected)]
    for ours, theirs in zip(checkpoints(got), checkpoints(expected), strict=True):
        for part in ("policy", "optimizer", "buffer"):
            name = f"{part}-00001-of-00001.safetensors"
            assert (ours / name).read_bytes() == (theirs / name).read_bytes()


def test_policy_has_moved(results: dict[str, tune.Result]) -> None:
    before, after = (read_checkpoint(path).policy for path in checkpoints(results["sync"]))
    assert any(not before[name].equal(after[name]) for name in before)


def test_evaluation_runs_first_when_due_and_last(results: dict[str, tune.Result]) -> None:
    for arm in ARMS:
        history = rows(results[arm])
        assert [row["eval/round"] for row in history] == [0, 0, 3, 4]
        assert len({row["reward/eval_first"] for row in history}) == 1


def test_counts_close_in_every_row(results: dict[str, tune.Result]) -> None:
    for arm in ARMS:
        for row in rows(results[arm]):
            parts = ("trained", "dropped", "waiting", "in_flight")
            assert row["count/requested"] == sum(row[f"count/{part}"] for part in parts)
        assert row["count/trained"] == 16
        assert row["env_runners/num_episodes_lifetime"] == 64


@pytest.mark.parametrize("arm", ["colocated", "sync"])
def test_seconds_of_a_synchronous_round_add_up(results: dict[str, tune.Result], arm: str) -> None:
    stages = ("rollout", "reward", "optimize", "reference", "sync", "eval", "other")
    for row in rows(results[arm]):
        total = sum(row[f"time/{stage}_s"] for stage in stages)
        assert total == pytest.approx(row["time/step_s"], rel=1e-3)
        assert row["time/other_s"] >= 0


@pytest.mark.parametrize("arm", ["colocated", "sync", "replay", "critic", "vine"])
def test_resumed_synchronous_run_equals_uninterrupted_run(
    results: dict[str, tune.Result], trainable: Any, arm: str, tmp_path: Path
) -> None:
    resumed = trainable(ARMS[arm])
    resumed.restore(str(checkpoints(results[arm])[0]))
    row = resumed.step()
    assert row["done"]
    assert untimed(row) == untimed(rows(results[arm])[-1])
    resumed.save_checkpoint(str(tmp_path / "again"))
    again, last = read_checkpoint(tmp_path / "again"), read_checkpoint(checkpoints(results[arm])[1])
    assert again.policy.keys() == last.policy.keys()
    assert all(again.policy[name].equal(last.policy[name]) for name in last.policy)
    assert all(again.optimizer[name].equal(last.optimizer[name]) for name in last.optimizer)


def test_a_trial_with_a_critic_reports_it_and_others_do_not(
    results: dict[str, tune.Result],
) -> None:
    for arm in ARMS:
        for row in rows(results[arm]):
            assert ("critic/loss" in row) == (arm == "critic")
            assert (row["count/completions"] > 0) == (arm == "vine")
            assert (row["time/vine_s"] > 0) == (arm == "vine")
    assert rows(results["critic"])[0]["critic/value_mean"] == 0
    assert all(row["critic/grad_norm"] > 0 for row in rows(results["critic"]))


def test_replay_uses_groups_again_within_their_age(results: dict[str, tune.Result]) -> None:
    history = rows(results["replay"])
    # Four prompts a round: the first has no older groups, then each draws as many of them.
    assert [row["buffer/size"] for row in history] == [4, 8, 8, 8]
    assert history[0]["buffer/age_max"] == 0
    assert 1 <= max(row["buffer/age_max"] for row in history) <= 2
    assert history[-1]["buffer/uses_mean"] > 1.4
    assert max(row["loss/ratio_max"] for row in history[1:]) > 1.001


def test_resumed_asynchronous_run_trains_every_prompt(
    results: dict[str, tune.Result], trainable: Any
) -> None:
    resumed = trainable(ARMS["async"])
    resumed.restore(str(checkpoints(results["async"])[0]))
    row = resumed.step()
    assert row["done"]
    assert row["lag/max"] <= 1
    assert row["count/requested"] == row["count/trained"] + row["count/dropped"] == 16


def test_checkpoint_with_a_pickle_beside_it_is_refused_before_it_is_loaded(
    results: dict[str, tune.Result], tmp_path: Path
) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return (tmp_path / "exploded").touch, ()

    directory = tmp_path / "checkpoint"
    shutil.copytree(checkpoints(results["sync"])[0], directory)
    (directory / "_dict_checkpoint.pkl").write_bytes(pickle.dumps(Bomb()))
    # No actor is needed to refuse it.
    trainable = object.__new__(GRPOTrainable)
    trainable.trial = object.__new__(Trial)
    trainable.trial.stored = TrialStorage(None, keep=None)  # as outside Tune
    with pytest.raises(CheckpointError, match=r"_dict_checkpoint\.pkl: is not of a checkpoint"):
        trainable.restore(str(directory))
    assert not (tmp_path / "exploded").exists()


def test_running_trainable_takes_a_checkpoint_of_another_history(
    results: dict[str, tune.Result], trainable: Any
) -> None:
    running = trainable(ARMS["async"])
    running.step()
    running.restore(str(checkpoints(results["async"])[0]))
    assert running.step()["version/learner"] == 4.0


@pytest.mark.parametrize("placement", ["colocated", "disaggregated"])
def test_other_config_begins_anew_in_the_same_actors(
    results: dict[str, tune.Result], trainable: Any, placement: str
) -> None:
    # Everything that an actor can change is another; work is under way when it changes.
    lag = 0 if placement == "colocated" else 1
    running = trainable(
        trial_config(
            placement=placement,
            lag=lag,
            k=2,
            seed=3,
            optim={"lr": 5e-3},
            loss={"kl_monitor": False},
            rollout={"prompts": 3, "unit_prompts": 1, "group_size": 2},
        )
    )
    running.step()
    before = set(actor_processes())
    arm = "colocated" if placement == "colocated" else "sync"
    assert running.reset_config(ARMS[arm])
    assert set(actor_processes()) == before
    got = [running.step() for _ in range(4)]
    assert [untimed(row) for row in got] == [untimed(row) for row in rows(results[arm])]
    assert got[0]["time/learner_idle_s"] < got[0]["time/step_s"]


def test_dead_actor_does_not_keep_another_config_from_beginning(
    results: dict[str, tune.Result], trainable: Any
) -> None:
    running = trainable(trial_config(lag=1))
    running.step()
    kill(running, "generator-0")
    assert running.reset_config(ARMS["sync"])
    assert untimed(running.step()) == untimed(rows(results["sync"])[0])
    assert len(actor_processes()) == 2


def test_other_resources_need_other_actors(trainable: Any) -> None:
    running = trainable(trial_config())
    running.step()
    before = set(actor_processes())
    assert not running.reset_config(trial_config(placement="colocated"))
    assert running.reset_config(trial_config(resources={"deadline_s": 99.0}))
    running.step()
    assert len(actor_processes()) == 2
    assert not set(actor_processes()) & before


def test_tune_finds_that_it_saves_and_restores(ray_session: None, tmp_path: Path) -> None:
    class Elsewhere(GRPOTrainable):
        """Outside Tune a Trainable writes into the home directory."""

        def __init__(self, config: dict[str, Any]) -> None:
            ray.tune.trainable.trainable.DEFAULT_STORAGE_PATH = str(tmp_path)
            super().__init__(config)

    config = trial_config(placement="colocated", rounds=6)
    assert validate_save_restore(Elsewhere, config)
    assert_no_actor_left()


def kill(trainable: GRPOTrainable, name: str) -> None:
    next(actor for actor in trainable.trial.actors if actor.name == name).kill()


def test_dead_generator_is_replaced_and_a_synchronous_run_is_none_the_worse(
    results: dict[str, tune.Result], trainable: Any
) -> None:
    running = trainable(ARMS["sync"])
    running.step()
    kill(running, "generator-0")
    row: dict[str, Any] = {}
    for _ in range(3):
        row = running.step()
    assert row["count/redispatched"] == 4  # both units of the round were asked of the dead one
    last = {**rows(results["sync"])[-1], "count/redispatched": 4.0}
    assert untimed(row) == untimed(last)
    assert len(actor_processes()) == 2
    assert (
        actor_processes().keys() <= running.trial.meter.own
    )  # the generator that came later as well


def test_dead_generator_costs_an_asynchronous_run_no_prompt(trainable: Any) -> None:
    running = trainable(trial_config(lag=1, rounds=6))
    running.step()
    kill(running, "generator-0")
    row = running.step()
    while not row["done"]:
        row = running.step()
        assert row["lag/max"] <= 1
    assert row["count/requested"] == row["count/trained"] == 24
    assert row["count/redispatched"] >= 2


def test_dead_learner_is_an_error_that_names_it(trainable: Any) -> None:
    running = trainable(trial_config(lag=1, rounds=50))
    running.step()
    kill(running, "learner")
    with pytest.raises(ActorFailed, match=r"(optimize|sync): learner died"):
        running.step()


MURDEROUS_REWARD = """
import os, signal, sys, pathlib
calls = pathlib.Path({file!r})

def reward(response, ground_truth):
    with calls.open("a") as file:
        file.write(".")
    if calls.stat().st_size > {allowed}:
        os.kill(os.getppid(), signal.SIGKILL)
    return 1.0
"""


def test_generator_that_dies_again_and_again_fails_the_trial_and_leaves_no_actor(
    ray_session: None, tmp_path: Path
) -> None:
    # The first evaluation asks for 12 rewards, a round for 16: the third round's rollout dies.
    reward = tmp_path / "murder.py"
    reward.write_text(MURDEROUS_REWARD.format(file=str(tmp_path / "calls"), allowed=50))
    config = trial_config(task={"reward": f"{reward}:reward", "reward_deadline_s": 5.0})
    (result,) = fit(config, tmp_path)
    # It samples the second unit while it scores the first.
    assert re.search(r"ActorFailed: (rollout|reward): generator-0 died", str(result.error))
    assert "replaced 3 times without finishing any work" in str(result.error)
    assert result.metrics["training_iteration"] == 2
    assert_no_actor_left()


def test_actor_that_cannot_start_is_an_error_that_says_why(trainable: Any) -> None:
    # The launcher refuses this before Ray starts.
    running = trainable(
        trial_config(task={"reward": "no_such_module:reward", "reward_deadline_s": 5.0})
    )
    with pytest.raises(
        ActorFailed, match=r"warm-up: generator-0 .*No module named 'no_such_module'"
    ):
        running.step()


def test_trial_that_cannot_be_set_up_leaves_no_actor(trainable: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere.* cannot be read"):
        trainable(trial_config(model={"path": str(tmp_path / "nowhere")}))
    assert_no_actor_left()


@pytest.mark.parametrize("placement", ["colocated", "disaggregated"])
def test_warm_up_changes_neither_rows_nor_weights(
    trainable: Any, monkeypatch: pytest.MonkeyPatch, placement: str
) -> None:
    def run() -> tuple[list[dict[str, Any]], dict[str, Any]]:
        trial = trainable(trial_config(placement=placement, rounds=2))
        rows = [trial.step() for _ in range(2)]
        assert (rows[0]["time/warm_up_s"] > 0) == warmed
        return [untimed(row) for row in rows], trial.trial.learner_state().policy

    warmed = True
    rows, policy = run()
    warmed = False
    monkeypatch.setattr(Trial, "_warm_up", lambda self: None)
    expected_rows, expected_policy = run()
    assert rows == expected_rows
    assert policy.keys() == expected_policy.keys()
    assert all(policy[name].equal(expected_policy[name]) for name in policy)


def test_a_bundle_for_the_trial_and_for_each_actor() -> None:
    request = GRPOTrainable.default_resource_request
    assert request(trial_config(placement="colocated")).bundles == [{"CPU": 0.1}, {"CPU": 0.95}]
    assert request(trial_config()).bundles == [{"CPU": 0.1}, {"CPU": 0.95}, {"CPU": 0.95}]
    two = trial_config(resources={"num_generators": 2, "generator_gpus": 0.5, "learner_gpus": 1.0})
    assert request(two).bundles == [
        {"CPU": 0.1},
        {"CPU": 0.95, "GPU": 1.0},
        {"CPU": 0.475, "GPU": 0.5},
        {"CPU": 0.475, "GPU": 0.5},
    ]


def own_bundles() -> list[int]:
    """Indices of the placement group's bundles that this process has its CPUs from."""
    assigned = ray._private.worker.global_worker.core_worker.resource_ids()
    found = (re.fullmatch(r"CPU_group_(\d+)_[0-9a-f]+", name) for name in assigned)
    return [int(match[1]) for match in found if match]


class TellsBundles(GRPOTrainable):
    """Says after its only round which bundle each actor is in, and again once both generators were
    replaced, the second one first: the first bundle with room is then that of the other."""

    def step(self) -> dict[str, Any]:
        row = super().step()
        row["bundles"] = self._bundles()
        for actor in self.trial.actors.generators:
            actor.kill()
            with pytest.raises(ActorFailed):
                await_call(self.trial.runtime, actor.submit_function("probe", own_bundles), 30.0)
        for name in ("generator-1", "generator-0"):
            self.trial.replace_generator(name)
        row["bundles_afterwards"] = self._bundles()
        return row

    def _bundles(self) -> dict[str, list[int]]:
        calls = [actor.submit_function("probe", own_bundles) for actor in self.trial.actors]
        return {call.actor.name: await_call(self.trial.runtime, call, 60.0) for call in calls}


def test_every_actor_is_in_the_bundle_that_is_meant_for_it_and_so_is_a_replacement(
    ray_session: None, tmp_path: Path
) -> None:
    tuner = tune.Tuner(
        TellsBundles,
        param_space=trial_config(rounds=1, resources={"num_generators": 2}),
        run_config=tune.RunConfig(name="bundles", storage_path=str(tmp_path), verbose=0),
    )
    (result,) = tuner.fit()
    assert result.error is None
    own = {"learner": [1], "generator-0": [2], "generator-1": [3]}
    assert result.metrics["bundles"] == result.metrics["bundles_afterwards"] == own


def test_default_trial_fits_two_cores() -> None:
    for placement in ("colocated", "disaggregated"):
        bundles = GRPOTrainable.default_resource_request({"placement": placement}).bundles
        assert sum(bundle["CPU"] for bundle in bundles) <= 2


def test_actors_end_with_the_trainable(trainable: Any) -> None:
    running = trainable(trial_config(lag=1))
    running.step()
    assert len(actor_processes()) == 2
    running.stop()
    assert_no_actor_left()


LOSS_AND_ADVANTAGE = """
def reinforce(log_probs, old_log_probs, advantages, mask, *, clip_low, clip_high):
    return -clip_low * advantages * (log_probs - old_log_probs).exp(), mask

def doubled(rewards, *, eps):
    return 2 * rewards
"""


def test_a_trial_keeps_its_newest_checkpoints_and_finds_relative_paths(
    ray_session: None, tmp_path: Path
) -> None:
    # Relative to where Ray was started, as a user's script would name them.
    files = tmp_path / "files"
    shutil.copytree(SHIPPED_POLICY, files / "policy")
    shutil.copy(NOUNS_FILE, files / "words.txt")
    (files / "rewards.py").write_text("def score(response, ground_truth):\n    return 1.0\n")
    (files / "losses.py").write_text(LOSS_AND_ADVANTAGE)
    relative = Path(os.path.relpath(files))
    config = trial_config(
        rounds=3,
        checkpoint={"every": 1, "keep": 1},
        model={"path": str(relative / "policy")},
        task={
            "keywords_file": str(relative / "words.txt"),
            "reward": f"{relative / 'rewards.py'}:score",
            "reward_deadline_s": 5.0,
        },
        loss={
            "type": f"{relative / 'losses.py'}:reinforce",
            "advantage": f"{relative / 'losses.py'}:doubled",
            "clip": 0.25,
        },
    )
    (result,) = fit(config, tmp_path)
    assert result.error is None
    assert [row["reward/train_mean"] for row in rows(result)] == [1.0] * 3
    # The user's loss counts each token as clipped. At lag 0 the ratio of its only step is 1, so
    # that its loss is −clip_low times the user's advantage, twice the reward.
    assert [row["loss/clip_fraction"] for row in rows(result)] == [1.0] * 3
    assert [row["loss/policy"] for row in rows(result)] == pytest.approx([-0.5] * 3, abs=1e-5)
    (kept,) = checkpoints(result)
    assert result.checkpoint is not None
    assert Path(result.checkpoint.path) == kept
    state = read_checkpoint(kept).state
    assert state["pipeline"]["learner_round"] == 3
    assert state["config"]["task"]["keywords_file"] == str(files / "words.txt")


def test_a_trial_whose_noted_checkpoint_was_removed_goes_on_from_its_newest(
    trainable: Any, tmp_path: Path
) -> None:
    directory = tmp_path / "experiment" / "trial"
    config = trial_config(placement="colocated")
    trainable(config).save(str(directory / "checkpoint_000001"))
    trial = trainable(config)
    storage = StorageContext(str(tmp_path), "experiment", trial_dir_name="trial")
    trial.trial.stored = TrialStorage(storage, keep=None)
    gone = tune.Checkpoint.from_directory(str(directory / "checkpoint_000000"))
    trial.restore(_TrainingResult(checkpoint=gone, metrics={"training_iteration": 3}))
    assert trial.iteration == trial.trial.rounds_trained == 0


def test_a_trial_refuses_to_go_on_with_another_data_file(trainable: Any, tmp_path: Path) -> None:
    words = tmp_path / "words.txt"
    shutil.copy(NOUNS_FILE, words)
    config = trial_config(placement="colocated", task={"keywords_file": str(words)})
    trainable(config).save(str(tmp_path / "checkpoint"))
    with words.open("a") as file:
        file.write("one more\n")
    with pytest.raises(InputChanged, match=rf"task\.keywords_file: {words}"):
        trainable(config).restore(str(tmp_path / "checkpoint"))


def test_a_trial_that_starts_after_a_file_was_edited_is_refused(
    ray_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.tune.trainable.trainable.DEFAULT_STORAGE_PATH", str(tmp_path))
    words = tmp_path / "words.txt"
    shutil.copy(NOUNS_FILE, words)
    config = trial_config(placement="colocated", task={"keywords_file": str(words)})
    inputs = digests_of_all([GRPOConfig.from_dict(config)])
    guarded = tune.with_parameters(GRPOTrainable, inputs=inputs)
    running = guarded(config)
    assert running.trial.config.to_dict() == GRPOConfig.from_dict(config).to_dict()
    with words.open("a") as file:
        file.write("one more\n")
    refused = rf"^task\.keywords_file: {words} is not what it was .*put the file back"
    # A clone of PBT begins anew in the actors that are there.
    with pytest.raises(InputChanged, match=refused):
        running.reset_config({**config, "k": 2})
    running.stop()
    with pytest.raises(InputChanged, match=refused):
        guarded(config)
    assert_no_actor_left()


def test_a_generator_that_would_read_an_edited_file_takes_nobodys_place(
    trainable: Any, tmp_path: Path
) -> None:
    words = tmp_path / "words.txt"
    shutil.copy(NOUNS_FILE, words)
    running = trainable(trial_config(task={"keywords_file": str(words)}))
    running.step()
    with words.open("a") as file:
        file.write("one more\n")
    (generator,) = [pid for pid, title in actor_processes().items() if "Generator" in title]
    os.kill(generator, signal.SIGKILL)
    with pytest.raises(InputChanged, match=rf"^task\.keywords_file: {words} is not what it was"):
        running.step()


# ---- A user's engine -------------------------------------------------------------------------

WITHOUT_LOG_PROBS = """
import dataclasses
from my_engine import GreedyEvaluation

class WithoutLogProbs(GreedyEvaluation):
    def generate(self, requests, between_tokens):
        groups = super().generate(requests, between_tokens)
        nothing = [group.behaviour_log_probs * float("nan") for group in groups]
        return [
            dataclasses.replace(group, behaviour_log_probs=log_probs)
            for group, log_probs in zip(groups, nothing)
        ]
"""


def test_the_engine_of_the_how_to_page_evaluates_greedily_and_samples_as_ours_does(
    ray_session: None, tmp_path: Path
) -> None:
    page = written_by_the_page("engine.md", "my_engine.py", tmp_path)
    config = trial_config(rounds=2, eval={"every": 2})
    told: dict[str, RoundDetails] = {}
    for engine in ("torch", f"{page}:GreedyEvaluation"):
        running = DetailedGRPO({**config, "engine": engine})
        told[engine] = running.step()[DETAILS]
        running.stop()
    ours, theirs = told.values()
    assert theirs.rollouts["response"] == ours.rollouts["response"]
    answers: dict[str, set[str]] = {}
    for prompt, response in zip(
        theirs.evaluations["prompt"], theirs.evaluations["response"], strict=True
    ):
        answers.setdefault(prompt, set()).add(response)
    assert len(answers) == 6
    assert all(len(responses) == 1 for responses in answers.values())
    assert theirs.evaluations["response"] != ours.evaluations["response"]


def test_an_engine_that_records_no_log_probs_ends_the_trial_in_one_line(
    trainable: Any, tmp_path: Path
) -> None:
    written_by_the_page("engine.md", "my_engine.py", tmp_path)
    (tmp_path / "without.py").write_text(WITHOUT_LOG_PROBS)
    running = trainable(trial_config(engine=f"{tmp_path / 'without.py'}:WithoutLogProbs"))
    with pytest.raises(ActorFailed, match="behaviour_log_probs are missing") as caught:
        running.step()
    assert "\n" not in str(caught.value)
