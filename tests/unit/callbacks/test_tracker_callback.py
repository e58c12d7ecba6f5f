"""The callback that sends rounds to trackers, with a tracker in memory, and users' callbacks."""

from __future__ import annotations

import importlib.util
import math
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.tune import Callback
from trials import FakeTrial, detailed, row

from callbacks import grpo_callbacks
from callbacks.own_callback import own_callback
from callbacks.result_files import ResultJsonCallback
from callbacks.trackers.tracked_run import (
    TRACKERS,
    State,
    TrackedTrial,
    TrackerError,
    clean,
    metrics_of,
    refuse_unusable,
    without_secrets,
)
from callbacks.trackers.tracker_callback import SHARE, TrackerCallback
from grpo_trainable.plugins import PluginError


@dataclass
class Server:
    """A tracker in memory. `rounds` has the rounds of each run, in the order of their arrival."""

    rounds: dict[str, list[int]] = field(default_factory=dict)
    states: dict[str, State | None] = field(default_factory=dict)
    metrics: list[Mapping[str, float]] = field(default_factory=list)
    down: bool = False
    loses_answers: bool = False  # True if a round is stored, but the callback gets an error
    takes_s: float = 0.0  # duration of a call
    now_s: float = 0.0
    calls: int = 0

    def open_run(self, tracker: str, trial: TrackedTrial) -> ServerRun:
        self.answer()
        return ServerRun(self, trial)

    def answer(self) -> None:
        self.calls += 1
        self.now_s += self.takes_s
        if self.down:
            raise ConnectionError("the tracker does not answer")

    def callbacks(self) -> list[Callback]:
        tracker = TrackerCallback("fake", "lag", open_run=self.open_run, clock=lambda: self.now_s)
        return [ResultJsonCallback(), tracker]


class ServerRun:
    def __init__(self, server: Server, trial: TrackedTrial) -> None:
        self._server, self._id = server, trial.id
        self.next_round = max(server.rounds.setdefault(trial.id, []), default=0) + 1
        server.states[trial.id] = None

    def log(self, round_: int, metrics: Mapping[str, float]) -> None:
        self._server.answer()
        assert round_ >= self.next_round
        self._server.rounds[self._id].append(round_)
        self._server.metrics.append(metrics)
        if self._server.loses_answers:
            raise ConnectionError("no answer")
        self.next_round = round_ + 1

    def attach(self, report: Mapping[str, Path]) -> None: ...

    def close(self, state: State) -> None:
        self._server.answer()
        self._server.states[self._id] = state


def call(callbacks: list[Callback], hook: str, trial: FakeTrial, **info: Any) -> None:
    for callback in callbacks:
        getattr(callback, hook)(iteration=0, trials=[trial], trial=trial, **info)


def start(callbacks: list[Callback], trial: FakeTrial, checkpoint: int | None = None) -> None:
    trial.checkpoint_at(checkpoint)
    call(callbacks, "on_trial_start", trial)


def play(callbacks: list[Callback], trial: FakeTrial, rounds: range) -> None:
    for round_ in rounds:
        call(callbacks, "on_trial_result", trial, result=detailed(round_))


@pytest.mark.parametrize("arrived", [0, 3, 5, 6])
@pytest.mark.parametrize("checkpoint", [None, 2, 4, 6])
def test_after_a_kill_one_run_has_each_round_once(
    tmp_path: Path, checkpoint: int | None, arrived: int
) -> None:
    server, trial = Server(), FakeTrial(tmp_path / "trial")
    callbacks = server.callbacks()
    start(callbacks, trial)
    play(callbacks, trial, range(1, 7))
    del server.rounds["lag-trial"][arrived:]  # rounds that the kill lost on their way
    callbacks = server.callbacks()
    start(callbacks, trial, checkpoint)
    play(callbacks, trial, range((checkpoint or 0) + 1, 9))
    assert server.rounds == {"lag-trial": [1, 2, 3, 4, 5, 6, 7, 8]}


def test_a_retry_in_the_same_process_repeats_no_round(tmp_path: Path) -> None:
    server, trial = Server(), FakeTrial(tmp_path / "trial")
    callbacks = server.callbacks()
    start(callbacks, trial)
    play(callbacks, trial, range(1, 6))
    start(callbacks, trial, 2)
    play(callbacks, trial, range(3, 8))
    assert server.rounds == {"lag-trial": [1, 2, 3, 4, 5, 6, 7]}


