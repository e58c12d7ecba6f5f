"""The Trainable without Ray: its rows, and checkpoints that are restored outside Tune."""

from __future__ import annotations

import contextlib
import pickle
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import write_checkpoint
from fake_hub import FakeHub
from ray import tune
from ray.tune.experiment import Trial
from ray.tune.result import RESULT_DUPLICATE, TRIAL_INFO
from trials import details

import grpo_trainable.trial
from grpo_trainable.config import ConfigError, GRPOConfig, resources
from grpo_trainable.plugins import PluginError
from grpo_trainable.protocol.round_records import details_of
from grpo_trainable.protocol.stopping import Finishing, RoundAbandoned, Stopped
from grpo_trainable.storage.checkpointing import CheckpointError, TrialState, read_checkpoint
from grpo_trainable.storage.ray_private import _TrainingResult
from grpo_trainable.storage.trial_storage import TrialStorage
from grpo_trainable.tasks.input_files import InputChanged
from grpo_trainable.trainable import DetailedGRPO, GRPOTrainable
from grpo_trainable.trial import Trial as RealTrial

ROUNDS = 4


class CountingTrial:
    """A trial without actors. A round only counts up, and a checkpoint stores the count."""

    def __init__(self, *_: Any, stop_request: Any = None) -> None:
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

    def reset(self, *_: Any) -> None:
        self.rounds_trained = 0

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


def test_bundles_are_those_of_settings_that_need_the_models_files(tmp_path, monkeypatch):
    hub = FakeHub(tmp_path / "hub", monkeypatch)
    hub.add("org/chat", chat_template="{{ messages }}")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer_config.json"):
        shutil.copy(tmp_path / "hub" / "org--chat" / name, tmp_path / "model" / name)
    apart = {"placement": "disaggregated", "resources": {"num_generators": 3}}
    expected = GRPOTrainable.default_resource_request(apart).bundles
    assert len(expected) == 5
    for path in ("org/chat", "~/model"):
        config = {**apart, "model": {"path": path, "system": "Be short."}}
        assert GRPOTrainable.default_resource_request(config).bundles == expected
    # The model may be missing here, because the trial may run on another machine that has it.
    config = {**apart, "model": {"path": "org/none"}}
    assert GRPOTrainable.default_resource_request(config).bundles == expected


def test_a_model_that_cannot_be_had_is_a_mistake_in_the_config(tmp_path, monkeypatch):
    FakeHub(tmp_path, monkeypatch)
    with pytest.raises(ConfigError, match=r"^model\.path=org/none: no such directory, and"):
        GRPOTrainable({"model": {"path": "org/none"}})


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


def test_a_relative_path_can_be_restored(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trained(2).save("saved")
    for path in ("saved", Path("saved")):
        restored = GRPOTrainable({})
        restored.restore(path)
        assert restored.iteration == 2


def test_a_stopped_trainable_says_so(tmp_path):
    trainable = trained(1)
    trainable.stop()
    trainable.stop()
    for use in (trainable.train, lambda: trainable.save(str(tmp_path / "saved"))):
        with pytest.raises(RuntimeError, match=r"^the Trainable was stopped; create a new one"):
            use()


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
    with pytest.raises(RuntimeError, match=f"^the trial ended after round {ROUNDS}; restore an"):
        restored.train()


def test_a_trial_that_has_ended_trains_no_further():
    trainable = trained(ROUNDS)
    with pytest.raises(RuntimeError, match=f"^the trial ended after round {ROUNDS}; restore an"):
        trainable.train()
    trainable.reset({})
    assert trainable.train()["training_iteration"] == 1


def test_a_missing_checkpoint_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=rf"{tmp_path / 'no'}: does not exist"):
        GRPOTrainable({}).restore(tmp_path / "no")


def test_details_travel_beside_the_row_and_are_not_saved(tmp_path):
    trainable = DetailedGRPO({})
    row = pickle.loads(pickle.dumps(trainable.train()))  # Ray pickles each row
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
        ({"env": "CartPole-v1"}, "GRPO_CartPole-v1_7_2_lag=1"),  # a name, as RLlib's `env` is
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


# ---- Invalid settings --------------------------------------------------------------------------


@pytest.fixture
def misnamed(tmp_path: Path) -> dict[str, Any]:
    """Return a config whose task is not in the user's file."""
    (tmp_path / "tasks.py").write_text("class Rhymes:\n    pass\n")
    return {"task": {"name": f"{tmp_path}/tasks.py:Rymes"}}


