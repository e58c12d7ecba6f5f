"""The callbacks without Tune: the files that they write, and the files after a trial restarts."""

from __future__ import annotations

import csv
import errno
import json
import os
import pickle
import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.fs
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.tune import Callback
from ray.tune.experiment import Trial
from ray.tune.logger import CSVLoggerCallback, JsonLoggerCallback, TBXLoggerCallback
from ray.tune.utils import flatten_dict
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from trials import FakeTrial, detailed, details, held_out, row, saved

from callbacks import grpo_callbacks, save_on_interrupt
from callbacks.bands import BandsCallback
from callbacks.checkpoints import CheckpointCallback
from callbacks.console import BAR_WIDTH, ConsoleCallback, live_table, progress_line, seconds_left
from callbacks.fail_safe import HOOKS, FailSafeCallback
from callbacks.result_files import ProgressCsvCallback, ResultJsonCallback
from callbacks.round_files import RolloutsCallback, VersionLogCallback, lag_histogram
from callbacks.stage_timings import StageTimingsCallback, stage_totals
from callbacks.tensorboard import TensorBoardCallback, examples_table
from callbacks.trace import TraceCallback
from callbacks.trial_files import (
    cut_lines,
    cut_parts,
    label,
    read_rows,
    set_verbose,
    trial_directory,
)
from grpo_trainable.config import GRPOConfig
from grpo_trainable.protocol.round_records import details_of
from grpo_trainable.protocol.versions import Sync, VersionChange
from grpo_trainable.storage.ray_private import StorageContext
from grpo_trainable.telemetry.metrics import NAMES, ActorSpan
from grpo_trainable.telemetry.stages import STAGES, shares_of_work
from grpo_trainable.telemetry.timers import Span


@pytest.fixture
def verbose() -> Iterator[None]:
    set_verbose(True)
    yield
    set_verbose(False)


def file_callbacks() -> list[Callback]:
    """Return all callbacks except `CheckpointCallback`: these tests write no checkpoints."""
    return [c for c in grpo_callbacks(console=False) if not isinstance(c, CheckpointCallback)]


def start(callbacks: list[Callback], trial: FakeTrial, iteration: int | None = None) -> None:
    """Start a trial as Tune does, from the checkpoint of `iteration`."""
    trial.checkpoint_at(iteration)
    for callback in callbacks:
        callback.on_trial_start(iteration=0, trials=[trial], trial=trial)


def report(callbacks: list[Callback], trial: FakeTrial, result: dict[str, Any]) -> dict[str, Any]:
    for callback in callbacks:
        callback.on_trial_result(iteration=0, trials=[trial], trial=trial, result=result)
    return result


def play(callbacks: list[Callback], trial: FakeTrial, rounds: range, **values: Any) -> None:
    for round_ in rounds:
        evaluations = held_out(round_) if round_ % 2 == 0 else {}
        metrics = {"time/rollout_s": float(round_), **values}
        report(callbacks, trial, detailed(round_, metrics=metrics, evaluations=evaluations))


# ---- Failures ----------------------------------------------------------------------------------


class Fails(FailSafeCallback):
    def on_trial_result(self, iteration: int, trials: list, trial: Any, result: dict, **info: Any):
        raise OSError("no space left")

    def on_experiment_end(self, trials: list, **info: Any) -> None:
        raise KeyError("experiment")

    def get_state(self) -> dict[str, Any]:
        raise ValueError("state")


def test_failure_is_told_once_a_trial_with_its_name(caplog, tmp_path):
    callback = Fails()
    for name in ("first", "second", "first"):
        report([callback], FakeTrial(tmp_path / name), row(1))
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
    for record, name in zip(caplog.records, ("first", "second"), strict=True):
        assert name in record.getMessage()
        assert record.exc_info is not None
    assert "no space left" in caplog.text


def test_failure_without_a_trial_and_in_the_state_does_not_pass_either(caplog):
    callback = Fails()
    callback.on_experiment_end(trials=[])
    assert callback.get_state() is None
    assert "the experiment" in caplog.text


def test_hooks_that_a_logger_of_tune_brings_survive_as_well(caplog, tmp_path):
    class Broken(FailSafeCallback, JsonLoggerCallback):
        def log_trial_result(self, *args: Any) -> None:
            raise OSError("no space left")

    report([Broken()], FakeTrial(tmp_path / "trial"), row(1))
    assert "Broken.on_trial_result failed for trial trial" in caplog.text


def test_a_trial_of_another_trainable_is_told_once_in_a_line_of_all_callbacks(caplog, tmp_path):
    trial = FakeTrial(tmp_path / "of_rllib", num_env_runners=1, lr=1e-4)
    play([BandsCallback(), ConsoleCallback()], trial, range(1, 3))
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{trial}: grpo_callbacks() record only trials of GRPO")
    assert record.exc_info is None


def test_refused_file_is_told_in_a_line(caplog, tmp_path):
    class Broken(FailSafeCallback):
        def on_trial_result(self, *args: Any, **info: Any) -> None:
            raise OSError(errno.ENOSPC, "a library's own words")

    report([Broken()], FakeTrial(tmp_path / "trial"), row(1))
    (record,) = caplog.records
    assert "failed for trial trial (No space left on device); the run continues" in record.message
    assert not record.exc_info


