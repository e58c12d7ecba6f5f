"""The Trainable without Ray: its rows, and checkpoints that are restored outside Tune."""

from __future__ import annotations

import contextlib
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import write_checkpoint
from ray import tune
from ray.tune.experiment import Trial
from trials import details

import grpo_trainable.trial
from grpo_trainable.protocol.round_records import details_of
from grpo_trainable.storage.checkpointing import CheckpointError, TrialState, read_checkpoint
from grpo_trainable.storage.trial_storage import TrialStorage
from grpo_trainable.trainable import DetailedGRPO, GRPOTrainable

ROUNDS = 4


class CountingTrial:
    """A trial without actors, whose rounds and checkpoints only count."""

    def __init__(self, *_: Any) -> None:
        self.stored = TrialStorage(None, keep=None)  # as outside Tune
        self.rounds_trained, self.time_total_s, self.due = 0, 0.0, False

    def run_round(self) -> Any:
        if self.rounds_trained == ROUNDS:
            return None
        self.rounds_trained += 1
        last = self.rounds_trained == ROUNDS
        return SimpleNamespace(metrics={"version/learner": float(self.rounds_trained)}, last=last)

    def details(self, report: Any) -> Any:
        return details(self.rounds_trained)

    @contextlib.contextmanager
    def checkpointing(self) -> Iterator[None]:
        yield

    def note_checkpoints(self, notes: list[str]) -> None:
        assert notes == []

    def save(self, directory: str) -> None:
        state = {
            "pipeline": {"learner_round": self.rounds_trained},
            "time_total_s": self.time_total_s,
        }
        tensors = {"a": torch.zeros(2)}
        write_checkpoint(
            directory, TrialState(state=state, policy=tensors, optimizer={}, groups=[])
        )

    def load(self, directory: str) -> None:
        state = read_checkpoint(directory).state
        self.rounds_trained = state["pipeline"]["learner_round"]
        self.time_total_s = state["time_total_s"]

    def end(self) -> None:
        pass


@pytest.fixture(autouse=True)
def counting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpo_trainable.trial, "Trial", CountingTrial)
    monkeypatch.setattr("ray.tune.trainable.trainable.DEFAULT_STORAGE_PATH", str(tmp_path))


def trained(rounds: int) -> GRPOTrainable:
    trainable = GRPOTrainable({})
    for _ in range(rounds):
        trainable.train()
    return trainable


@pytest.mark.parametrize("form", [str, Path, tune.Checkpoint, "saved", "result"])
def test_restore_outside_tune_brings_back_the_counters(tmp_path, form):
    first = trained(2)
    saved = first.save(str(tmp_path / "saved"))
    given = {"saved": saved, "result": SimpleNamespace(checkpoint=saved.checkpoint)}
    restored = GRPOTrainable({})
    restored.restore(given[form] if isinstance(form, str) else form(str(tmp_path / "saved")))
    assert restored.iteration == restored.training_iteration == 2
    assert restored.get_state()["time_total"] == first.get_state()["time_total"] > 0
    row = restored.train()
    assert (row["training_iteration"], row["iterations_since_restore"]) == (3, 1)
    assert row["time_total_s"] >= first.get_state()["time_total"] + row["time_this_iter_s"]
    assert row["version/learner"] == 3.0
    restored.save(str(tmp_path / "again"))
    last = GRPOTrainable({})
    last.restore(str(tmp_path / "again"))
    assert last.iteration == 3


def test_load_checkpoint_brings_back_the_counters_too(tmp_path):
    trained(2).save(str(tmp_path / "saved"))
    restored = GRPOTrainable({})
    restored.load_checkpoint(str(tmp_path / "saved"))
    assert restored.iteration == 2
    assert restored.train()["training_iteration"] == 3


def test_restoring_the_final_checkpoint_says_that_the_trial_has_ended(tmp_path):
    trained(ROUNDS).save(str(tmp_path / "saved"))
    restored = GRPOTrainable({})
    restored.restore(str(tmp_path / "saved"))
    total = restored.get_state()["time_total"]
    row = restored.train()
    assert (row["done"], row["training_iteration"]) == (True, ROUNDS)
    assert row["time_total_s"] == total
    assert restored.iteration == ROUNDS


def test_a_missing_checkpoint_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=rf"{tmp_path / 'no'}: no longer exists"):
        GRPOTrainable({}).restore(tmp_path / "no")


def test_details_travel_beside_the_row_and_are_not_saved(tmp_path):
    trainable = DetailedGRPO({})
    row = pickle.loads(pickle.dumps(trainable.train()))  # as Ray sends it
    assert row.keys() == trained(1).train().keys()
    found = details_of(row)
    assert found is not None
    assert found.rollouts == details(1).rollouts
    saved = trainable.save(str(tmp_path / "saved"))
    assert type(saved.metrics) is dict
    assert saved.metrics == row


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"lag": 1, "env": {"name": "guess", "max_turns": 3}}, "GRPO_7_2_lag=1"),
        ({"env": {}}, "GRPO_7_2_lag=1"),
        ({"env": "CartPole-v1"}, "GRPO_CartPole-v1_7_2_lag=1"),  # of RLlib
        ({"lag": 1}, "GRPO_7_2_lag=1"),
    ],
)
def test_directories_of_trials_are_named_without_the_section_env(config, name):
    trial = Trial("GRPO", config=config, trial_id="7", experiment_tag="2_lag=1", stub=True)
    assert re.fullmatch(rf"{name}_\d{{4}}-[-_\d]+", trial._generate_dirname())
    assert str(trial) == repr(trial) == name.removesuffix("_2_lag=1")


def test_names_that_a_user_chooses_stay(tmp_path):
    trial = Trial("GRPO", config={"env": {}}, stub=True, trial_name_creator=lambda trial: "mine")
    assert str(trial) == "mine"
