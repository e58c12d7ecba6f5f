"""A trial starts from the newest checkpoint that is whole, whatever Tune has noted."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.fs
import pytest
import torch
from ray.train._internal.session import _TrainingResult
from ray.tune import Checkpoint
from trials import FakeTrial, row

from callbacks.checkpoints import CheckpointFallback
from callbacks.interruption import CheckpointOnInterrupt, requested
from callbacks.trial_files import restored_iteration
from grpo_trainable.checkpointing import MANIFEST, TrialState, part_file, write_checkpoint
from grpo_trainable.details import DETAILS

pytestmark = pytest.mark.slow  # directories of whole experiments


def saved(trial: FakeTrial, number: int, round_: int) -> Path:
    """A whole checkpoint that Tune has noted."""
    path = Path(trial.path) / f"checkpoint_{number:06d}"
    state = {"pipeline": {"learner_round": round_}}
    tensors = {"a": torch.full((64,), float(round_))}
    write_checkpoint(path, TrialState(state=state, policy=tensors, optimizer={}, groups=[]))
    note(trial, path, round_)
    return path


def note(trial: FakeTrial, path: Path, round_: int) -> None:
    checkpoint = Checkpoint(path=str(path), filesystem=pyarrow.fs.LocalFileSystem())
    result = _TrainingResult(checkpoint=checkpoint, metrics={"training_iteration": round_})
    trial.run_metadata.checkpoint_manager.register_checkpoint(result)


@pytest.fixture
def trial(tmp_path: Path) -> FakeTrial:
    """Twelve rounds, checkpoints after rounds 4, 8 and 12."""
    trial = FakeTrial(tmp_path / "trial")
    trial.init_local_path()
    rows = "".join(json.dumps(row(n, time_total_s=2.0 * n)) + "\n" for n in range(1, 13))
    (tmp_path / "trial" / "result.json").write_text(rows)
    for number, round_ in enumerate((4, 8, 12)):
        saved(trial, number, round_)
    return trial


def start(trial: FakeTrial) -> None:
    CheckpointFallback().on_trial_start(iteration=0, trials=[trial], trial=trial)


def truncate(path: Path) -> None:
    file = path / part_file("policy")
    file.write_bytes(file.read_bytes()[:-1])


def flip(path: Path) -> None:
    file = path / part_file("optimizer")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


DAMAGES: list[Callable[[Path], Any]] = [
    truncate,
    flip,
    lambda path: (path / MANIFEST).unlink(),
    lambda path: (path / MANIFEST).write_text("{"),
    lambda path: (path / ".nfs0001").write_text("a file of somebody else"),
    shutil.rmtree,
]


def test_whole_checkpoint_is_left_alone_and_nothing_is_said(trial, capsys):
    noted = trial.latest_checkpoint_result
    start(trial)
    assert trial.latest_checkpoint_result is noted
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_one_gives_way_to_the_newest_whole_one(trial, damage, capsys):
    damage(Path(trial.path) / "checkpoint_000002")
    start(trial)
    result = trial.latest_checkpoint_result
    assert result.checkpoint.path.endswith("checkpoint_000001")
    # Tune counts on from the row of that round.
    assert result.metrics["time_total_s"] == 16.0
    assert restored_iteration(trial) == 8
    (line,) = capsys.readouterr().out.splitlines()
    assert "checkpoint_000002" in line
    assert "going on from checkpoint_000001 (round 8)" in line
    start(trial)
    assert capsys.readouterr().out == ""


def test_the_newest_by_rounds_is_taken_even_if_tune_had_not_noted_it(trial, capsys):
    manager = trial.run_metadata.checkpoint_manager
    older = manager._checkpoint_results[0]
    truncate(Path(older.checkpoint.path))
    manager._checkpoint_results = [older]
    manager._latest_checkpoint_result = older
    start(trial)
    assert restored_iteration(trial) == 12
    assert [r.metrics["training_iteration"] for r in manager._checkpoint_results] == [12]


@pytest.mark.parametrize(("torn", "round_"), [((), 12), ((2,), 8), ((1, 2), 4)])
def test_a_newer_one_that_tunes_last_snapshot_lacks_is_taken(trial, capsys, torn, round_):
    manager = trial.run_metadata.checkpoint_manager
    manager._checkpoint_results = [noted := manager._checkpoint_results[0]]
    manager._latest_checkpoint_result = noted
    for number in torn:
        truncate(Path(trial.path) / f"checkpoint_{number:06d}")
    start(trial)
    assert restored_iteration(trial) == round_
    said = capsys.readouterr().out
    assert ("checkpoint_000000 is not the newest; going on from" in said) == (round_ > 4)


def test_rows_that_are_gone_do_not_keep_it_from_a_whole_one(trial):
    truncate(Path(trial.path) / "checkpoint_000002")
    (Path(trial.path) / "result.json").write_text('"no object"\n')
    start(trial)
    assert restored_iteration(trial) == 8
    truncate(Path(trial.path) / "checkpoint_000001")
    (Path(trial.path) / "result.json").unlink()
    start(trial)
    assert restored_iteration(trial) == 4


def test_foreign_directory_does_not_keep_it_from_a_whole_one(trial):
    truncate(Path(trial.path) / "checkpoint_000002")
    foreign = Path(trial.path) / "checkpoint_000003"
    write_checkpoint(
        foreign, TrialState(state={"pipeline": {}}, policy={}, optimizer={}, groups=[])
    )
    start(trial)
    assert restored_iteration(trial) == 8


def test_clone_of_pbt_keeps_no_details_of_its_donor(trial):
    trial.latest_checkpoint_result.metrics[DETAILS] = "bulk"
    start(trial)
    assert DETAILS not in trial.latest_checkpoint_result.metrics


def test_last_checkpoint_that_was_not_written_is_told_at_the_end(trial, tmp_path, capsys):
    callback, other = CheckpointFallback(), FakeTrial(tmp_path / "other", arm="async_k1")
    for written in (True, False):
        for one in (trial, other):
            hooks = {"iteration": 1, "trials": [trial, other], "trial": one}
            if written or one is other:
                callback.on_checkpoint(checkpoint=None, **hooks)
            callback.on_trial_save(**hooks)
    callback.on_experiment_end(trials=[trial, other])
    (line,) = capsys.readouterr().out.splitlines()
    assert line == "sync/0: its last checkpoint could not be written; the one before stays"


def test_interrupt_ends_the_experiment_once_every_trial_that_runs_has_a_checkpoint(trial, tmp_path):
    starting = FakeTrial(tmp_path / "starting")
    trial.last_result = row(12)
    callback, ended = CheckpointOnInterrupt(), []
    before = signal.signal(signal.SIGUSR1, lambda *_: ended.append(True))
    hooks = {"iteration": 1, "trials": [trial, starting]}
    try:
        requested.set()
        result = row(12)
        callback.on_trial_result(trial=trial, result=result, **hooks)
        assert result["should_checkpoint"]
        # It could not be written: another is tried with the next row.
        callback.on_trial_save(trial=trial, **hooks)
        callback.on_step_end(**hooks)
        assert not ended
        callback.on_checkpoint(trial=trial, checkpoint=None, **hooks)
        callback.on_step_end(**hooks)
        assert ended == [True]
    finally:
        requested.clear()
        signal.signal(signal.SIGUSR1, before)


def test_without_a_whole_one_the_trial_starts_anew(trial, capsys):
    for path in Path(trial.path).glob("checkpoint_*"):
        truncate(path)
    start(trial)
    assert trial.latest_checkpoint_result is None
    assert restored_iteration(trial) == 0
    assert "no whole one is left, starting anew" in capsys.readouterr().out


def test_tune_neither_offers_nor_removes_what_the_trial_has_removed(trial):
    manager = trial.run_metadata.checkpoint_manager
    manager._checkpoint_config.num_to_keep = 2
    for number in (0, 1):
        shutil.rmtree(Path(trial.path) / f"checkpoint_{number:06d}")
    callback = CheckpointFallback()
    callback.on_checkpoint(iteration=1, trials=[trial], trial=trial, checkpoint=None)
    saved(trial, 3, 16)
    rounds = [r.metrics["training_iteration"] for r in manager.best_checkpoint_results]
    assert rounds == [12, 16]


def test_checkpoint_of_another_trial_stays_where_tune_put_it(trial, tmp_path, capsys):
    # As when population based training lets a trial continue from a better one's.
    donor = FakeTrial(tmp_path / "donor")
    note(trial, saved(donor, 7, 6), 6)
    start(trial)
    assert restored_iteration(trial) == 6
    assert capsys.readouterr().out == ""


def test_new_trial_has_nothing_to_choose(tmp_path, capsys):
    trial = FakeTrial(tmp_path / "new")
    trial.init_local_path()
    start(trial)
    assert trial.latest_checkpoint_result is None
    assert capsys.readouterr().out == ""