UNDER_TUNE = {TRIAL_INFO: SimpleNamespace(trial_id="7")}


def test_a_task_that_cannot_be_loaded_fails_the_first_step_under_tune(misnamed):
    trainable = GRPOTrainable({**misnamed, **UNDER_TUNE})
    for use in (trainable.train, lambda: trainable.restore("checkpoint")):
        with pytest.raises(PluginError, match=r"tasks\.py:Rymes: cannot be imported"):
            use()
    trainable.stop()


def test_a_task_that_cannot_be_loaded_fails_at_once_outside_tune(misnamed):
    with pytest.raises(PluginError, match=r"tasks\.py:Rymes: cannot be imported"):
        GRPOTrainable(misnamed)


def test_a_task_that_cannot_be_loaded_fails_the_step_after_a_reset(misnamed):
    trainable = GRPOTrainable(dict(UNDER_TUNE))
    assert trainable.reset({**misnamed, **UNDER_TUNE})
    with pytest.raises(PluginError, match=r"tasks\.py:Rymes: cannot be imported"):
        trainable.train()


def test_a_file_that_has_changed_fails_the_step_after_a_reset(monkeypatch):
    def reset(*_: Any) -> None:
        raise InputChanged("words.txt has changed")

    monkeypatch.setattr(CountingTrial, "reset", reset)
    trainable = GRPOTrainable(dict(UNDER_TUNE))
    assert trainable.reset(dict(UNDER_TUNE))
    with pytest.raises(InputChanged, match=r"words\.txt has changed"):
        trainable.train()
    with pytest.raises(InputChanged):
        GRPOTrainable({}).reset({})


# ---- Another config for the same process -------------------------------------------------------

COLOCATED = GRPOConfig.from_dict({"placement": "colocated"})
DISAGGREGATED = GRPOConfig.from_dict({"placement": "disaggregated"})


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace a trial's actors with fakes, and return the list of their events."""
    events: list[str] = []

    class FakeActors:
        def __init__(self, config: GRPOConfig, *_: Any) -> None:
            events.append(f"new {config.placement}")

        def start(self) -> None:
            pass

        def reset(self, config: GRPOConfig) -> None:
            events.append(f"reset {config.placement}")

        def end(self) -> None:
            events.append("end")

    monkeypatch.setattr(grpo_trainable.trial, "TrialActors", FakeActors)
    monkeypatch.setattr(grpo_trainable.trial, "driver_pid", lambda: None)
    monkeypatch.setattr(RealTrial, "_new_pipeline", lambda self: None)
    return events


