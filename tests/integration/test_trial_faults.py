"""Actors that die or never start. The trial loses nothing, or says why it cannot continue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import assert_no_actor_left, kill, trial_config

from grpo_trainable.cluster.ray_actors import RayActor
from grpo_trainable.protocol.calls import ActorFailed, FailsAgain
from grpo_trainable.storage.checkpointing import OF_LEARNERS, part_file, read_checkpoint


def test_dead_generator_costs_an_asynchronous_run_no_prompt(begun: Any) -> None:
    running = begun(trial_config(lag=1, rounds=6))
    running.step()
    kill(running, "generator-0")
    row = running.step()
    while not row["done"]:
        row = running.step()
        assert row["lag/max"] <= 1
    assert row["count/requested"] == row["count/trained"] == 24
    assert row["count/redispatched"] >= 2


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


def test_generator_that_dies_again_and_again_fails_the_trial(begun: Any, tmp_path: Path) -> None:
    # The first evaluation needs 12 rewards and each round 16, so the generator dies in round 3.
    reward = tmp_path / "murder.py"
    reward.write_text(MURDEROUS_REWARD.format(file=str(tmp_path / "calls"), allowed=50))
    running = begun(trial_config(task={"reward": f"{reward}:reward", "reward_deadline_s": 5.0}))
    for _ in range(2):
        running.step()
    # The generator samples the second chunk while it scores the first, so either call may fail.
    with pytest.raises(ActorFailed, match=r"(rollout|reward): generator-0 died") as failed:
        running.step()
    assert "replaced 3 times without finishing any work" in str(failed.value)


def test_dead_learner_is_an_error_that_names_it_and_no_actor_is_left(begun: Any) -> None:
    running = begun(trial_config(lag=1, rounds=50))
    running.step()
    kill(running, "learner")
    with pytest.raises(ActorFailed, match=r"(optimize|sync): learner died"):
        running.step()
    running.stop()
    assert_no_actor_left()


def test_reward_file_that_cannot_be_imported_is_named_and_not_tried_again(
    trainable: Any, tmp_path: Path
) -> None:
    # launch/tune.py would reject these settings before Ray starts.
    reward = tmp_path / "my_reward.py"
    reward.write_text("import no_such_module\n")
    running = trainable(
        trial_config(
            placement="colocated",
            task={"reward": f"{reward}:score", "reward_deadline_s": 5.0},
        )
    )
    with pytest.raises(FailsAgain) as failed:
        running.step()
    assert str(failed.value) == (
        f"worker cannot start: task.reward={reward}:score: cannot be imported: "
        "ModuleNotFoundError: No module named 'no_such_module'"
    )


def test_trial_that_cannot_be_set_up_leaves_no_actor(trainable: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere: no such directory"):
        trainable(trial_config(model={"path": str(tmp_path / "nowhere")}))
    assert_no_actor_left()


def test_a_learner_that_does_not_see_the_checkpoints_sends_and_gets_what_is_in_them(
    trainable: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = trainable(trial_config(rounds=50))
    running.step()
    running.save(str(tmp_path / "here"))
    submit, methods = RayActor.submit, []

    def elsewhere(actor: RayActor, stage: str, method: str, *args: Any) -> Any:
        methods.append(method)
        if method in ("write", "read_state"):
            args = (f"{args[0]}-elsewhere", *args[1:])
        return submit(actor, stage, method, *args)

    monkeypatch.setattr(RayActor, "submit", elsewhere)
    running.save(str(tmp_path / "sent"))
    assert methods[:2] == ["write", "next_message"]
    for part in OF_LEARNERS:
        files = [tmp_path / directory / part_file(part) for directory in ("here", "sent")]
        assert files[0].read_bytes() == files[1].read_bytes()

    running.step()
    running.restore(str(tmp_path / "sent"))
    assert methods.index("read_state") < methods.index("load_state")
    running.save(str(tmp_path / "again"))
    ours, theirs = (read_checkpoint(tmp_path / name) for name in ("here", "again"))
    assert ours.state["learner"] == theirs.state["learner"]
    assert all(tensor.equal(theirs.optimizer[n]) for n, tensor in ours.optimizer.items())
    assert all(tensor.equal(theirs.policy[n]) for n, tensor in ours.policy.items())