def test_a_tracker_that_fails_is_tried_again_after_a_pause_and_gets_every_round(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server, trial = Server(down=True, takes_s=40.0), FakeTrial(tmp_path / "trial")
    callbacks = server.callbacks()
    start(callbacks, trial)
    play(callbacks, trial, range(1, 5))
    assert server.calls == 1
    server.now_s += 40 / SHARE
    play(callbacks, trial, range(5, 7))
    assert server.calls == 2
    server.now_s += 40 / SHARE
    server.down, server.takes_s = False, 0.0
    play(callbacks, trial, range(7, 9))
    assert server.rounds == {"lag-trial": [1, 2, 3, 4, 5, 6, 7, 8]}
    assert capsys.readouterr().out.splitlines() == [
        "sync/0: fake fails (ConnectionError: the tracker does not answer); rounds will be sent "
        "later",
        "sync/0: fake works again",
    ]


def test_a_round_whose_answer_was_lost_is_not_sent_again(tmp_path: Path) -> None:
    server, trial = Server(), FakeTrial(tmp_path / "trial")
    callbacks = server.callbacks()
    start(callbacks, trial)
    play(callbacks, trial, range(1, 3))
    server.loses_answers = True
    play(callbacks, trial, range(3, 5))
    server.loses_answers = False
    play(callbacks, trial, range(5, 7))
    assert server.rounds == {"lag-trial": [1, 2, 3, 4, 5, 6]}


def test_training_waits_for_a_slow_tracker_for_a_tenth_of_the_time(tmp_path: Path) -> None:
    server, trial = Server(takes_s=5.0), FakeTrial(tmp_path / "trial")
    callbacks = server.callbacks()
    start(callbacks, trial)
    for round_ in range(1, 101):
        server.now_s += 20
        before = server.now_s
        play(callbacks, trial, range(round_, round_ + 1))
        assert server.now_s - before <= 10  # the first call opens the run and sends a round
    assert 5 * server.calls < SHARE * server.now_s
    call(callbacks, "on_trial_complete", trial)
    assert server.rounds == {"lag-trial": list(range(1, 101))}


def test_rounds_that_wait_are_sent_when_the_trial_ends(tmp_path: Path) -> None:
    server, trial = Server(down=True), FakeTrial(tmp_path / "trial")
    callbacks = server.callbacks()
    start(callbacks, trial)
    play(callbacks, trial, range(1, 4))
    server.down = False
    call(callbacks, "on_trial_complete", trial)
    assert server.rounds == {"lag-trial": [1, 2, 3]}
    assert server.states == {"lag-trial": "finished"}


def test_a_trial_that_ends_after_a_resume_without_a_new_round_gets_its_last_rounds(
    tmp_path: Path,
) -> None:
    server, trial = Server(), FakeTrial(tmp_path / "trial")
    callbacks = server.callbacks()
    start(callbacks, trial)
    play(callbacks, trial, range(1, 4))
    del server.rounds["lag-trial"][1:]
    callbacks = server.callbacks()
    start(callbacks, trial, 3)
    call(callbacks, "on_trial_complete", trial)
    assert server.rounds == {"lag-trial": [1, 2, 3]}
    assert server.states == {"lag-trial": "finished"}


@pytest.mark.parametrize(
    ("hook", "state"), [("on_trial_complete", "finished"), ("on_trial_error", "failed")]
)
def test_a_run_ends_as_its_trial_does(tmp_path: Path, hook: str, state: State) -> None:
    server, trial = Server(), FakeTrial(tmp_path / "trial")
    callbacks = server.callbacks()
    start(callbacks, trial)
    play(callbacks, trial, range(1, 3))
    call(callbacks, hook, trial)
    for callback in callbacks:
        callback.on_experiment_end(trials=[trial])
    assert server.states == {"lag-trial": state}


def test_an_interrupt_closes_the_run_and_a_resume_continues_it(tmp_path: Path) -> None:
    server, trial = Server(), FakeTrial(tmp_path / "trial")
    callbacks = server.callbacks()
    start(callbacks, trial)
    play(callbacks, trial, range(1, 3))
    for callback in callbacks:
        callback.on_experiment_end(trials=[trial])
    assert server.states == {"lag-trial": "interrupted"}
    callbacks = pickle.loads(pickle.dumps(server.callbacks()[:1])) + server.callbacks()[1:]
    start(callbacks, trial, 2)
    play(callbacks, trial, range(3, 5))
    assert server.states == {"lag-trial": None}
    assert server.rounds == {"lag-trial": [1, 2, 3, 4]}


def test_tune_pickles_neither_runs_nor_waiting_rounds(tmp_path: Path) -> None:
    callback = TrackerCallback("wandb", "lag")
    callback._runs["trial"] = ServerRun(Server(), tracked())
    copy = pickle.loads(pickle.dumps(callback))
    assert (copy._runs, copy._tracker, copy._experiment) == ({}, "wandb", "lag")


def tracked(experiment: str = "lag", directory: str = "sync-0-1a2b3_00000") -> TrackedTrial:
    return TrackedTrial(experiment=experiment, directory=directory, name="sync/0", settings={})


def test_the_id_of_a_run_names_experiment_and_trial_and_suits_every_tracker() -> None:
    assert tracked().id == "lag-sync-0-1a2b3_00000"
    assert clean("GRPO_1_lag=0,k=2 é") == "GRPO_1_lag-0-k-2--"
    long = [tracked(directory="x" * 300 + end).id for end in "ab"]
    assert len(set(long)) == 2
    assert all(len(name) == 128 for name in long)


def test_no_password_or_token_of_a_url_is_printed() -> None:
    urls = "no answer from https://me:word@host/api, http://host?write_token=abc&x=1"
    assert without_secrets(OSError(urls)) == (
        "OSError: no answer from https://…host/api, http://host?write_token=…&x=1"
    )


def test_only_finite_metrics_are_sent() -> None:
    values = {"loss/policy": math.nan, "reward/train_mean": 0.5, "env/steps": 3}
    found = metrics_of(row(1, **values) | {"my": {"count": 2}, "pid": 7})
    assert found["my/count"] == 2.0
    assert found["reward/train_mean"] == 0.5
    assert found["env/steps"] == 3.0
    assert not {"loss/policy", "training_iteration", "time_total_s", "pid", "config"} & found.keys()


@pytest.mark.parametrize("tracker", TRACKERS)
@pytest.mark.parametrize("spec", [None, SimpleNamespace(origin=None)])
def test_a_missing_extra_is_one_line_that_names_the_command(
    tracker: str, spec: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W&B's own directory, ./wandb, looks like a package without a file."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    wanted = rf"^{tracker}: the library {tracker} is not installed; run: pip install -e '\.\["
    with pytest.raises(TrackerError, match=wanted):
        grpo_callbacks(trackers=[tracker])


def test_an_unknown_tracker_is_refused() -> None:
    with pytest.raises(TrackerError, match="comet: no such tracker; valid: wandb, mlflow, trackio"):
        refuse_unusable("comet")


# ---- Users' callbacks --------------------------------------------------------------------------

OWN = """
from ray.tune import Callback


class Counts(Callback):
    def __init__(self):
        self.rounds = []

    def on_trial_result(self, iteration, trials, trial, result, **info):
        self.rounds.append(result["training_iteration"])
        if result["training_iteration"] == 2:
            raise RuntimeError("mine")


class NeedsMore(Callback):
    def __init__(self, more):
        pass


class NoCallback:
    pass
"""


@pytest.fixture
def own_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(OWN)
    return path


def test_a_failing_callback_of_a_user_ends_no_trial(
    own_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback: Any = own_callback(f"{own_file}:Counts")
    play([callback], FakeTrial(tmp_path / "trial"), range(1, 4))
    assert callback.rounds == [1, 2, 3]
    (record,) = caplog.records
    assert "Counts.on_trial_result failed" in record.getMessage()


def test_a_resume_loads_the_callback_of_a_user_again(own_file: Path) -> None:
    pickled = pickle.dumps(own_callback(f"{own_file}:Counts"))
    own_file.write_text(OWN.replace("self.rounds = []", "self.rounds = [0]"))
    assert pickle.loads(pickled).rounds == [0]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Absent", "has no attribute 'Absent'"),
        ("NeedsMore", "cannot be instantiated: TypeError"),
        ("NoCallback", r"must be a class derived from ray\.tune\.Callback"),
    ],
)
def test_a_class_that_is_no_callback_is_one_line(own_file: Path, name: str, words: str) -> None:
    with pytest.raises(PluginError, match=f"^--callback .*mine.py:{name}: .*{words}") as error:
        own_callback(f"{own_file}:{name}")
    assert "\n" not in str(error.value)