def reserve_for(config: GRPOConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    group = SimpleNamespace(bundle_specs=resources.bundles(config))
    monkeypatch.setattr("ray.util.get_current_placement_group", lambda: group)


def test_a_config_that_needs_fewer_bundles_starts_its_own_actors(events, monkeypatch):
    reserve_for(DISAGGREGATED, monkeypatch)
    trial = RealTrial(DISAGGREGATED)
    trial.reset(COLOCATED, None, None)
    assert events == ["new disaggregated", "end", "new colocated"]
    assert trial.config == COLOCATED


def test_a_config_that_needs_other_bundles_is_refused(events, monkeypatch):
    reserve_for(COLOCATED, monkeypatch)
    trial = RealTrial(COLOCATED)
    with pytest.raises(ConfigError, match="placement=disaggregated: needs the bundles"):
        trial.reset(DISAGGREGATED, None, None)
    assert events == ["new colocated", "end"]


def stop_request(*, made: bool) -> Any:
    return SimpleNamespace(made=made)


def test_a_trial_in_reused_actors_obeys_only_its_own_request_to_stop(events, monkeypatch):
    reserve_for(COLOCATED, monkeypatch)
    trial = RealTrial(COLOCATED, stop_request=stop_request(made=True))
    trial.pipeline = SimpleNamespace(abandon=lambda: None)  # type: ignore[assignment]
    own = stop_request(made=False)
    trial.stoppable.stopped = True
    trial.reset(COLOCATED, None, own)
    assert events == ["new colocated", "reset colocated"]
    assert not trial.stoppable.stopped
    with trial.stoppable.round(1):
        own.made = True
        with pytest.raises(RoundAbandoned):
            trial.runtime.wait([], timeout_s=1.0)


def test_a_running_trial_that_loads_a_checkpoint_keeps_its_request_to_stop(
    events, monkeypatch, tmp_path
):
    class Reset(Exception):
        pass

    def reset(*arguments: Any) -> None:
        raise Reset(*arguments)

    reserve_for(COLOCATED, monkeypatch)
    monkeypatch.setattr(grpo_trainable.trial, "verified_digests", lambda directory: {})
    monkeypatch.setattr(grpo_trainable.trial, "read_state", lambda *_: ({}, []))
    own: Any = stop_request(made=False)
    trial = RealTrial(COLOCATED, stop_request=own)
    trial._has_first_weights = True
    monkeypatch.setattr(trial, "reset", reset)
    with pytest.raises(Reset) as caught:
        trial.load(tmp_path)
    assert caught.value.args == (COLOCATED, None, own)


# ---- A round that is abandoned ---------------------------------------------------------------


class AbandonedTrial:
    """A trial that is stopped while it samples."""

    def __init__(self, rounds_trained: int, *, unsaved: bool) -> None:
        self.rounds_trained, self.unsaved = rounds_trained, unsaved
        self.notes: list[str] = []
        self.stoppable = SimpleNamespace(stopped=True)
        self.pipeline = SimpleNamespace(ended=False)
        self.stored = SimpleNamespace(remove_older=lambda rows_follow: [])

    def run_round(self) -> None:
        raise RoundAbandoned(self.rounds_trained + 1, 48.0)

    def take_notes(self) -> list[str]:
        return self.notes

    def note_checkpoints(self, notes: list[str], *, failed: bool = False) -> None:
        self.notes += notes
        self.unsaved = failed


class Unattached(GRPOTrainable):
    """A Trainable that runs outside an actor and records the events of a stop."""

    def __init__(self, trial: Any, failing_writes: int = 0) -> None:
        self.trial, self._storage = trial, None
        self._looked_for_checkpoint = True
        self.last_pauses_s = (0.0, 0.0)
        self.failing_writes = failing_writes
        self.events: list[Any] = []

    def _stop_request(self) -> Any:
        return self

    def save(self, checkpoint_dir: str | None = None) -> _TrainingResult:
        return self._save_to_storage()

    def _write_to_storage(self) -> _TrainingResult:
        self.events.append("write")
        if self.events.count("write") <= self.failing_writes:
            raise OSError(28, "No space left on device")
        checkpoint: Any = SimpleNamespace(path="/storage/checkpoint_000001")
        return _TrainingResult(checkpoint=checkpoint, metrics={})

    # ---- The request to stop ----

    def say(self, answer: Finishing | Stopped) -> None:
        self.events.append(answer)

    def wait_until_released(self) -> None:
        self.events.append("released")


def test_an_abandoned_round_leaves_a_checkpoint_and_no_row():
    trainable = Unattached(AbandonedTrial(6, unsaved=True))
    assert trainable.step() == {RESULT_DUPLICATE: True}
    path = "/storage/checkpoint_000001"
    answer = Stopped(round=6, saved=True, lost_s=48.0, checkpoint=path)
    assert trainable.events == ["write", answer, "released"]


@pytest.mark.parametrize("round_", [0, 6])
def test_nothing_is_written_if_there_is_nothing_new_to_save(round_):
    trainable = Unattached(AbandonedTrial(round_, unsaved=False))
    trainable.step()
    assert trainable.events == [Stopped(round=round_, saved=round_ > 0, lost_s=48.0), "released"]


@pytest.mark.parametrize(("failing", "saved"), [(2, True), (3, False)])
def test_a_checkpoint_that_cannot_be_written_is_tried_again_and_then_reported(failing, saved):
    trainable = Unattached(AbandonedTrial(6, unsaved=True), failing)
    trainable.step()
    *writes, answer, _ = trainable.events
    assert writes == ["write"] * 3
    assert answer.saved is saved
    assert (answer.checkpoint is None) is not saved
    told = "the checkpoint could not be written (No space left on device); the previous one is kept"
    assert answer.notes == ([] if saved else [told])


def test_checkpoint_from_before_a_setting_existed_has_the_same_settings():
    trial = object.__new__(RealTrial)
    trial.config = GRPOConfig()
    older = trial.config.to_dict()
    del older["optim"]["warmup_rounds"]
    assert trial._has_settings(older)
    assert not trial._has_settings({**older, "seed": 1})
    assert not trial._has_settings({**older, "removed_since": 1})