@pytest.mark.slow
def test_what_a_full_disk_does_not_take_is_written_once_there_is_space(tmp_path):
    trial = FakeTrial(tmp_path / "trial")
    callbacks = file_callbacks()

    def log(round_: int) -> None:
        report(callbacks, trial, detailed(round_))

    log(1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        log(2)
        log(3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    log(4)
    directory = Path(trial.path)
    events = EventAccumulator(trial.path)
    events.Reload()
    assert [event.step for event in events.Scalars("version/learner")] == [1, 2, 3, 4]
    lines = (directory / "result.json").read_text().splitlines()
    assert [json.loads(line)["training_iteration"] for line in lines] == [1, 2, 3, 4]
    with (directory / "progress.csv").open(newline="") as file:
        assert [int(entry["training_iteration"]) for entry in csv.DictReader(file)] == [1, 2, 3, 4]
    trace = json.loads((directory / "trace.json").read_text())
    assert {event["args"]["round"] for event in trace} == {1, 2, 3, 4}
    for kind in ("rollouts", "steps", "versions"):
        names = sorted(path.name for path in (directory / kind).iterdir())
        assert names == [f"part-{n:08d}.parquet" for n in (1, 2, 3, 4)]


def test_last_round_that_was_refused_is_written_when_the_trial_ends(tmp_path):
    trial, callback = FakeTrial(tmp_path / "trial"), ResultJsonCallback()
    report([callback], trial, row(1))
    (tmp_path / "trial").rename(tmp_path / "away")
    (tmp_path / "trial").touch()  # a plain file, so no file can be created below it
    report([callback], trial, row(2))
    (tmp_path / "trial").unlink()
    (tmp_path / "away").rename(tmp_path / "trial")
    callback.on_trial_complete(iteration=2, trials=[trial], trial=trial)
    rows = read_rows(tmp_path / "trial" / "result.json")
    assert [row["training_iteration"] for row in rows] == [1, 2]


@pytest.mark.parametrize(
    ("done", "saved_round", "row_of_tune", "origin", "known"),
    [
        (True, 3, 2, None, 3),
        (True, 3, 3, None, 3),  # Tune has the last row, but not the last checkpoint
        (True, 2, 2, None, 2),
        (False, 3, 2, None, 2),
        (True, 3, 2, "donor/checkpoint_000001", 2),  # Tune does not know of this copy
    ],
)
def test_tune_gets_the_last_row_of_an_ended_trial_that_its_snapshot_lacks(
    tmp_path, done, saved_round, row_of_tune, origin, known
):
    """Such a trial reports no further row, and Tune would end the experiment with an error."""
    fake, callback = FakeTrial(tmp_path / "trial"), ResultJsonCallback()
    for round_ in (1, 2, 3):
        report([callback], fake, row(round_, done=done and round_ == 3))
    saved(fake, 0, saved_round, origin=origin)
    place = StorageContext(str(tmp_path), "", trial_dir_name="trial")
    trial = Trial("GRPO", storage=place, stub=True)
    trial.update_last_result(row(row_of_tune))  # as in Tune's last snapshot, before a kill
    CheckpointCallback().on_trial_start(iteration=0, trials=[trial], trial=trial)
    assert trial.last_result["training_iteration"] == known
    if known == 3:
        assert trial.last_result["config"] == trial.config  # not the resolved settings of the file
    # Tune restores from the newest checkpoint that it knows, and takes over that checkpoint's row.
    newest = trial.latest_checkpoint_result
    assert (newest is not None) == (known == 3)
    if newest is not None:
        assert Path(newest.checkpoint.path).name == "checkpoint_000000"
        trial.temporary_state.restoring_from = newest
        trial.on_restore()
        assert trial.last_result["training_iteration"] == 3


def test_rows_contain_the_settings_that_the_trial_uses(tmp_path):
    trial, callback = FakeTrial(tmp_path / "trial"), ResultJsonCallback()
    settings = GRPOConfig.from_dict({"arm": "sync", "optim": {"lr": 5e-6}}).to_dict()
    given = detailed(1, config=settings)
    report([callback], trial, given)
    (written,) = read_rows(tmp_path / "trial" / "result.json")
    assert written["config"] == settings
    assert given["config"] == {"arm": "sync"}  # Tune's own output shows the config of `given`


def test_a_home_directory_in_the_config_of_a_trial_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    model = {"path": "~", "system": "Be short."}
    assert label(FakeTrial(tmp_path / "trial", model=model)) == "sync/0"


@pytest.mark.parametrize("hook", ["on_trial_save", "on_experiment_end"])
def test_a_round_that_was_refused_is_written_before_a_command_ends(tmp_path, hook):
    trial, callback = FakeTrial(tmp_path / "trial"), ResultJsonCallback()
    (tmp_path / "trial").touch()
    report([callback], trial, row(1))
    (tmp_path / "trial").unlink()
    getattr(callback, hook)(iteration=1, trials=[trial], trial=trial)
    rows = read_rows(tmp_path / "trial" / "result.json")
    assert [row["training_iteration"] for row in rows] == [1]


def test_rounds_that_are_refused_for_too_long_are_given_up_by_name(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("callbacks.round_writer.MOST_WAITING", 2)
    trial, callback = FakeTrial(tmp_path / "trial"), ResultJsonCallback()
    (tmp_path / "trial").touch()
    for round_ in (1, 2, 3):
        report([callback], trial, row(round_))
    assert (
        "ResultJsonCallback has been unable to write for too long; round 1 will be" in caplog.text
    )
    (tmp_path / "trial").unlink()
    report([callback], trial, row(4))
    rows = read_rows(tmp_path / "trial" / "result.json")
    assert [row["training_iteration"] for row in rows] == [3, 4]


@pytest.mark.slow
def test_a_trial_that_does_not_get_to_its_first_round_leaves_every_file_as_it_was(tmp_path):
    trial = FakeTrial(tmp_path / "trial")
    callbacks = file_callbacks()
    start(callbacks, trial)
    play(callbacks, trial, range(1, 7))
    before = {p: p.read_bytes() for p in (tmp_path / "trial").rglob("*") if p.is_file()}
    callbacks = file_callbacks()
    start(callbacks, trial, 4)
    for callback in callbacks:
        callback.on_trial_error(iteration=0, trials=[trial], trial=trial)
        callback.on_experiment_end(trials=[trial])
    assert {p: p.read_bytes() for p in (tmp_path / "trial").rglob("*") if p.is_file()} == before


def test_trial_that_starts_again_on_a_full_disk_has_its_rows_once_there_is_space(tmp_path):
    trial = FakeTrial(tmp_path / "trial")
    writers = [ResultJsonCallback(), ProgressCsvCallback()]
    report(writers, trial, row(1))
    trial.checkpoint_at(1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        report(writers, trial, row(2))
        for writer in writers:
            writer.on_trial_start(iteration=1, trials=[trial], trial=trial)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    report(writers, trial, row(2))
    lines = (tmp_path / "trial" / "result.json").read_text().splitlines()
    assert [json.loads(line)["training_iteration"] for line in lines] == [1, 2]
    with (tmp_path / "trial" / "progress.csv").open(newline="") as file:
        assert [int(entry["training_iteration"]) for entry in csv.DictReader(file)] == [1, 2]


def test_failing_setup_does_not_pass_either(caplog):
    class Broken(FailSafeCallback):
        def setup(self, **info: Any) -> None:
            raise OSError("the terminal is gone")

    Broken().setup()
    assert "Broken.setup failed for the experiment" in caplog.text


def test_interrupt_is_no_failure():
    class Interrupted(FailSafeCallback):
        def on_experiment_end(self, trials: list, **info: Any) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Interrupted().on_experiment_end(trials=[])


def test_every_hook_of_tune_is_covered():
    assert {"setup", "on_trial_result", "on_checkpoint", "get_state", "set_state"} <= set(HOOKS)
    for callback in grpo_callbacks():
        assert all(hasattr(getattr(callback, hook), "__fail_safe__") for hook in HOOKS)


@pytest.mark.parametrize("callback", grpo_callbacks(), ids=lambda c: type(c).__name__)
def test_callbacks_travel_by_pickle_and_without_details(callback, tmp_path, capsys, caplog):
    # Tune pickles callbacks with the experiment, before and after they get their first results.
    trial = FakeTrial(tmp_path / "trial")
    again = pickle.loads(pickle.dumps(callback))
    start([again], trial)
    report([again], trial, row(1))
    assert caplog.records == []


# ---- Files of a trial that restarts ------------------------------------------------------------


@pytest.mark.slow
@given(st.integers(0, 12), st.integers(0, 12), st.binary(max_size=20))
@settings(deadline=None)
def test_lines_are_cut_to_an_iteration_and_half_a_line_goes(tmp_path_factory, lines, last, torn):
    path = tmp_path_factory.mktemp("cut") / "result.json"
    whole = [json.dumps({"n": n}).encode() + b"\n" for n in range(1, lines + 1)]
    path.write_bytes(b"".join(whole) + torn.replace(b"\n", b""))
    cut_lines(path, last, lambda line: json.loads(line)["n"])
    assert path.read_bytes() == b"".join(whole[:last])


def test_a_torn_line_in_the_middle_costs_no_later_one(tmp_path):
    path = tmp_path / "result.json"
    lines = [b'{"training_iteration": %d}\n' % n for n in range(1, 6)]
    path.write_bytes(lines[0] + b'{"training_i' + lines[1] + b"".join(lines[2:]) + b'{"tr')
    cut_lines(path, 4, lambda line: json.loads(line)["training_iteration"])
    assert [row["training_iteration"] for row in read_rows(path)] == [1, 3, 4]


def test_parts_after_an_iteration_go_and_what_was_being_written(tmp_path):
    names = [
        "part-00000001.parquet",
        "part-00000002.parquet",
        ".part-00000002.parquet.ab",
        "other.txt",
    ]
    for name in names:
        (tmp_path / name).touch()
    cut_parts(tmp_path, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.txt", names[0]]


def events_of(trial: FakeTrial) -> EventAccumulator:
    events = EventAccumulator(trial.path, {"histograms": 0, "tensors": 0})  # 0 keeps all events
    events.Reload()
    return events


def parts(trial: FakeTrial, kind: str) -> list[dict[str, Any]]:
    paths = sorted((Path(trial.path) / kind).glob("part-*.parquet"))
    return [entry for path in paths for entry in pq.read_table(path).to_pylist()]


def rounds_on_disk(trial: FakeTrial) -> dict[str, list[int]]:
    """Return the rounds in each file, in the order of the file."""
    directory = Path(trial.path)
    results = [json.loads(line) for line in (directory / "result.json").read_text().splitlines()]
    with (directory / "progress.csv").open(newline="") as file:
        progress = list(csv.DictReader(file))
    trace = json.loads((directory / "trace.json").read_text())
    events = events_of(trial)
    texts = events.Tensors("examples/held_out/text_summary")
    return {
        "result.json": [entry["training_iteration"] for entry in results],
        "progress.csv": [int(entry["training_iteration"]) for entry in progress],
        "progress.csv values": [int(float(entry["version/learner"])) for entry in progress],
        "rollouts": sorted({entry["round"] for entry in parts(trial, "rollouts")}),
        "versions": [entry["version"] for entry in parts(trial, "versions")],
        "trace": [event["args"]["round"] for event in trace if event["name"] == "rollout"],
        "scalars": [event.step for event in events.Scalars("version/learner")],
        "histograms": [event.step for event in events.Histograms("rollouts/reward")],
        "evaluations": [2 * r for r in sorted({e["round"] for e in parts(trial, "evaluations")})],
        "texts": [2 * event.step for event in texts],
    }


def until(last: int) -> dict[str, list[int]]:
    every = list(range(1, last + 1))
    some = [2 * round_ for round_ in every if round_ % 2 == 0]
    kinds = ("result.json", "progress.csv", "progress.csv values", "rollouts", "versions")
    files = dict.fromkeys((*kinds, "trace", "scalars", "histograms"), every)
    return {**files, "evaluations": some, "texts": some}


@pytest.mark.slow
@pytest.mark.parametrize("restart", [None, 4, 6])
@pytest.mark.parametrize("killed", [False, True])
def test_no_round_is_there_twice_or_missing_after_a_restart(
    tmp_path: Path, restart: int | None, killed: bool
) -> None:
    trial = FakeTrial(tmp_path / "trial")
    callbacks = file_callbacks()
    start(callbacks, trial)
    play(callbacks, trial, range(1, 7))
    assert rounds_on_disk(trial) == until(6)
    # TensorBoard reads event files in the order of their names, which contain the creation time.
    (events,) = (tmp_path / "trial").glob("events.*")
    events = events.rename(events.with_name("events.out.tfevents.0000000001.host"))
    if killed:  # killed while writing, with every file left open
        for name in ("result.json", "progress.csv", "trace.json", events.name):
            with (tmp_path / "trial" / name).open("ab") as file:
                file.write(b'{"training_iter')
        callbacks = file_callbacks()
    start(callbacks, trial, restart)
    play(callbacks, trial, range((restart or 0) + 1, 9))
    assert rounds_on_disk(trial) == until(8)
    assert lag_histogram(trial) == {0: 8}
    assert stage_totals(trial)["rollout"] == sum(range(1, 9))


@pytest.mark.slow
@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_restart_leaves_files_alone_that_are_reached_through_links(tmp_path, link):
    first = FakeTrial(tmp_path / "first")
    callbacks = file_callbacks()
    start(callbacks, first)
    play(callbacks, first, range(1, 5))
    (events,) = (path.name for path in (tmp_path / "first").glob("events.*"))
    names = ("result.json", "progress.csv", "trace.json", events)
    before = {name: (tmp_path / "first" / name).read_bytes() for name in names}
    copy = FakeTrial(tmp_path / "copy")
    (tmp_path / "copy").mkdir()
    for name in names:
        link(tmp_path / "first" / name, tmp_path / "copy" / name)
    callbacks = file_callbacks()
    start(callbacks, copy, 2)
    play(callbacks, copy, range(3, 6))

    assert {name: (tmp_path / "first" / name).read_bytes() for name in names} == before
    assert not any((tmp_path / "copy" / name).is_symlink() for name in names)
    rows = read_rows(tmp_path / "copy" / "result.json")
    assert [row["training_iteration"] for row in rows] == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_restart_goes_on_with_the_files_of_a_remote_storage(tmp_path):
    # Every file system except the local one counts as remote, even one that wraps a local folder.
    (tmp_path / "bucket" / "trial").mkdir(parents=True)
    trial = FakeTrial(tmp_path / "first")
    callbacks = file_callbacks()
    start(callbacks, trial)
    play(callbacks, trial, range(1, 7))
    for name in ("result.json", "progress.csv", "trace.json"):
        shutil.copy(tmp_path / "first" / name, tmp_path / "bucket" / "trial" / name)
    shutil.copytree(tmp_path / "first" / "rollouts", tmp_path / "bucket" / "trial" / "rollouts")
    resumed = FakeTrial(tmp_path / "staging")
    resumed.path = "trial"
    resumed.storage.storage_filesystem = pyarrow.fs.SubTreeFileSystem(
        str(tmp_path / "bucket"), pyarrow.fs.LocalFileSystem()
    )
    callbacks = file_callbacks()
    start(callbacks, resumed, 4)
    assert lag_histogram(resumed) == {0: 6}  # the trial will repeat two of these groups
    play(callbacks, resumed, range(5, 9))
    assert lag_histogram(resumed) == {0: 8}
    assert stage_totals(resumed)["rollout"] == sum(range(1, 9))
    for callback in callbacks:
        callback.on_experiment_end(trials=[resumed])
    local, bucket = trial_directory(resumed), tmp_path / "bucket" / "trial"
    for file in local.rglob("*.parquet"):
        assert (bucket / file.relative_to(local)).read_bytes() == file.read_bytes()
    resumed.path = str(local)
    resumed.storage.storage_filesystem = pyarrow.fs.LocalFileSystem()
    on_disk = rounds_on_disk(resumed)
    for name in ("result.json", "progress.csv", "progress.csv values", "trace"):
        assert on_disk[name] == list(range(1, 9))
    assert on_disk["scalars"] == [5, 6, 7, 8]  # earlier rounds are in separate files


def test_tune_keeps_no_details(tmp_path):
    trial = FakeTrial(tmp_path / "trial")
    callbacks = file_callbacks()
    start(callbacks, trial)
    result = trial.last_result = report(callbacks, trial, detailed(1))
    assert result.details is not None
    assert "details" not in (tmp_path / "trial" / "result.json").read_text()
    # Schedulers and loggers of Tune keep copies like these.
    for kept in (
        result.copy(),
        flatten_dict(result),
        deepcopy(result),
        json.loads(json.dumps(result)),
    ):
        assert details_of(kept) is None
        assert kept["version/learner"] == 1.0
    for callback in callbacks:
        callback.on_step_end(iteration=1, trials=[trial])
    assert result.details is None


class Keeps(Callback):
    """A user's callback, which keeps a copy of each row."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def on_trial_result(self, iteration: int, trials: list, trial: Any, result: dict, **info: Any):
        self.rows.append(dict(result))


def test_a_users_callbacks_get_the_same_plain_row_before_and_after_ours(tmp_path):
    trial = FakeTrial(tmp_path / "trial")
    trial.checkpoint = None  # a new trial, with nothing to continue
    first, last = Keeps(), Keeps()
    for place in ("first", "last"):
        trial.local_path = str(tmp_path / place)  # Tune's loggers write to this directory
        trial.init_local_path()
        loggers = [JsonLoggerCallback(), CSVLoggerCallback(), TBXLoggerCallback()]
        before, after = ([first, *loggers], []) if place == "first" else ([], [*loggers, last])
        callbacks = [*before, *file_callbacks(), *after]
        start(callbacks, trial)
        report(callbacks, trial, pickle.loads(pickle.dumps(detailed(1))))  # Ray pickles a row
        for logger in loggers:
            logger.log_trial_end(trial)
    (row_before,), (row_after,) = first.rows, last.rows
    assert row_before == row_after == row(1)
    for name in ("result.json", "progress.csv"):
        content = (tmp_path / "first" / name).read_text()
        assert content == (tmp_path / "last" / name).read_text()
        assert "time/rollout_fraction" in content
        assert "details" not in content.lower()
    for place in ("first", "last"):
        events = EventAccumulator(str(tmp_path / place))
        events.Reload()
        assert {f"ray/tune/{name}" for name in NAMES} <= set(events.Tags()["scalars"])


def test_a_number_that_an_environment_reports_later_is_in_every_file(tmp_path):
    trial = FakeTrial(tmp_path / "trial")
    callbacks = file_callbacks()
    start(callbacks, trial)
    for round_ in (1, 2, 3):
        late = {"env/a, b_mean": 0.5 * round_} if round_ > 1 else {}
        metrics = {"env/calls_mean": float(round_), **late}
        report(callbacks, trial, detailed(round_, metrics=metrics))
    written = [json.loads(line) for line in (tmp_path / "trial" / "result.json").open()]
    assert [line.get("env/a, b_mean") for line in written] == [None, 1.0, 1.5]
    events = events_of(trial)
    assert [event.value for event in events.Scalars("env/calls_mean")] == [1.0, 2.0, 3.0]
    assert [event.step for event in events.Scalars("env/a, b_mean")] == [2, 3]
    # The trial continues from the checkpoint of round 2, with new callbacks.
    callbacks = file_callbacks()
    start(callbacks, trial, 2)
    report(callbacks, trial, detailed(3, metrics={"env/calls_mean": 3.0, "env/new_mean": 7.0}))
    with (tmp_path / "trial" / "progress.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["env/calls_mean"] for line in lines] == ["1.0", "2.0", "3.0"]
    assert [line["env/a, b_mean"] for line in lines] == ["", "1.0", ""]
    assert [line["env/new_mean"] for line in lines] == ["", "", "7.0"]
    assert [line["version/learner"] for line in lines] == ["1.0", "2.0", "3.0"]


class Adds(Callback):
    """A user's callback, which adds numbers to each row from the second round on."""

    def on_trial_result(self, iteration: int, trials: list, trial: Any, result: dict, **info: Any):
        if result["training_iteration"] > 1:
            result |= {"mine": np.float32(0.5), "my": {"count": 2, "flag": True, "text": "a"}}


def test_numbers_that_a_users_callback_adds_before_ours_are_in_every_file(tmp_path):
    trial = FakeTrial(tmp_path / "trial")
    callbacks = [Adds(), *file_callbacks()]
    start(callbacks, trial)
    for round_ in (1, 2):
        report(callbacks, trial, {**detailed(round_), "pid": 7, "time_total_s": 9.0})
    first, second = (json.loads(line) for line in (tmp_path / "trial" / "result.json").open())
    assert "mine" not in first
    assert (second["mine"], second["my"]["count"]) == (0.5, 2)
    events = events_of(trial)
    assert set(events.Tags()["scalars"]) == {*NAMES, "mine", "my/count"}
    assert [(event.step, event.value) for event in events.Scalars("my/count")] == [(2, 2.0)]
    with (tmp_path / "trial" / "progress.csv").open(newline="") as file:
        assert [(line["mine"], line["my/count"]) for line in csv.DictReader(file)] == [
            ("", ""),
            ("0.5", "2"),
        ]


def test_header_of_progress_csv_that_was_cut_short_is_written_again(tmp_path):
    trial = FakeTrial(tmp_path / "trial")
    (tmp_path / "trial").mkdir()
    (tmp_path / "trial" / "progress.csv").write_text("buffer/age_max,buffer/age_me")
    callbacks = file_callbacks()
    start(callbacks, trial)
    play(callbacks, trial, range(1, 3))
    with (tmp_path / "trial" / "progress.csv").open(newline="") as file:
        assert [row["training_iteration"] for row in csv.DictReader(file)] == ["1", "2"]


@pytest.mark.slow
def test_trace_that_was_cut_short_is_not_written_over(tmp_path, caplog):
    trial = FakeTrial(tmp_path / "trial")
    callbacks = file_callbacks()
    start(callbacks, trial)
    play(callbacks, trial, range(1, 3))
    path = tmp_path / "trial" / "trace.json"
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])  # as if the disk had been full
    play(callbacks, trial, range(3, 4))
    assert "TraceCallback.on_trial_result failed for trial trial" in caplog.text
    start(callbacks, trial, 1)
    play(callbacks, trial, range(2, 4))
    assert rounds_on_disk(trial)["trace"] == [1, 2, 3]


def test_settings_that_a_trial_leaves_out_have_their_defaults(tmp_path, capsys, caplog):
    trial = FakeTrial(tmp_path / "trial")
    trial.config, trial.evaluated_params = {"lag": 1, "placement": "disaggregated"}, {}
    callbacks = [*file_callbacks(), ConsoleCallback()]
    start(callbacks, trial)
    play(callbacks, trial, range(1, 3))
    assert caplog.records == []
    assert f"{trial!s:<18} started (trial" in capsys.readouterr().out


def test_the_console_names_trials_that_start_again_and_an_experiment_without_work(
    tmp_path, capsys, monkeypatch
):
    trial, console = FakeTrial(tmp_path / "trial"), ConsoleCallback()
    console.setup()
    console.on_experiment_end([trial])
    assert capsys.readouterr().out == ""  # the trial waited for room until it was interrupted
    trial.status = "TERMINATED"
    console.on_experiment_end([trial])  # `time_budget_s` was over
    assert capsys.readouterr().out.startswith("nothing ran: the experiment ended before ")
    with monkeypatch.context() as patched:
        patched.setattr(trial, "last_result", {"training_iteration": 3})
        console.on_experiment_end([trial])
    assert capsys.readouterr().out == "nothing to run: 1 trial had already ended\n"
    with monkeypatch.context() as patched:  # an interrupt before the trial could start
        patched.setattr(save_on_interrupt.requested, "is_set", lambda: True)
        console.on_experiment_end([trial])
    assert capsys.readouterr().out == ""
    trial.status = "ERROR"
    console.on_trial_error(1, [trial], trial)  # the trial failed before it had started
    console.on_experiment_end([trial])
    assert "nothing to run" not in capsys.readouterr().out
    trial.status, trial.last_result = "RUNNING", row(3)
    console.on_trial_start(3, [trial], trial)
    console.on_experiment_end([trial])
    assert capsys.readouterr().out.endswith("  started again (trial 1 of 1)\n")
    # After a kill, Tune may not know that the trial had reported.
    trial.last_result = {}
    console.on_trial_start(3, [trial], trial)
    assert capsys.readouterr().out.endswith("  started (trial 1 of 1)\n")
    (tmp_path / "trial" / "result.json").write_text(json.dumps(row(3)))
    console.on_trial_start(3, [trial], trial)
    assert capsys.readouterr().out.endswith("  started again (trial 1 of 1)\n")


def test_details_say_little_of_themselves():
    assert len(repr([details(1)])) < 100


def test_progress_csv_keeps_the_columns_of_its_first_row(tmp_path):
    trial = FakeTrial(tmp_path / "trial")
    callbacks = file_callbacks()
    start(callbacks, trial)
    play(callbacks, trial, range(1, 3))
    callbacks = file_callbacks()
    start(callbacks, trial, 2)
    shuffled = dict(reversed(row(3).items()))
    report(callbacks, trial, {**shuffled, "new/metric": 1.0, "version/learner": 3.0})
    with (tmp_path / "trial" / "progress.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(entry["version/learner"]) for entry in rows] == [1, 2, 3]


# ---- Bands -------------------------------------------------------------------------------------


def follow(nats: list[float], tmp_path: Path, **settings: Any) -> BandsCallback:
    trial, callback = FakeTrial(tmp_path / "trial", callbacks=settings), BandsCallback()
    for round_, value in enumerate(nats, start=1):
        report([callback], trial, row(round_, **{"kl/reference_nats": value}))
    return callback


def test_leaving_the_band_warns_once_each_time(caplog, capsys, tmp_path):
    nats = [0.0, 0.5, 2.0, 5.0, 6.0, 2.0, 0.5, 0.4, 2.0]
    follow(nats, tmp_path, kl_band=[1.0, 4.0])
    # There is no warning at first, because every policy starts below the band.
    assert [record.getMessage() for record in caplog.records] == [
        "sync/0, round 4: kl/reference_nats 5 is above callbacks.kl_band [1, 4]",
        "sync/0, round 7: kl/reference_nats 0.5 is below callbacks.kl_band [1, 4]",
    ]
    back = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in back] == [f"sync/0, round {n}" for n in (3, 6, 9)]


def test_band_from_0_does_not_mind_noise_around_0(caplog, capsys, tmp_path):
    follow([-0.02, 0.01, -0.01, 21.0], tmp_path, kl_band=[0.0, 20.0])
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["sync/0, round 4"]
    assert capsys.readouterr().out == ""


def test_a_kl_far_below_0_is_outside_a_band_that_begins_at_0(caplog, capsys, tmp_path):
    follow([-305.0, -426.0, 0.5], tmp_path, kl_band=[0.0, 20.0])
    assert [record.getMessage() for record in caplog.records] == [
        "sync/0, round 1: kl/reference_nats -305 is far below 0: the policy has moved far from the "
        "weights that sampled the responses, outside callbacks.kl_band [0, 20]"
    ]
    assert "round 3: kl/reference_nats 0.5 is in callbacks.kl_band" in capsys.readouterr().out


def test_a_kl_slightly_below_0_is_below_a_band_that_begins_above_0(caplog, tmp_path):
    follow([1.0, -0.1], tmp_path, kl_band=[0.5, 20.0])
    assert [record.getMessage() for record in caplog.records] == [
        "sync/0, round 2: kl/reference_nats -0.1 is below callbacks.kl_band [0.5, 20]"
    ]


def test_a_kl_within_two_standard_errors_of_the_band_causes_no_warning(caplog, tmp_path):
    trial = FakeTrial(tmp_path / "trial", callbacks={"kl_band": [0.0, 20.0]})
    callback = BandsCallback()
    for round_, (nats, se) in enumerate([(21.0, 0.6), (23.0, 0.6)], start=1):
        kl = {"kl/reference_nats": nats, "kl/reference_nats_se": se}
        report([callback], trial, row(round_, **kl))
    assert [record.getMessage() for record in caplog.records] == [
        "sync/0, round 2: kl/reference_nats 23 ± 0.6 is above callbacks.kl_band [0, 20]"
    ]


@pytest.mark.parametrize("restart", [False, True])
def test_a_kl_is_back_in_its_band_only_if_the_estimate_itself_is(
    capsys, tmp_path, monkeypatch, restart
):
    trial = FakeTrial(tmp_path / "trial", callbacks={"kl_band": [0.0, 20.0]})
    callback = BandsCallback()
    rows = [
        row(round_, **{"kl/reference_nats": nats, "kl/reference_nats_se": 0.6})
        for round_, nats in enumerate([23.0, 21.0, 22.0, 19.0], start=1)
    ]
    monkeypatch.setattr("callbacks.bands.read_rows", lambda path: rows)
    for result in rows:
        callback = BandsCallback() if restart else callback
        report([callback], trial, result)
    assert capsys.readouterr().out == (
        "sync/0, round 4: kl/reference_nats 19 ± 0.6 is in callbacks.kl_band [0, 20]\n"
    )


def test_reason_of_a_stop_is_told(caplog, tmp_path):
    follow([1.0, 7.5], tmp_path, kl_stop=7.0)
    assert [record.getMessage() for record in caplog.records] == [
        "sync/0 ends after round 2: kl/reference_nats 7.5 is above callbacks.kl_stop=7"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("restart", [2, 5])
def test_band_is_judged_by_the_round_that_a_trial_goes_on_from(caplog, tmp_path, restart):
    """The KL is above the band from round 4 on. After round 6, a new driver takes over."""
    trial = FakeTrial(tmp_path / "trial", callbacks={"kl_band": [1.0, 3.0]})
    nats = {round_: 2.0 if round_ < 4 else 5.0 for round_ in range(1, 9)}
    warned = []
    for first, last in ((1, 6), (restart + 1, 8)):
        callbacks = file_callbacks()
        start(callbacks, trial, first - 1 or None)
        for round_ in range(first, last + 1):
            play(callbacks, trial, range(round_, round_ + 1), **{"kl/reference_nats": nats[round_]})
        warned.append([record.getMessage().split(":")[0] for record in caplog.records])
        caplog.clear()
    assert warned == [["sync/0, round 4"], ["sync/0, round 4"] if restart == 2 else []]


def test_earlier_rows_that_could_not_be_read_are_read_with_the_next_row(tmp_path, monkeypatch):
    trial = FakeTrial(tmp_path / "trial", callbacks={"kl_band": [1.0, 3.0]})
    monkeypatch.setattr("callbacks.bands.read_rows", lambda path: open(tmp_path / "none"))  # noqa: SIM115
    callback = BandsCallback()
    report([callback], trial, row(3))
    assert callback._places == callback._watches == {}
    monkeypatch.setattr("callbacks.bands.read_rows", lambda path: [row(1), row(2)])
    report([callback], trial, row(4, **{"kl/reference_nats": 2.5}))
    assert callback._places == {trial.trial_id: "inside"}


def test_trials_without_kl_are_not_judged(tmp_path):
    trial = FakeTrial(tmp_path / "trial", callbacks={"kl_band": [1.0, 3.0]})
    without = {name: value for name, value in row(1).items() if not name.startswith("kl/")}
    report([callback := BandsCallback()], trial, without)
    assert callback._places == {trial.trial_id: "below"}


TEXT = {"kl/reference_nats": 1.0, "response/length_mean": 40.0, "response/truncated_fraction": 0.1}


def watched(tmp_path: Path, rounds: dict[str, list[float]], **settings: Any) -> None:
    """Report the rounds of one trial. Metrics that are not in `rounds` stay constant."""
    trial, callback = FakeTrial(tmp_path / "trial", **settings), BandsCallback()
    for i, values in enumerate(zip(*rounds.values(), strict=True)):
        report([callback], trial, row(i + 1, **{**TEXT, **dict(zip(rounds, values, strict=True))}))


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


# A round has 64 responses, so each mean that is compared with a band covers two rounds.
LEFT = {
    # 24 nats for 40 tokens
    "KL": (
        {"kl/reference_nats": [0.0, 0.0, 2.0, 18.0, 24.0, 60.0]},
        "sync/0, round 5: KL per token is at least 0.53 nats, outside its band (at most 0.5 nats); "
        "lower optim.lr or set loss.kl_coef",
    ),
    # The same KL, minus two standard errors of 3 nats, is within the band until the last round.
    "KL of a sample": (
        {
            "kl/reference_nats": [0.0, 0.0, 2.0, 18.0, 24.0, 60.0],
            "kl/reference_nats_se": [0.0, 0.0, 3.0, 3.0, 3.0, 3.0],
        },
        "sync/0, round 6: KL per token is at least 0.9 nats, outside its band (at most 0.5 nats); "
        "lower optim.lr or set loss.kl_coef",
    ),
    "short": (
        {"response/length_mean": [38.0, 42.0, 30.0, 12.0, 6.0, 6.0]},
        "sync/0, round 5: response length is 9 tokens, outside its band (half to twice the 40 "
        "tokens of the first rounds); read rollouts/*.parquet",
    ),
    "long": (
        {"response/length_mean": [38.0, 42.0, 79.0, 81.0, 82.0, 90.0]},
        "sync/0, round 5: response length is 82 tokens, outside its band (half to twice the 40 "
        "tokens of the first rounds); read rollouts/*.parquet",
    ),
    "truncated": (
        {"response/truncated_fraction": [0.1, 0.3, 0.4, 0.4, 0.6, 0.6]},
        "sync/0, round 5: share of truncated responses is 50%, outside its band (at most 45%); "
        "raise rollout.max_new_tokens if the reward needs the end of a response",
    ),
    "repeated": (
        {"response/repeated_fraction": [0.0, 0.04, 0.1, 0.12, 0.2, 0.9]},
        "sync/0, round 5: share of repeated text is 16%, outside its band (at most 10 points above "
        "the 2% of the first rounds); read rollouts/*.parquet, and lower optim.lr if the text has "
        "collapsed",
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_figure_that_leaves_its_band_warns_once(caplog, tmp_path, name):
    rounds, warning = LEFT[name]
    watched(tmp_path, rounds)
    assert messages(caplog) == [warning]


def test_a_limit_that_truncates_from_the_start_is_told_once_and_without_a_warning(
    caplog, capsys, tmp_path
):
    watched(tmp_path, {"response/truncated_fraction": [1.0, 1.0, 0.9, 1.0, 1.0, 1.0, 1.0, 1.0]})
    assert messages(caplog) == []
    assert capsys.readouterr().out == (
        "sync/0, round 1: rollout.max_new_tokens=60 cuts off 100% of the responses; raise this "
        "limit if the reward needs the end of a response\n"
    )


@pytest.mark.parametrize(
    ("figure", "edges"),
    [
        ("kl/reference_nats", [0.0, 0.0, 20.0, 20.0]),
        ("response/length_mean", [40.0, 40.0, 20.0, 20.0, 80.0, 80.0]),
        ("response/truncated_fraction", [0.25, 0.25, 0.5, 0.5, 0.0, 0.0]),
        ("response/repeated_fraction", [0.5, 0.5, 0.6, 0.6, 0.0, 0.0]),
    ],
)
def test_figure_at_the_edge_of_its_band_does_not_warn(caplog, tmp_path, figure, edges):
    watched(tmp_path, {figure: edges})
    assert messages(caplog) == []


def test_few_responses_never_warn(caplog, tmp_path):
    """A round has 8 responses, so each mean that is compared with a band covers 16 rounds.

    The second mean ends at round 32.
    """
    wild = {
        "response/repeated_fraction": [0.0] * 16 + [1.0] * 16,
        "response/length_mean": [5.0, 60.0] * 16,
    }
    few = {"prompts": 2, "group_size": 4}
    watched(tmp_path / "two", {name: values[15:17] for name, values in wild.items()}, rollout=few)
    watched(tmp_path / "some", {name: values[:31] for name, values in wild.items()}, rollout=few)
    assert messages(caplog) == []
    watched(tmp_path / "many", wild, rollout=few)
    assert [message.split(",")[1] for message in messages(caplog)] == [
        " round 32: share of repeated text is 100%"
    ]


@pytest.mark.parametrize(
    "settings",
    [{"task": {"name": "control"}}, {"task": {"name": "guess"}}],
    ids=["control", "episodes"],
)
def test_episodes_may_change_completely(caplog, tmp_path, settings):
    watched(
        tmp_path,
        {figure: values for rounds, _ in LEFT.values() for figure, values in rounds.items()},
        **settings,
    )
    assert messages(caplog) == []


def test_length_that_the_reward_controls_is_not_judged(caplog, tmp_path):
    task = {"length_penalty": 0.01, "length_target": 9}
    watched(tmp_path, LEFT["short"][0], task=task)
    assert messages(caplog) == []


@pytest.mark.parametrize("restart", [3, 6])
def test_warning_is_not_repeated_by_a_new_driver(caplog, tmp_path, restart):
    """The text collapses in round 5. After round 6, a new driver takes over."""
    trial = FakeTrial(tmp_path / "trial")
    repeated = [0.0, 0.0, 0.0, 0.0, 0.5, 0.5, 0.5, 0.5]
    warned = []
    for first, last in ((1, 6), (restart + 1, 8)):
        callbacks = [BandsCallback(), ResultJsonCallback()]
        start(callbacks, trial, first - 1 or None)
        for round_ in range(first, last + 1):
            value = {"response/repeated_fraction": repeated[round_ - 1]}
            report(callbacks, trial, row(round_, **{**TEXT, **value}))
        warned.append([message.split(":")[0] for message in messages(caplog)])
        caplog.clear()
    assert warned == [["sync/0, round 5"], ["sync/0, round 5"] if restart == 3 else []]


def test_rows_of_a_running_trial_are_not_pickled(tmp_path):
    callback = BandsCallback()
    report([callback], FakeTrial(tmp_path / "trial"), row(1))
    assert pickle.loads(pickle.dumps(callback)).__dict__ == {"_places": {}, "_watches": {}}


# ---- Stage timings -----------------------------------------------------------------------------


def test_shares_by_hand():
    seconds = {
        "rollout": 3.0,
        "vine": 0.0,
        "reward": 0.5,
        "optimize": 1.0,
        "reference": 0.25,
        "other": 0.25,
    }
    shares = {"rollout": 0.6, "reward": 0.1, "optimize": 0.2, "reference": 0.05, "other": 0.05}
    none = dict.fromkeys(("vine", "sync", "eval"), 0.0)
    assert shares_of_work(row(1, **{f"time/{k}_s": v for k, v in seconds.items()})) == {
        **shares,
        **none,
    }


def test_shares_without_evaluation_add_up_to_1():
    shares = shares_of_work(row(1, **{"time/rollout_s": 3.0, "time/eval_s": 9.0}), without="eval")
    assert "eval" not in shares
    assert sum(shares.values()) == shares["rollout"] == 1.0


def test_shares_of_nothing_are_0():
    assert set(shares_of_work(row(1)).values()) == {0.0}


def test_totals_over_rounds_and_latest_device_hours(tmp_path, capsys, verbose):
    trial, callback = FakeTrial(tmp_path / "trial"), StageTimingsCallback()
    callbacks = [callback, ResultJsonCallback()]
    assert stage_totals(trial) == {}
    start(callbacks, trial)
    for round_ in (1, 2, 3):
        values = {"time/rollout_s": 2.0, "time/generator_idle_s": 0.5, "time/checkpoint_s": 0.5}
        report(callbacks, trial, row(round_, **values, **{"cost/device_hours": round_ / 10}))
    totals = stage_totals(trial)
    assert totals["rollout"] == 6.0
    assert totals["generator_idle"] == 1.5
    assert totals["device_hours"] == 0.3
    callback.on_trial_complete(iteration=0, trials=[], trial=trial)
    told = capsys.readouterr().out
    assert "rollout 6.0; between rounds: checkpoints 1.5; waiting: generator 1.5" in told


# ---- Versions, rollouts, trace -----------------------------------------------------------------


def test_version_changes_are_lines_only_when_asked_for(tmp_path, capsys, verbose):
    for on, config in ((False, {}), (True, {}), (False, {"verbose": True})):
        set_verbose(on)
        trial = FakeTrial(tmp_path / f"{on}{len(config)}", callbacks=config)
        callback = VersionLogCallback()
        start([callback], trial)
        play([RolloutsCallback()], trial, range(1, 3))
        capsys.readouterr()
        play([callback], trial, range(1, 3))
        out = capsys.readouterr().out.splitlines()
        callback.on_trial_complete(iteration=0, trials=[trial], trial=trial)
        histogram = capsys.readouterr().out
        if not (on or config):
            assert out == []
            assert histogram == ""
            continue
        assert "groups by lag at first training: 0: 2" in histogram
        told = " ".join(out[0].split()[1:])
        assert told == "sync/0 round 1 learner version 1 (weights of round 1)"
        assert "version 1 -> 2" in out[1]


@pytest.mark.parametrize(
    ("on", "config"), [(False, {}), (True, {}), (False, {"verbose": True})], ids=str
)
def test_two_responses_are_printed_after_an_evaluation_only_when_asked_for(
    tmp_path, capsys, verbose, on, config
):
    set_verbose(on)
    trial = FakeTrial(tmp_path / "trial", callbacks=config)
    start([RolloutsCallback()], trial)
    play([RolloutsCallback()], trial, range(1, 3))
    assert ("sync/0" in capsys.readouterr().out) == (on or bool(config))


def test_lags_are_those_of_first_trainings(tmp_path):
    """Round 2 trains on one of two groups a second time, and round 3 on both groups again."""
    trial, callback = FakeTrial(tmp_path / "trial"), RolloutsCallback()
    start([callback], trial)
    firsts = [[True] * 4, [False, False, True, True], [False] * 4]
    lags = [[0, 0, 0, 0], [1, 1, 2, 2], [2, 2, 3, 3]]
    for round_, first, lag in zip((1, 2, 3), firsts, lags, strict=True):
        columns = {name: 2 * values for name, values in details(round_).rollouts.items()}
        rollouts = {**columns, "cursor": [7, 7, 8, 8], "lag": lag, "first_use": first}
        report([callback], trial, detailed(round_, rollouts=rollouts))
    assert lag_histogram(trial) == {0: 2, 2: 1}


def test_how_weights_came_is_kept_with_the_version(tmp_path):
    trial, callback = FakeTrial(tmp_path / "trial"), VersionLogCallback()
    sync = Sync(transport="shm", bytes=4000, publish_s=0.25, transfer_s=0.5, load_s=1.0)
    assert sync.seconds == 1.75
    change = VersionChange(
        at=3.0, role="generator", actor="generator-1", version=5, weights_round=4, sync=sync
    )
    start([callback], trial)
    report([callback], trial, detailed(1, versions=[change]))
    assert parts(trial, "versions") == [
        {
            **{"at": 3.0, "round": 1, "side": "generator", "actor": "generator-1"},
            **{"version": 5, "weights_round": 4, "transport": "shm", "bytes": 4000},
            **{"publish_s": 0.25, "transfer_s": 0.5, "load_s": 1.0},
        }
    ]


def test_versions_and_rollouts_on_disk(tmp_path):
    trial = FakeTrial(tmp_path / "trial")
    callbacks = file_callbacks()
    start(callbacks, trial)
    play(callbacks, trial, range(1, 3))
    assert parts(trial, "versions")[1] == {
        "at": 29.0,
        "round": 2,
        "side": "learner",
        "actor": "learner",
        "version": 2,
        "weights_round": 2,
        **dict.fromkeys(("transport", "bytes", "publish_s", "transfer_s", "load_s")),
    }
    rollout = parts(trial, "rollouts")[2]
    assert (rollout["round"], rollout["prompt"], rollout["reward"]) == (2, "prompt 0", 1.0)
    assert (rollout["behaviour_log_prob"], rollout["reference_log_prob"]) == (-3.0, None)
    assert [entry["response"] for entry in parts(trial, "evaluations")] == [
        f"response {i} of 2" for i in range(3)
    ]


def test_trace_has_a_row_an_actor_and_is_whole_after_every_round(tmp_path):
    trial = FakeTrial(tmp_path / "trial")
    callbacks = file_callbacks()
    start(callbacks, trial)
    path, sizes = tmp_path / "trial" / "trace.json", []
    for round_ in (1, 2, 3):
        before = path.read_bytes() if path.exists() else b"\n]\n"
        play(callbacks, trial, range(round_, round_ + 1))
        # The file was appended to: only the closing bracket was overwritten.
        assert path.read_bytes().startswith(before[: -len(b"]\n")].strip())
        sizes.append(len(json.loads(path.read_text())))
    # four events with names (of the trial and of three rows of the trace), and five spans per round
    assert sizes == [4 + 5, 4 + 10, 4 + 15]
    events = json.loads(path.read_text())
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {1: "trial", 2: "generator-0", 3: "learner"}
    (optimize,) = [e for e in events if e["name"] == "optimize" and e["args"]["round"] == 2]
    assert (optimize["tid"], optimize["ts"], optimize["dur"]) == (3, 25e6, 4e6)
    assert {e["name"] for e in events if e["tid"] == 2 and e["ph"] == "X"} == {"waiting", "rollout"}


def test_what_other_threads_of_an_actor_do_has_a_row_of_its_own(tmp_path):
    trial, callback = FakeTrial(tmp_path / "trial"), TraceCallback()
    start([callback], trial)
    spans = [
        ActorSpan("generator", "generator-0", Span("rollout", 11.0, 15.0)),
        ActorSpan("generator", "generator-0", Span("sync", 12.0, 13.0, concurrent=True)),
    ]
    report([callback], trial, detailed(1, spans=spans))
    events = json.loads((tmp_path / "trial" / "trace.json").read_text())
    rows = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert rows == ["generator-0", "generator-0, other threads"]


# ---- TensorBoard -------------------------------------------------------------------------------


def test_tensorboard_has_every_metric_by_its_own_name(tmp_path):
    trial, callback = FakeTrial(tmp_path / "trial"), TensorBoardCallback()
    start([callback], trial)
    report([callback], trial, detailed(1))
    events = events_of(trial)
    assert set(events.Tags()["scalars"]) == NAMES
    assert set(events.Tags()["histograms"]) == {
        f"rollouts/{name}" for name in ("reward", "response_length", "lag", "ratio")
    }
    (ratio,) = events.Histograms("rollouts/ratio")
    assert ratio.histogram_value.num == 8
    assert ratio.histogram_value.sum == pytest.approx(8.0, rel=1e-3)
    layout = events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0]
    for area in (b"reward", b"KL", b"time", b"lag and versions"):
        assert area in layout


def test_layout_names_only_metrics():
    from callbacks.tensorboard import LAYOUT

    tags = {tag for charts in LAYOUT.values() for names in charts.values() for tag in names}
    assert tags <= NAMES


def test_examples_are_the_first_response_to_the_first_prompts_and_cannot_break_out():
    columns = held_out(3, count=6)
    columns["response"][0] = "<script>alert(1)</script> | a\nb"
    columns["response_index"][1] = 1
    lines = examples_table(columns).splitlines()[2:]
    assert len(lines) == 4
    assert "&lt;script&gt;" in lines[0]
    assert all(line.count("|") == 5 for line in lines)
    assert "prompt 1 " not in "".join(lines)


# ---- The console -------------------------------------------------------------------------------


def test_without_a_terminal_there_is_a_line_an_evaluation(tmp_path, capsys):
    trial, callback = FakeTrial(tmp_path / "trial"), ConsoleCallback()
    # Trials run one at a time, so Tune creates each further trial only when that trial starts.
    callback.setup(total_num_samples=6)
    start([callback], trial)
    for round_ in range(1, 6):
        evaluated = float(round_ // 2 * 2)
        values = {"eval/round": evaluated, "reward/eval_mean": 0.5, "kl/reference_nats": 1.25}
        values["time/wall_clock_s"] = 2.0 * round_
        report([callback], trial, row(round_, **values, **{"response/length_mean": 12.4}))
    callback.on_trial_complete(iteration=0, trials=[trial], trial=trial)
    lines = [line.split("  ", 1)[1] for line in capsys.readouterr().out.splitlines()]
    assert [line.split()[1] for line in lines] == ["started", *["round"] * 3, "stopped"]
    assert "round 1/8 · held-out 0.500 (round 0) · train" in lines[1]
    assert "round 4/8 · held-out 0.500 · train" in lines[3]
    assert "KL 1.25" in lines[3]
    assert "12 tokens per response" in lines[3]
    assert "8 s left" in lines[3]
    assert "started (trial 1 of 6)" in lines[0]
    assert "stopped after round 5 of 8, in " in lines[4]
    assert "(1 of 6 trials)" in lines[4]


def test_each_failure_of_a_trial_is_told_with_its_reason(tmp_path, capsys):
    trial, callback = FakeTrial(tmp_path / "trial"), ConsoleCallback()
    callback.setup(total_num_samples=1)
    trial.init_local_path()
    trial.max_failures = 2
    for number in (1, 2, 3):
        trial.num_failures = number
        with open(trial.error_file, "a") as file:
            file.write(f"Failure # {number}\nUnreadableCheckpoint: error {number}\n\n")
        again = callback.on_trial_recover if number < 3 else callback.on_trial_error
        again(iteration=0, trials=[trial], trial=trial)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("sync/0")[1].strip() for line in lines] == [
        "failed, starts again (retries left after this one: 1): UnreadableCheckpoint: error 1",
        "failed, starts again (retries left after this one: 0): UnreadableCheckpoint: error 2",
        "failed: UnreadableCheckpoint: error 3",
    ]


def test_retries_without_end_are_not_counted(tmp_path, capsys):
    trial, callback = FakeTrial(tmp_path / "trial"), ConsoleCallback()
    trial.init_local_path()
    trial.max_failures, trial.num_failures = -1, 5
    open(trial.error_file, "w").close()  # as if the disk had been full
    callback.on_trial_recover(iteration=0, trials=[trial], trial=trial)
    line = capsys.readouterr().out
    assert line.endswith("failed, starts again: its error file is empty\n")


def test_what_is_left_counts_neither_the_warm_up_nor_the_first_evaluation_again():
    """Rounds take 2 s and evaluations 3 s. The warm-up took 60 s, before the clock started."""
    config = GRPOConfig.from_dict({"rounds": 8, "eval": {"every": 3}})
    started = {"time_total_s": 65.0, "time/warm_up_s": 60.0}
    first = row(1, **started, **{"time/wall_clock_s": 2.0, "time/eval_s": 3.0})
    # Seven rounds remain, with evaluations after rounds 3, 6 and 8.
    assert seconds_left(first, config, 3.0) == 7 * 2.0 + 3 * 3.0
    assert seconds_left(row(6, **{"time/wall_clock_s": 12.0}), config, 3.0) == 2 * 2.0 + 3.0
    assert seconds_left(row(8, **{"time/wall_clock_s": 16.0}), config, 3.0) == 0.0


def test_the_latest_evaluation_stands_for_those_to_come(tmp_path, capsys):
    trial, callback = FakeTrial(tmp_path / "trial", eval={"every": 4}), ConsoleCallback()
    callback.setup(total_num_samples=1)
    for round_, eval_s in ((1, 5.0), (2, 0.0), (3, 0.0), (4, 7.0), (5, 0.0)):
        seconds = {"time/wall_clock_s": 2.0 * round_, "time/eval_s": eval_s}
        report([callback], trial, row(round_, **seconds, **{"eval/round": float(round_ // 4)}))
    lines = capsys.readouterr().out.splitlines()
    assert [line.rsplit(" · ", 1)[1] for line in lines] == ["24 s left", "15 s left"]
    (shown,) = callback._latest.values()
    assert shown["left_s"] == 13.0
    trial.status = "RUNNING"
    assert "13 s" in rendered(live_table([trial], callback._latest, 1))


def test_no_figure_is_a_negative_zero():
    kl = {"kl/reference_nats": -0.004}
    assert "KL 0.00" in progress_line(row(1, **kl), rounds=8, left_s=1.0)


def test_a_kl_that_a_sample_estimates_has_its_standard_error():
    sampled = {"kl/reference_nats": 1.25, "kl/reference_nats_se": 0.3}
    assert "KL 1.25 ± 0.30 ·" in progress_line(row(1, **sampled), rounds=8, left_s=1.0)


def test_the_speed_of_a_slow_model_is_not_zero(tmp_path):
    slow = row(1, **{"throughput/samples_per_s": 0.089})
    assert "0.089 samples/s" in progress_line(slow, rounds=8, left_s=1.0)
    trial = FakeTrial(tmp_path / "trial")
    assert " 0.089 " in rendered(live_table([trial], {trial.trial_id: slow}, 1))


def test_one_trial_is_counted_in_the_singular(tmp_path, capsys):
    trial, callback = FakeTrial(tmp_path / "trial"), ConsoleCallback()
    callback.setup(total_num_samples=1)
    callback.on_trial_complete(iteration=0, trials=[trial], trial=trial)
    assert "(1 of 1 trial)" in capsys.readouterr().out
    assert "0 of 1 trial done, 0 waiting" in rendered(live_table([trial], {}, 1))


def test_progress_line_shares_leave_the_evaluation_out():
    seconds = {"time/rollout_s": 3.0, "time/optimize_s": 1.0, "time/eval_s": 100.0}
    line = progress_line(row(2, **seconds), rounds=8, left_s=1.0)
    assert "rollout 75%" in line
    assert "optimize 25%" in line
    assert "eval" not in line


def test_a_stage_that_took_no_time_in_a_round_keeps_its_place_in_the_line():
    """The last round of an asynchronous trial trains on responses of the previous round."""
    line = progress_line(row(8, **{"time/optimize_s": 1.0}), rounds=8, left_s=0.0)
    assert "rollout 0% reward 0% optimize 100% sync 0% other 0%" in line
    assert "vine" not in line  # only some trials have this stage


@pytest.mark.parametrize(
    ("disturbed", "rounds", "kept", "told"),
    [
        (0, 8, False, ""),
        (
            2,
            8,
            False,
            " · other work disturbed 2 of 8 rounds: the trial's speed excludes disturbed rounds",
        ),
        (8, 8, False, " · other work disturbed 8 of 8 rounds: the trial's speed is not comparable"),
        (
            1,
            1,
            True,
            " · other work disturbed 1 of 1 round: the trial's speed includes disturbed rounds",
        ),
    ],
)
def test_the_end_of_a_trial_counts_its_disturbed_rounds(
    tmp_path, capsys, disturbed, rounds, kept, told
):
    own = {"callbacks": {"leave_out_disturbed": not kept}}
    trial, callback, file = (
        FakeTrial(tmp_path / "trial", **own),
        ConsoleCallback(),
        ResultJsonCallback(),
    )
    callback.setup(total_num_samples=1)
    start([file], trial)
    for n in range(1, rounds + 1):
        report([file], trial, row(n, **{"time/disturbed_fraction": 0.5 * (n <= disturbed)}))
    callback.on_trial_complete(iteration=0, trials=[trial], trial=trial)
    assert capsys.readouterr().out.rstrip("\n").endswith(f"(1 of 1 trial){told}")


def rendered(table: Any) -> str:
    from rich.console import Console

    console = Console(width=110, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table)
    return console.export_text()


def test_live_table_shows_what_runs_and_counts_the_rest(tmp_path):
    trials = [FakeTrial(tmp_path / str(n), seed=n) for n in range(30)]
    for trial in trials[:20]:
        trial.status, trial.last_result = "TERMINATED", row(8, done=True)
    trials[20].status = "ERROR"
    for trial in trials[22:]:
        trial.status = "PENDING"
    values = {"time/rollout_s": 1.0, "lag/max": 2.0, "response/length_mean": 38.9, "eval/round": 2}
    latest = {t.trial_id: row(3, **values) for t in trials[:21]}
    text = rendered(live_table(trials, latest, 40))
    assert "20 of 40 trials done, 1 failed, 18 waiting, 6 not shown" in text
    assert "sync/21" in text  # running, but without a row so far
    assert "starting" in text
    assert "failed" in text
    assert "0.000 → 0.000      39" in text
    assert "sync/22" not in text
    assert "█" * BAR_WIDTH in text


def test_a_trial_with_invalid_settings_is_shown_as_failed_under_its_name(tmp_path, capsys):
    trial, callback = FakeTrial(tmp_path / "GRPO_1a2b_00003", lag=1), ConsoleCallback()
    Path(trial.path).mkdir()
    reason = "ConfigError: lag=1: needs placement=disaggregated, got colocated"
    Path(trial.error_file).write_text(f"Failure # 1\nTraceback\n{reason}\n")
    callback.setup(total_num_samples=1)
    callback.on_trial_start(iteration=0, trials=[trial], trial=trial)
    trial.status = "ERROR"
    callback.on_trial_error(iteration=0, trials=[trial], trial=trial)
    started, failed = capsys.readouterr().out.splitlines()
    assert started.endswith("sync/0             started (trial 1 of 1)")
    assert failed.endswith(f"sync/0             failed: {reason}")
    text = rendered(live_table([trial], {}, 1))
    assert "0 of 1 trial done, 1 failed" in text
    assert "starting" not in text


def test_live_table_has_no_later_reward_before_the_first_evaluation_in_training(tmp_path):
    trial = FakeTrial(tmp_path / "trial")
    held_out = {"reward/eval_first": 0.531, "reward/eval_mean": 0.531}
    for evaluated, shown in ((0.0, "0.531 → -  "), (2.0, "0.531 → 0.531")):
        latest = {trial.trial_id: row(3, **held_out, **{"eval/round": evaluated})}
        assert shown in rendered(live_table([trial], latest, 1))


def test_live_legend_has_the_stages_that_occur(tmp_path):
    trial = FakeTrial(tmp_path / "trial")
    for vine_s, shown in ((0.0, False), (1.0, True)):
        seconds = {"time/rollout_s": 1.0, "time/vine_s": vine_s}
        text = rendered(live_table([trial], {trial.trial_id: row(3, **seconds)}, 1))
        assert "█ rollout  " in text
        assert "█ eval  " in text
        assert ("█ vine" in text) is shown


@pytest.mark.parametrize(("interrupt", "state"), [(True, "interrupted"), (False, "stopped")])
def test_a_trial_that_ended_before_its_last_round_is_not_done(
    tmp_path, monkeypatch, interrupt, state
):
    """Tune marks the trial as terminated, but does not mark its last row as done."""
    monkeypatch.setattr(save_on_interrupt, "requested", threading.Event())
    if interrupt:
        save_on_interrupt.requested.set()
    trial = FakeTrial(tmp_path / "trial")
    trial.status, trial.last_result = "TERMINATED", row(4, done=False)
    text = rendered(live_table([trial], {"trial": row(4)}, 8))
    counted = "" if interrupt else " 1 stopped,"
    assert f"0 of 8 trials done,{counted} 7 waiting" in text
    assert state in text
    assert text.count("done") == 1  # in the title


def test_a_trial_whose_last_rounds_tune_lost_is_done(tmp_path, capsys):
    """After SIGKILL, Tune knows only round 4, but the trial continues from its last checkpoint."""
    trial, callback = FakeTrial(tmp_path / "trial"), ConsoleCallback()
    trial.init_local_path()
    rows = [json.dumps(row(n)) + "\n" for n in range(1, 9)]
    Path(trial.local_path, "result.json").write_text("".join(rows))
    callback.setup(total_num_samples=2)
    trial.status, trial.last_result = "TERMINATED", row(4, done=False)
    callback.on_trial_complete(iteration=0, trials=[trial], trial=trial)
    assert "done in 0 s (1 of 2 trials)" in capsys.readouterr().out
    assert "1 of 2 trials done" in rendered(live_table([trial], callback._latest, 2))


@pytest.mark.parametrize(("age", "since"), [(-5, ""), (600, " since the trial continued")])
def test_the_time_of_a_continued_trial_is_that_of_its_last_part(tmp_path, capsys, age, since):
    trial, callback = FakeTrial(tmp_path / "trial"), ConsoleCallback()
    trial.init_local_path()
    callback.setup(total_num_samples=1)
    callback.on_trial_start(iteration=0, trials=[trial], trial=trial)
    rows = [json.dumps({**row(n), "timestamp": int(time.time()) - age}) + "\n" for n in (1, 8)]
    Path(trial.local_path, "result.json").write_text("".join(rows))
    trial.status = "TERMINATED"
    callback.on_trial_complete(iteration=0, trials=[trial], trial=trial)
    assert f" s{since} (1 of 1 trial)" in capsys.readouterr().out


def test_a_trial_that_a_scheduler_stopped_is_not_done(tmp_path, capsys):
    """If a scheduler stops a trial after a row, Tune marks this row as done."""
    trial, callback = FakeTrial(tmp_path / "trial"), ConsoleCallback()
    callback.setup(total_num_samples=2)
    trial.status, trial.last_result = "TERMINATED", row(4, done=True)
    callback.on_trial_complete(iteration=0, trials=[trial], trial=trial)
    assert "stopped after round 4 of 8, in 0 s (1 of 2 trials)" in capsys.readouterr().out
    text = rendered(live_table([trial], {"trial": row(4)}, 2))
    assert "0 of 2 trials done, 1 stopped, 1 waiting" in text


def test_a_clone_keeps_its_name(tmp_path):
    trial = FakeTrial(tmp_path / "trial", seed=1)
    trial.evaluated_params = {"arm": "sync", "seed": 1}
    trial.config = {**trial.config, "seed": 3}  # as when PBT copies another trial's settings
    assert label(trial) == "sync/1"


def test_a_trial_with_invalid_settings_is_named_by_its_arm_and_seed(tmp_path):
    invalid = {"placement": "colocated", "lag": 1}
    assert label(FakeTrial(tmp_path / "trial", seed=1, **invalid)) == "sync/1"
    trial = FakeTrial(tmp_path / "trial", set={"system": "lag=1,seed=2"}, placement="colocated")
    del trial.config["seed"]
    assert label(trial) == "sync/2"
    assert label(FakeTrial(tmp_path / "trial", seed="a")) == "trial"
    del trial.config["arm"], trial.evaluated_params["arm"]
    assert label(trial) == "trial"


@pytest.mark.slow
@given(st.lists(st.floats(0, 100), min_size=len(STAGES), max_size=len(STAGES)))
def test_bar_is_always_as_wide_as_its_column(seconds):
    from callbacks.console import _bar

    values = {f"time/{stage}_s": value for stage, value in zip(STAGES, seconds, strict=True)}
    width = len(_bar(row(1, **values)))
    assert width == (BAR_WIDTH if sum(seconds) > 0 else 0)


def test_result_json_is_appended_to(tmp_path, monkeypatch: pytest.MonkeyPatch):
    trial, callback = FakeTrial(tmp_path / "trial"), ResultJsonCallback()
    start([callback], trial)
    opened: list[Any] = []
    real: Callable[..., Any] = Path.open
    monkeypatch.setattr(Path, "open", lambda *args: opened.append(args) or real(*args))
    play([callback], trial, range(1, 4))
    assert opened == []
