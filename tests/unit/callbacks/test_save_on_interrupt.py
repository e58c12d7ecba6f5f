"""Ctrl-C and SIGTERM while Tune runs, with fake trials that answer a request to stop."""

from __future__ import annotations

import io
import os
import pickle
import signal
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray import tune
from trials import FakeTrial, row, saved

from callbacks import grpo_callbacks, save_on_interrupt
from callbacks.save_on_interrupt import (
    SIGNALS,
    CheckpointOnInterrupt,
    continues,
    finishing,
    is_in_snapshot,
    requested,
    stopped,
)
from grpo_trainable.protocol.stopping import Finishing, Stopped
from grpo_trainable.storage.checkpointing import STATE


class FakeStore:
    """A fake key-value store. It records requests and releases, and holds the trials' answers."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.released: list[str] = []
        self.answers: dict[str, Finishing | Stopped] = {}
        self.forgotten = 0


class Experiment:
    """A Tune experiment with the callback. The experiment ends when it receives SIGUSR1."""

    def __init__(self, store: FakeStore, directory: Path) -> None:
        self.store, self.directory = store, directory
        self.trials: list[FakeTrial] = []
        self.callback = CheckpointOnInterrupt()
        self.ended = 0
        self._before_tune = signal.getsignal(signal.SIGINT)
        self._on_sigterm = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGINT, self._tunes_handler)
        signal.signal(signal.SIGUSR1, self._tunes_handler)
        self.callback.setup()

    def _tunes_handler(self, *_: Any) -> None:
        self.ended += 1
        signal.signal(signal.SIGINT, self._before_tune)

    def trial(self, name: str, rounds: int = 0, status: str = "RUNNING") -> FakeTrial:
        """Add a trial that has finished some rounds."""
        trial = FakeTrial(self.directory / name, arm=name)
        trial.init_local_path()
        trial.status = status
        trial.last_result = row(rounds) if rounds else {}
        self.trials.append(trial)
        return trial

    def step(self) -> None:
        self.callback.on_step_end(iteration=1, trials=self.trials)

    def end(self) -> None:
        self.callback.on_experiment_end(trials=self.trials)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> FakeStore:
    store = FakeStore()

    class Request:
        def __init__(self, trial_id: str) -> None:
            self.id = trial_id

        def make(self) -> None:
            store.asked.append(self.id)

        def answer(self) -> Finishing | Stopped | None:
            return store.answers.get(self.id)

        def release(self) -> None:
            store.released.append(self.id)

    def forget_all() -> None:
        store.forgotten += 1

    monkeypatch.setattr(save_on_interrupt, "TuneStopRequest", Request)
    monkeypatch.setattr(save_on_interrupt, "forget_all", forget_all)
    return store


@pytest.fixture
def experiment(
    store: FakeStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Iterator[Experiment]:
    """Yield an experiment, and end it while its output is still captured."""
    before = {number: signal.getsignal(number) for number in (*SIGNALS, signal.SIGUSR1)}
    streams = sys.stdout, sys.stderr
    experiment = Experiment(store, tmp_path)
    yield experiment
    experiment.end()
    requested.clear()
    sys.stdout, sys.stderr = streams
    for number, handler in before.items():
        signal.signal(number, handler)


def stopped_after(round_: int, lost_s: float = 0.0, **values: Any) -> Stopped:
    return Stopped(**{"round": round_, "saved": round_ > 0, "lost_s": lost_s, **values})


@pytest.mark.parametrize("number", SIGNALS)
def test_tune_ends_once_every_running_trial_has_stopped(experiment, store, number, capsys):
    first, second = experiment.trial("sync", 6), experiment.trial("async", 4)
    experiment.trial("waiting", status="PENDING")
    experiment.trial("done", 8, status="TERMINATED")
    experiment.step()
    assert store.asked == []
    signal.raise_signal(number)
    experiment.step()
    assert store.asked == [first.trial_id, second.trial_id]
    store.answers = {
        first.trial_id: stopped_after(6, 48.2),
        second.trial_id: Finishing(round=5, left_s=11.2),
    }
    experiment.step()
    experiment.step()
    assert not experiment.ended
    assert not store.released
    store.answers[second.trial_id] = stopped_after(5)
    experiment.step()
    experiment.step()
    assert experiment.ended == 1
    assert store.released == store.asked
    opening, *lines = capsys.readouterr().err.splitlines()
    assert opening.startswith(f"{number.name}: every trial stops and saves its last finished round")
    assert lines == [
        "sync/0: saved after round 6 of 8; lost: 48 s of work on round 7",
        "async/0: round 5 has begun its gradient steps and is finished first: about 12 s, judging "
        "by earlier rounds",
        "async/0: saved after round 5 of 8",
    ]


def test_tune_ends_at_once_if_no_trial_runs(experiment, store):
    experiment.trial("waiting", status="PENDING")
    signal.raise_signal(signal.SIGINT)
    experiment.step()
    assert experiment.ended == 1
    assert store.asked == []


def test_a_trial_that_starts_after_the_signal_is_asked_too(experiment, store, capsys):
    first = experiment.trial("sync", 6)
    second = experiment.trial("async", status="PENDING")
    signal.raise_signal(signal.SIGINT)
    experiment.step()
    second.status = "RUNNING"
    store.answers[first.trial_id] = stopped_after(6)
    experiment.step()
    assert not experiment.ended
    store.answers[second.trial_id] = stopped_after(0, 20.0)
    experiment.step()
    assert experiment.ended == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        "async/0: nothing to save before the end of its first round; lost: 20 s of work on round 1"
    )


def test_a_trial_that_ends_or_fails_is_not_awaited(experiment):
    trial = experiment.trial("sync", 8)
    signal.raise_signal(signal.SIGINT)
    experiment.step()
    trial.status = "TERMINATED"
    experiment.step()
    assert experiment.ended == 1


class OtherTrial(FakeTrial):
    """A trial of a Trainable that ignores requests to stop, with a different form of config."""

    trainable_name = "PPO"

    def get_trainable_cls(self) -> type:
        return tune.Trainable


def other_trial(experiment: Experiment, rounds: int) -> FakeTrial:
    trial = OtherTrial(experiment.directory / "PPO_1", arm="other")
    trial.init_local_path()
    trial.config, trial.evaluated_params = {"env": "CartPole-v1", "lr": 0.1}, {}
    trial.last_result = row(rounds)
    trial.checkpoint_at(4)
    experiment.trials.append(trial)
    return trial


def test_trials_of_another_trainable_are_not_awaited(experiment, store, capsys):
    ours, _ = experiment.trial("sync", 6), other_trial(experiment, 5)
    signal.raise_signal(signal.SIGINT)
    experiment.step()
    assert store.asked == [ours.trial_id]
    assert not experiment.ended
    store.answers[ours.trial_id] = stopped_after(6)
    experiment.step()
    experiment.step()
    assert experiment.ended == 1
    assert store.released == [ours.trial_id]
    assert capsys.readouterr().err.splitlines()[1:] == [
        "sync/0: saved after round 6 of 8",
        "PPO_1: not saved, because PPO does not stop on request: continues from round 4; lost: "
        "round 5 and the work on round 6",
    ]


def test_a_second_signal_says_what_a_trial_of_another_trainable_loses(experiment, capsys):
    experiment.trial("sync", 6)
    other_trial(experiment, 5)
    signal.raise_signal(signal.SIGINT)
    experiment.step()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert capsys.readouterr().err.splitlines()[-1] == (
        "PPO_1: not saved: continues from round 4; lost: round 5 and the work on round 6"
    )


def test_a_trial_that_saves_its_last_round_loses_no_work_on_another(experiment, capsys):
    trial = experiment.trial("sync", 8)
    trial.last_result["done"] = True
    signal.raise_signal(signal.SIGINT)
    experiment.step()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    lost = "sync/0: not saved: continues from round 0; lost: rounds 1 to 8"
    assert capsys.readouterr().err.splitlines()[-1] == lost


def test_tune_notes_the_checkpoint_that_the_trial_has_written(experiment, store):
    trial = experiment.trial("sync", 6)
    path = str(experiment.directory / "sync" / "checkpoint_000001")
    Path(path).mkdir()
    signal.raise_signal(signal.SIGINT)
    store.answers[trial.trial_id] = stopped_after(6, checkpoint=path)
    experiment.step()
    noted = trial.latest_checkpoint_result
    assert noted.checkpoint.path == path
    assert noted.metrics["training_iteration"] == 6


@pytest.mark.parametrize(
    ("known", "dirname", "contained"),
    [("abc_00001", None, True), ("abc_00000", None, False), ("abc_00000", "sync-0-abc", True)],
)
def test_a_trial_that_tunes_snapshot_lacks_starts_again(tmp_path, known, dirname, contained):
    trial = FakeTrial(tmp_path / "trial")
    trial.trial_id, trial.custom_dirname = "abc_00001", dirname
    assert is_in_snapshot(trial)  # Tune has not written a snapshot yet
    (tmp_path / "experiment_state-2026-11-28_21-17-36.json").write_text(known)
    assert is_in_snapshot(trial) is contained


def test_a_checkpoint_that_could_not_be_written_is_reported_with_its_cost(
    experiment, store, capsys
):
    trial = experiment.trial("sync", 6)
    saved(trial, 0, 4)
    signal.raise_signal(signal.SIGINT)
    note = "the checkpoint could not be written (No space left on device)"
    store.answers[trial.trial_id] = stopped_after(6, 30.0, saved=False, notes=[note])
    experiment.step()
    assert experiment.ended == 1
    assert capsys.readouterr().err.splitlines()[-2:] == [
        f"sync/0: {note}",
        "sync/0: NOT SAVED: continues from round 4; lost: rounds 5 to 6 and 30 s of work on round "
        "7",
    ]


def test_a_second_signal_ends_at_once_and_says_what_that_costs(experiment, store, capsys):
    running, stopped_ = experiment.trial("sync", 6), experiment.trial("async", 5)
    saved(running, 0, 4)
    experiment.trial("waiting", status="PENDING")
    signal.raise_signal(signal.SIGTERM)
    store.answers[stopped_.trial_id] = stopped_after(5)
    experiment.step()
    capsys.readouterr()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert capsys.readouterr().err.splitlines() == [
        "interrupted again: stopping at once",
        "sync/0: not saved: continues from round 4; lost: rounds 5 to 6 and the work on round 7",
    ]
    # The next signal goes to Tune's own handler.
    assert signal.getsignal(signal.SIGINT) == experiment._tunes_handler


def test_a_second_signal_costs_nothing_once_all_trials_have_stopped(experiment, store, capsys):
    """Tune has been told to end, but may still be waiting for a slow disk."""
    trial = experiment.trial("sync", 6)
    signal.raise_signal(signal.SIGINT)
    store.answers[trial.trial_id] = stopped_after(6)
    experiment.step()
    assert experiment.ended == 1
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert "nothing more is lost" in capsys.readouterr().err.splitlines()[-1]


def test_a_second_signal_names_files_that_an_object_store_lacks(experiment, store, capsys):
    """Tune has been told to end, and files are still being copied to the store."""
    waiting = "sync/0: s3://bucket/sync lacks 3 files of the trial; see /tmp/sync"
    experiment.callback = CheckpointOnInterrupt(lambda trials: [waiting] * len(trials))
    experiment.callback.setup()
    trial = experiment.trial("sync", 6)
    signal.raise_signal(signal.SIGINT)
    store.answers[trial.trial_id] = stopped_after(6)
    experiment.step()
    trial.status = "TERMINATED"
    capsys.readouterr()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert capsys.readouterr().err.splitlines() == [
        "interrupted again: stopping at once",
        waiting,
    ]


def test_a_signal_after_the_end_of_all_trials_interrupts_none(experiment, capsys):
    """The experiment has ended, but may still be copying files to an object store."""
    trial = experiment.trial("sync", 8)
    experiment.step()
    trial.status = "TERMINATED"
    signal.raise_signal(signal.SIGINT)
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("SIGINT: all trials have ended; ")
    experiment.end()
    assert not requested.is_set()


def test_an_experiment_that_a_signal_has_ended_stays_interrupted(experiment):
    experiment.trial("sync", 8, status="TERMINATED")
    experiment.trial("async", status="PENDING")
    signal.raise_signal(signal.SIGINT)
    experiment.step()
    assert experiment.ended == 1
    experiment.end()
    assert requested.is_set()


def test_a_checkpoint_that_is_being_written_does_not_count(experiment, capsys):
    trial = experiment.trial("sync", 6)
    trial.checkpoint_at(2)
    saved(trial, 1, 6)
    trial.checkpoint_at(2)
    trial.is_saving = True
    signal.raise_signal(signal.SIGINT)
    experiment.step()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert "continues from round 2; lost: rounds 3 to 6" in capsys.readouterr().err


def test_a_checkpoint_that_cannot_be_read_does_not_keep_trials_from_being_asked(
    experiment, store, capsys
):
    unreadable, other = experiment.trial("sync", 6), experiment.trial("async", 4)
    state = saved(unreadable, 0, 4) / STATE
    state.unlink()
    os.mknod(state, stat.S_IFSOCK)  # a socket cannot be opened as a file
    signal.raise_signal(signal.SIGINT)
    experiment.step()
    assert store.asked == [unreadable.trial_id, other.trial_id]
    store.answers[unreadable.trial_id] = stopped_after(6, saved=False)
    experiment.step()
    told = "sync/0: NOT SAVED: continues from round 4; lost: rounds 5 to 6"
    assert capsys.readouterr().err.splitlines()[-1] == told


def test_the_handlers_from_before_come_back_at_the_end(experiment):
    assert signal.getsignal(signal.SIGTERM) == experiment.callback._handle
    experiment.end()
    assert signal.getsignal(signal.SIGINT) == experiment._tunes_handler
    assert signal.getsignal(signal.SIGTERM) == experiment._on_sigterm
    assert not requested.is_set()


def test_after_an_interrupt_the_handler_from_before_tune_comes_back(experiment, store):
    trial = experiment.trial("sync", 6)
    signal.raise_signal(signal.SIGINT)
    store.answers[trial.trial_id] = stopped_after(6)
    experiment.step()
    assert signal.getsignal(signal.SIGINT) == experiment.callback._handle
    experiment.end()
    assert signal.getsignal(signal.SIGINT) == experiment._before_tune
    assert store.forgotten == 2  # all requests, before and after the experiment


def test_output_that_nobody_reads_does_not_keep_trials_from_stopping(experiment, store):
    """With `| tee`, Ctrl-C ends `tee` first, so nobody reads the output."""

    class Broken(io.TextIOBase):
        def write(self, text: str) -> int:
            raise BrokenPipeError

        def flush(self) -> None:
            raise BrokenPipeError

        def fileno(self) -> int:
            return nowhere.fileno()

    with open("/dev/null", "w") as nowhere:
        sys.stdout, sys.stderr = Broken(), Broken()
        trial = experiment.trial("sync", 6)
        signal.raise_signal(signal.SIGINT)
        print("a line of Tune's own reporter")
        store.answers[trial.trial_id] = stopped_after(6)
        experiment.step()
        experiment.end()
    assert experiment.ended == 1


def test_handlers_are_installed_only_in_the_main_thread(store):
    before = [signal.getsignal(number) for number in SIGNALS]
    callback = CheckpointOnInterrupt()
    thread = threading.Thread(target=callback.setup)
    thread.start()
    thread.join()
    callback.on_experiment_end(trials=[])
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_tune_can_pickle_the_callback_while_it_runs(experiment):
    signal.raise_signal(signal.SIGINT)
    restored = pickle.loads(pickle.dumps(experiment.callback))
    assert restored._former == {}
    *_, mirror, on_interrupt = pickle.loads(pickle.dumps(grpo_callbacks()))
    assert on_interrupt._not_copied == mirror.not_copied
    # A state as an earlier version pickled it.
    restored.__setstate__({"_saved": set(), "_ended": True})
    assert not restored._ended


def test_messages_say_what_is_saved_and_what_is_lost():
    assert stopped(stopped_after(6, 0.2), rounds=9, saved=6) == "saved after round 6 of 9"
    assert continues(6, 6, []) == "continues from round 6"
    assert continues(5, 6, []) == "continues from round 5; lost: round 6"


@pytest.mark.parametrize(
    ("left_s", "told"),
    [
        (None, "no earlier round shows how long that takes"),
        (0.0, "this has already taken longer than in earlier rounds"),
        (0.1, "about 1 s, judging by earlier rounds"),
    ],
)
def test_a_round_that_is_finished_first_says_how_long_that_takes(left_s, told):
    assert finishing(Finishing(round=1, left_s=left_s)).endswith(f"is finished first: {told}")
