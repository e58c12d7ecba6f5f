"""A trial starts from the newest checkpoint that is whole, whatever Tune has noted."""

from __future__ import annotations

import json
import shutil
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
from callbacks.trial_files import restored_iteration
from grpo_trainable.checkpointing import MANIFEST, TrialState, part_file, write_checkpoint


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


def test_without_a_whole_one_the_trial_starts_anew(trial, capsys):
    for path in Path(trial.path).glob("checkpoint_*"):
        truncate(path)
    start(trial)
    assert trial.latest_checkpoint_result is None
    assert restored_iteration(trial) == 0
    assert "no whole one is left, starting anew" in capsys.readouterr().out


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
