"""The checkpoint that a trial continues from, and a user's data files and engine."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from conftest import (
    actor_processes,
    assert_no_actor_left,
    own_processes,
    trial_config,
    written_by_the_page,
)
from ray import tune
from ray.train._internal.session import _TrainingResult
from ray.train._internal.storage import StorageContext

from grpo_trainable.config import GRPOConfig
from grpo_trainable.protocol.calls import ActorFailed
from grpo_trainable.protocol.round_records import RoundDetails
from grpo_trainable.storage.checkpointing import read_checkpoint
from grpo_trainable.storage.trial_storage import TrialStorage
from grpo_trainable.tasks.input_files import InputChanged, digests_of_all, input_digests
from grpo_trainable.tasks.keyword import NOUNS_FILE
from grpo_trainable.trainable import GRPOTrainable


def test_a_trial_whose_noted_checkpoint_was_removed_goes_on_from_its_newest(
    begun: Any, tmp_path: Path
) -> None:
    directory = tmp_path / "experiment" / "trial"
    trial = begun(trial_config(placement="colocated"))
    trial.step()
    trial.save(str(directory / "checkpoint_000001"))
    trial.step()
    storage = StorageContext(str(tmp_path), "experiment", trial_dir_name="trial")
    trial.trial.stored = TrialStorage(storage, keep=None)
    gone = tune.Checkpoint.from_directory(str(directory / "checkpoint_000000"))
    trial.restore(_TrainingResult(checkpoint=gone, metrics={"training_iteration": 3}))
    assert trial.iteration == trial.trial.rounds_trained == 1


def test_a_clone_goes_on_from_its_own_checkpoint_although_tune_names_its_donors(
    begun: Any, tmp_path: Path
) -> None:
    """Ctrl-C or a kill may come between the clone's save and Tune's next snapshot."""
    donor, clone = (tmp_path / "experiment" / name for name in ("donor", "clone"))
    first = begun(trial_config(placement="colocated"))
    first.step()
    first.save(str(donor / "checkpoint_000003"))
    checkpoint = tune.Checkpoint.from_directory(str(donor / "checkpoint_000003"))
    noted = _TrainingResult(checkpoint=checkpoint, metrics={"training_iteration": 1})

    def started() -> Any:
        trial = begun(trial_config(placement="colocated"))
        trial.trial.stored = TrialStorage(
            StorageContext(str(tmp_path), "experiment", trial_dir_name="clone"),
            keep=None,
            has_settings=trial.trial._has_settings,
        )
        trial.restore(noted)
        return trial

    trial = started()
    assert trial.iteration == 1
    trial.step()
    trial.save(str(clone / "checkpoint_000000"))
    again = started()
    assert again.iteration == again.trial.rounds_trained == 2
    again.save(str(clone / "checkpoint_000001"))
    state = read_checkpoint(clone / "checkpoint_000001").state
    assert state["origin"] == "donor/checkpoint_000003"


def test_a_trial_that_starts_from_round_0_again_counts_from_there(
    begun: Any, tmp_path: Path
) -> None:
    """Tune counts rounds from the checkpoint that it recorded, so the trial corrects the count."""
    directory = tmp_path / "experiment" / "trial"
    trial = begun(trial_config(placement="colocated"))
    trial.step()
    trial.save(str(directory / "checkpoint_000000"))
    (directory / "checkpoint_000000" / "manifest.json").unlink()
    trial = begun(trial_config(placement="colocated"))
    trial.trial.stored = TrialStorage(
        StorageContext(str(tmp_path), "experiment", trial_dir_name="trial"), keep=None
    )
    noted = tune.Checkpoint.from_directory(str(directory / "checkpoint_000000"))
    trial.restore(
        _TrainingResult(checkpoint=noted, metrics={"training_iteration": 3, "time_total_s": 9.0})
    )
    assert trial.iteration == trial.trial.rounds_trained == 0
    assert trial._time_total == 0.0
    assert sorted(path.name for path in directory.iterdir()) == ["set-aside-1"]


def test_a_trial_refuses_to_go_on_with_another_data_file(begun: Any, tmp_path: Path) -> None:
    words = tmp_path / "words.txt"
    shutil.copy(NOUNS_FILE, words)
    config = trial_config(placement="colocated", task={"keywords_file": str(words)})
    begun(config).save(str(tmp_path / "checkpoint"))
    with words.open("a") as file:
        file.write("one more\n")
    with pytest.raises(InputChanged, match=rf"task\.keywords_file: {words}"):
        begun(config).restore(str(tmp_path / "checkpoint"))


def test_a_trial_goes_on_with_code_that_the_user_has_replaced(begun: Any, tmp_path: Path) -> None:
    rewards = tmp_path / "rewards.py"
    rewards.write_text("def score(response, ground_truth):\n    return 0.25\n")
    config = trial_config(placement="colocated", task={"reward": f"{rewards}:score"})
    (old,) = input_digests(GRPOConfig.from_dict(config), keys=["task.reward"]).values()
    first = begun(config)
    first.step()
    first.save(str(tmp_path / "checkpoint"))
    rewards.write_text("def score(response, ground_truth):\n    return 0.5\n")
    with pytest.raises(InputChanged, match=rf"task\.reward: {rewards}"):
        begun(config).restore(str(tmp_path / "checkpoint"))

    again = begun(config)
    again.trial._replaced = {old}
    again.restore(str(tmp_path / "checkpoint"))
    row = again.train()
    again.trial._replaced = ()
    assert (again.trial.rounds_trained, row["reward/train_mean"]) == (2, 0.5)
    note = "task.reward has changed since the checkpoint from which this trial continues"
    assert note in row.details.notes


def test_a_trial_that_starts_after_a_file_was_edited_is_refused(
    ray_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.tune.trainable.trainable.DEFAULT_STORAGE_PATH", str(tmp_path))
    words = tmp_path / "words.txt"
    shutil.copy(NOUNS_FILE, words)
    config = trial_config(placement="colocated", task={"keywords_file": str(words)})
    inputs = digests_of_all([GRPOConfig.from_dict(config)])
    guarded = tune.with_parameters(GRPOTrainable, inputs=inputs)
    before = actor_processes()
    running = guarded(config)
    assert running.trial.config.to_dict() == GRPOConfig.from_dict(config).to_dict()
    with words.open("a") as file:
        file.write("one more\n")
    refused = rf"^task\.keywords_file: {words} has changed .*put back the file"
    # A PBT clone starts in the existing actors.
    with pytest.raises(InputChanged, match=refused):
        running.reset_config({**config, "k": 2})
    running.stop()
    with pytest.raises(InputChanged, match=refused):
        guarded(config)
    assert_no_actor_left(before=before)


def test_a_generator_that_would_read_an_edited_file_takes_nobodys_place(
    begun: Any, tmp_path: Path
) -> None:
    words = tmp_path / "words.txt"
    shutil.copy(NOUNS_FILE, words)
    running = begun(trial_config(task={"keywords_file": str(words)}))
    running.step()
    with words.open("a") as file:
        file.write("one more\n")
    os.kill(own_processes(running)["generator-0"], signal.SIGKILL)
    with pytest.raises(InputChanged, match=rf"^task\.keywords_file: {words} has changed"):
        running.step()


# ---- A user's engine -----------------------------------------------------------------------------


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
    begun: Any, tmp_path: Path
) -> None:
    page = written_by_the_page("engine.md", "my_engine.py", tmp_path)
    config = trial_config(rounds=2, eval={"every": 2})
    told: dict[str, RoundDetails | None] = {}
    for engine in ("torch", f"{page}:GreedyEvaluation"):
        told[engine] = begun({**config, "engine": engine}).train().details
    ours, theirs = told.values()
    assert ours is not None
    assert theirs is not None
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
    begun: Any, tmp_path: Path
) -> None:
    written_by_the_page("engine.md", "my_engine.py", tmp_path)
    (tmp_path / "without.py").write_text(WITHOUT_LOG_PROBS)
    running = begun(trial_config(engine=f"{tmp_path / 'without.py'}:WithoutLogProbs"))
    with pytest.raises(ActorFailed, match="behaviour_log_probs are missing") as caught:
        running.step()
    assert "\n" not in str(caught.value)
