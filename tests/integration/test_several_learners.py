"""Several learners as Ray actors: training, saving, a resume with more, and learners that die."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from conftest import actor_processes, trial_config

from grpo_trainable.protocol.calls import ActorLost
from grpo_trainable.storage.checkpointing import MANIFEST, read_checkpoint

TWO = {"num_learners": 2, "learner_strategy": "fsdp2", "learner_cpus": 0.45}
FOUR = {"num_learners": 4, "learner_cpus": 0.4, "elastic": True}


def settings(resources: dict[str, Any]) -> dict[str, Any]:
    reserved = {**resources, "generator_cpus": 0.45, "deadline_s": 240.0}
    return trial_config(rounds=6, resources=reserved)


@pytest.fixture
def checkpoints(trainable: Any, tmp_path: Path) -> Path:
    """Return a directory with checkpoints of a trial whose two learners divide the policy.

    The directories "two" and "three" are named after rounds. "again" is round 3, trained a second
    time from "two".
    """
    trial = trainable(settings(TWO))
    rows = [trial.train(), trial.train()]
    assert [row["version/learner"] for row in rows] == [1, 2]
    assert rows[1]["version/generator"] == 2
    assert rows[0]["kl/sampler_mismatch_nats"] < 1e-5  # sampled and trained with the same weights
    trial.save(str(tmp_path / "two"))
    trial.train()
    trial.save(str(tmp_path / "three"))
    trial.restore(str(tmp_path / "two"))
    trial.train()
    trial.save(str(tmp_path / "again"))
    assert sum("LearnerRank" in name for name in actor_processes().values()) == 2
    trial.stop()
    return tmp_path


@pytest.mark.slow
def test_learners_train_resume_and_are_missed(checkpoints: Path, trainable: Any):
    two, three, again = (read_checkpoint(checkpoints / n) for n in ("two", "three", "again"))
    assert sorted(path.name for path in (checkpoints / "two").glob("policy-*")) == [
        "policy-00001-of-00002.safetensors",
        "policy-00002-of-00002.safetensors",
    ]
    assert json.loads((checkpoints / "two" / MANIFEST).read_text())["world_size"] == 2
    for ours, theirs in ((again.policy, three.policy), (again.optimizer, three.optimizer)):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert again.state["pipeline"] == three.state["pipeline"]

    trial = trainable(settings(FOUR))
    trial.restore(str(checkpoints / "two"))
    trial.train()
    trial.save(str(checkpoints / "four"))
    four = read_checkpoint(checkpoints / "four")
    moved = max(float((four.policy[n] - two.policy[n]).abs().max()) for n in four.policy)
    apart = max(float((four.policy[n] - three.policy[n]).abs().max()) for n in four.policy)
    assert apart < 0.2 * moved

    # If a learner dies, the others repeat the round from its start. If the first learner dies, they
    # cannot.
    learners = trial.trial.actors.learners
    ray.kill(learners[2].handle)
    row = trial.train()
    assert (row["version/learner"], row["optim/skipped_steps"]) == (4, 0)
    trial.save(str(checkpoints / "fewer"))
    assert json.loads((checkpoints / "fewer" / MANIFEST).read_text())["world_size"] == 3
    moved = {
        n: t - four.policy[n] for n, t in read_checkpoint(checkpoints / "fewer").policy.items()
    }
    assert max(float(change.abs().max()) for change in moved.values()) < 2e-3  # one step at lr 1e-3
    ray.kill(learners[0].handle)
    with pytest.raises(ActorLost, match=r"learner-0 died"):
        trial.train()
