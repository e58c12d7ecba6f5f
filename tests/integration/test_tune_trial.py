"""A trial in its placement group: its files and resources, and the bundles of its actors."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import ray
from conftest import actor_processes, assert_no_actor_left, checkpoints, fit, rows, trial_config
from ray import cloudpickle, tune

from grpo_trainable.models.directory import SHIPPED_POLICY
from grpo_trainable.protocol.calls import ActorFailed, await_call
from grpo_trainable.storage.checkpointing import read_checkpoint
from grpo_trainable.tasks.keyword import NOUNS_FILE
from grpo_trainable.trainable import GRPOTrainable

# Ray's processes cannot import this file, so its classes are pickled by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def own_bundles() -> list[int]:
    """Return the indices of the placement group's bundles that give this process its CPUs."""
    assigned = ray._private.worker.global_worker.core_worker.resource_ids()
    found = (re.fullmatch(r"CPU_group_(\d+)_[0-9a-f]+", name) for name in assigned)
    return [int(match[1]) for match in found if match]


class TellsBundles(GRPOTrainable):
    """Reports each actor's bundle after the last round and after replacing both generators.

    Both generators are dead when generator-1 is replaced. So the first bundle with room is that of
    generator-0, and the replacement of generator-1 must not take it.
    """

    def step(self) -> dict[str, Any]:
        row = super().step()
        if row["done"]:
            row["bundles"] = self._bundles()
            self._replace_generators()
            row["bundles_afterwards"] = self._bundles()
        return row

    def _replace_generators(self) -> None:
        for actor in self.trial.actors.generators:
            actor.kill()
            with pytest.raises(ActorFailed):
                self._call_until_it_ends(actor)
        for name in ("generator-1", "generator-0"):
            assert self.trial.replace_generator(name, patience_s=30.0) is not None

    def _call_until_it_ends(self, actor: Any) -> None:
        while True:  # on a busy machine the actor may still answer before it ends
            await_call(self.trial.runtime, actor.submit_function("probe", own_bundles), 30.0)

    def _bundles(self) -> dict[str, list[int]]:
        calls = [actor.submit_function("probe", own_bundles) for actor in self.trial.actors]
        return {call.actor.name: await_call(self.trial.runtime, call, 60.0) for call in calls}


LOSS_AND_ADVANTAGE = """
def reinforce(log_probs, old_log_probs, advantages, mask, *, clip_low, clip_high):
    return -clip_low * advantages * (log_probs - old_log_probs).exp(), mask

def doubled(rewards, *, eps):
    return 2 * rewards
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a user's policy, words, rewards and losses."""
    files = tmp_path_factory.mktemp("files")
    shutil.copytree(SHIPPED_POLICY, files / "policy")
    shutil.copy(NOUNS_FILE, files / "words.txt")
    (files / "rewards.py").write_text("def score(response, ground_truth):\n    return 1.0\n")
    (files / "losses.py").write_text(LOSS_AND_ADVANTAGE)
    return files


@pytest.fixture(scope="module")
def result(ray_session: None, files: Path, tmp_path_factory: pytest.TempPathFactory) -> tune.Result:
    """Run a trial of three rounds with two generators."""
    # Paths are relative to the directory where Ray was started, as a user's script would name them.
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
        resources={"num_generators": 2},
    )
    (result,) = fit(config, tmp_path_factory.mktemp("storage"), TellsBundles)
    assert result.error is None
    assert_no_actor_left()
    return result


def test_relative_paths_are_found_and_the_users_functions_are_what_trains(
    result: tune.Result,
) -> None:
    history = rows(result.path)
    assert [row["reward/train_mean"] for row in history] == [1.0] * 3
    # The user's loss counts each token as clipped. At lag 0, the ratio in the only step is 1, so
    # the loss is −clip_low times the user's advantage. This advantage is twice the reward.
    assert [row["loss/clip_fraction"] for row in history] == [1.0] * 3
    assert [row["loss/policy"] for row in history] == pytest.approx([-0.5] * 3, abs=1e-5)


def test_a_trial_keeps_its_newest_checkpoints(result: tune.Result, files: Path) -> None:
    (kept,) = checkpoints(result.path)
    assert result.checkpoint is not None
    assert Path(result.checkpoint.path) == kept
    state = read_checkpoint(kept).state
    assert state["pipeline"]["learner_round"] == 3
    assert state["config"]["task"]["keywords_file"] == str(files / "words.txt")


def test_every_actor_is_in_the_bundle_that_is_meant_for_it_and_so_is_a_replacement(
    result: tune.Result,
) -> None:
    own = {"learner": [1], "generator-0": [2], "generator-1": [3]}
    assert result.metrics is not None
    assert result.metrics["bundles"] == result.metrics["bundles_afterwards"] == own


# ---- Resources -----------------------------------------------------------------------------------


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


def test_default_trial_fits_two_cores() -> None:
    for placement in ("colocated", "disaggregated"):
        bundles = GRPOTrainable.default_resource_request({"placement": placement}).bundles
        assert sum(bundle["CPU"] for bundle in bundles) <= 2


def test_other_resources_need_other_actors_which_end_with_the_trainable(trainable: Any) -> None:
    running = trainable(trial_config(lag=1))
    running.step()
    before = set(actor_processes())
    for config, actors in (
        (trial_config(placement="colocated"), 1),
        (trial_config(lag=1, resources={"deadline_s": 99.0}), 2),
    ):
        assert running.reset_config(config)
        running.step()
        after = set(actor_processes())
        assert len(after) == actors
        assert not after & before
        before = after
    running.stop()
    assert_no_actor_left()
