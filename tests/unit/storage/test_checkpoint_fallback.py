"""A trial continues from the newest complete checkpoint, whatever Tune has recorded."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyarrow.fs import LocalFileSystem
from trials import FakeTrial, Restored, contents, note, row, saved

from callbacks.checkpoints import CheckpointCallback
from grpo_trainable.storage.checkpointing import (
    MANIFEST,
    CheckpointError,
    checkpoint_round,
    newest_round,
    part_file,
)
from grpo_trainable.storage.trial_storage import TrialStorage, checkpoint_at

pytestmark = pytest.mark.slow  # these tests write whole experiment directories


@pytest.fixture
def trial(tmp_path: Path) -> FakeTrial:
    """Return a trial of twelve rounds with checkpoints after rounds 4, 8 and 12."""
    trial = FakeTrial(tmp_path / "trial")
    trial.init_local_path()
    rows = "".join(json.dumps(row(n)) + "\n" for n in range(1, 13))
    (tmp_path / "trial" / "result.json").write_text(rows)
    for number, round_ in enumerate((4, 8, 12)):
        saved(trial, number, round_)
    return trial


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


def test_whole_checkpoint_is_restored_and_nothing_is_said(trial):
    restored = Restored(trial)
    assert (restored.round, restored.notes) == (12, [])


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_one_gives_way_to_the_newest_whole_one(trial, damage):
    damage(Path(trial.path) / "checkpoint_000002")
    restored = Restored(trial)
    assert restored.round == 8
    (note,) = restored.notes
    assert note.startswith("checkpoint_000002")
    assert note.endswith("; continuing from checkpoint_000001 (round 8)")


def test_the_newest_is_taken_even_if_tune_had_not_noted_it(trial):
    manager = trial.run_metadata.checkpoint_manager
    older = manager._checkpoint_results[0]
    truncate(Path(older.checkpoint.path))
    manager._latest_checkpoint_result = older
    assert Restored(trial).round == 12
    manager._latest_checkpoint_result = None
    restored = Restored(trial)
    assert restored.round == 12
    assert restored.notes == ["continuing from checkpoint_000002 (round 12)"]


@pytest.mark.parametrize(("torn", "round_"), [((), 12), ((2,), 8), ((1, 2), 4)])
def test_a_newer_one_that_tunes_last_snapshot_lacks_is_taken(trial, torn, round_):
    manager = trial.run_metadata.checkpoint_manager
    manager._latest_checkpoint_result = manager._checkpoint_results[0]
    for number in torn:
        truncate(Path(trial.path) / f"checkpoint_{number:06d}")
    restored = Restored(trial)
    assert restored.round == round_
    said = "".join(restored.notes)
    assert said.startswith("continuing from checkpoint_000002") == (torn == ())


def test_foreign_directory_does_not_keep_it_from_a_whole_one(trial):
    truncate(Path(trial.path) / "checkpoint_000002")
    foreign = Path(trial.path) / "checkpoint_000003"
    foreign.mkdir()
    (foreign / "dict_checkpoint.pkl").write_bytes(b"somebody else's")
    assert Restored(trial).round == 8


@pytest.mark.parametrize("how", ["file", "link"])
def test_what_is_none_of_ours_beside_whole_files_is_no_damage(trial, how):
    """Check that nothing is set aside, and that the error names the file or link."""
    directory = Path(trial.path)
    for number in (0, 1):
        shutil.rmtree(directory / f"checkpoint_{number:06d}")
    newest = directory / "checkpoint_000002"
    if how == "file":
        (newest / ".DS_Store").touch()
    else:
        (newest / MANIFEST).rename(directory.parent / "elsewhere")
        (newest / MANIFEST).symlink_to(directory.parent / "elsewhere")
    before = contents(directory)
    with pytest.raises(
        CheckpointError, match=r"checkpoint_000002/.*no other checkpoint can be used"
    ):
        Restored(trial)
    assert contents(directory) == before


def test_without_a_whole_one_all_that_was_written_is_set_aside(trial):
    directory = Path(trial.path)
    for path in directory.glob("checkpoint_*"):
        truncate(path)
    (directory / "params.json").write_text("{}")
    before = contents(directory)
    restored = Restored(trial)
    assert restored.round == 0
    (note,) = restored.notes
    assert note.endswith("the trial's earlier files are in set-aside-1; starting from round 0")
    del before["params.json"]  # not set aside, because Tune writes it only once
    assert contents(directory / "set-aside-1") == before
    assert sorted(os.listdir(directory)) == ["params.json", "set-aside-1"]


@pytest.mark.parametrize("version", [2, 3, 4, 99])
def test_another_format_is_refused_by_name_and_not_taken_for_damage(trial, version):
    path = Path(trial.path) / "checkpoint_000002" / MANIFEST
    path.write_text(path.read_text().replace('"format_version": 5', f'"format_version": {version}'))
    with pytest.raises(
        CheckpointError, match=f"format version {version}, but this program reads version 5$"
    ):
        Restored(trial)


def test_checkpoint_of_another_trial_is_restored_from_where_it_is(trial, tmp_path):
    # Population based training lets a trial continue from the checkpoint of a better trial.
    donor = FakeTrial(tmp_path / "donor")
    note(trial, saved(donor, 7, 6), 6)
    restored = Restored(trial)
    assert (restored.round, restored.notes) == (6, [])


@pytest.fixture
def clone(trial: FakeTrial, tmp_path: Path) -> FakeTrial:
    """Return the trial after PBT has let it continue from round 6 of a donor.

    Tune's last snapshot of the experiment is from that time.
    """
    note(trial, saved(FakeTrial(tmp_path / "donor"), 7, 6), 6)
    return trial


def save_since(clone: FakeTrial, origin: str, config: dict[str, Any]) -> Path:
    """Write a checkpoint of round 9 that Tune does not know of."""
    noted = clone.latest_checkpoint_result
    path = saved(clone, 3, 9, origin=origin, config=config)
    clone.run_metadata.checkpoint_manager._latest_checkpoint_result = noted
    return path


def test_a_clone_that_has_saved_since_goes_on_from_its_own_checkpoint(clone):
    path = save_since(clone, "donor/checkpoint_000007", clone.config)
    restored = Restored(clone)
    assert restored.round == 9
    assert restored.notes == ["continuing from checkpoint_000003 (round 9)"]

    truncate(path)
    restored = Restored(clone)
    assert restored.round == 6
    (said,) = restored.notes
    assert said.startswith("checkpoint_000003")
    assert said.endswith("continuing from checkpoint_000007 (round 6)")


@pytest.mark.parametrize(
    ("origin", "change"),
    [
        (None, {}),
        ("donor/checkpoint_000005", {}),
        # PBT has chosen the same checkpoint once more, with different settings.
        ("donor/checkpoint_000007", {"k": 2}),
    ],
)
def test_a_clones_checkpoint_that_follows_another_one_gives_way_to_the_donors(
    clone, origin, change
):
    save_since(clone, origin, {**clone.config, **change})
    restored = Restored(clone)
    assert (restored.round, restored.notes) == (6, [])


@pytest.mark.parametrize("noted", ["older", "removed", None])
def test_a_copy_that_tunes_last_snapshot_lacks_is_not_continued_with_older_settings(trial, noted):
    """Check that the checkpoints since the copy are set aside, not lost.

    They count neither towards `checkpoint.keep` nor as the trial's newest ones.
    """
    manager, directory = trial.run_metadata.checkpoint_manager, Path(trial.path)
    before = None if noted is None else manager._checkpoint_results[0]
    # After round 12, PBT let the trial copy a donor, and the trial saved rounds 13 and 14.
    copied = {**trial.config, "seed": 3}
    for number, round_ in ((3, 13), (4, 14)):
        path = saved(trial, number, round_, origin="donor/checkpoint_000007", config=copied)
    if noted == "removed":  # by `checkpoint.keep`
        shutil.rmtree(directory / "checkpoint_000000")
    manager._latest_checkpoint_result = before
    trial.config = copied
    assert Restored(trial).round == 14  # the settings of the copy

    trial.config = {**copied, "seed": 0}
    restored = Restored(trial)
    assert restored.round == 12
    (said,) = restored.notes
    assert said.removeprefix("checkpoint_000000: does not exist; ") == (
        "continuing from checkpoint_000002 (round 12); now in set-aside-1, because Tune does not "
        "know of the copy that they follow: checkpoint_000003, checkpoint_000004"
    )
    assert said.startswith("checkpoint_000000") == (noted == "removed")
    assert newest_round(directory) == 12
    aside = directory / "set-aside-1"
    assert [checkpoint_round(aside / f"checkpoint_{n:06d}") for n in (3, 4)] == [13, 14]
    # Without an older checkpoint, the newest one is better than none.
    for number in (0, 1, 2):
        shutil.rmtree(directory / f"checkpoint_{number:06d}", ignore_errors=True)
    (aside / path.name).rename(path)
    assert Restored(trial).round == 14
    assert path.exists()


def test_a_second_copy_that_tune_does_not_know_is_set_aside_too(clone):
    noted = clone.latest_checkpoint_result
    save_since(clone, "donor/checkpoint_000007", clone.config)
    saved(clone, 4, 13, origin="donor/checkpoint_000009", config={**clone.config, "seed": 3})
    clone.run_metadata.checkpoint_manager._latest_checkpoint_result = noted
    restored = Restored(clone)
    assert restored.round == newest_round(Path(clone.path)) == 9
    assert restored.notes[0].endswith("of the copy that they follow: checkpoint_000004")


def test_rows_of_an_unknown_copy_of_an_earlier_round_are_not_skipped(trial):
    """The trial was at round 12 when it copied a donor at round 8, and row 9 replaced 9 to 12."""
    copied = {**trial.config, "seed": 3}
    saved(trial, 3, 9, origin="donor/checkpoint_000007", config=copied)
    rows = "".join(json.dumps(row(n)) + "\n" for n in range(1, 10))
    (Path(trial.path) / "result.json").write_text(rows)
    trial.run_metadata.checkpoint_manager._latest_checkpoint_result = None
    assert Restored(trial).round == 8


def test_donors_checkpoint_is_found_in_a_moved_experiment(clone, tmp_path):
    new = tmp_path / "elsewhere"
    new.mkdir()
    for name in ("trial", "donor"):
        (tmp_path / name).rename(new / name)
    clone.path = str(new / "trial")
    restored = Restored(clone)
    assert restored.round == 6
    assert restored.notes == []


def test_a_trial_notes_the_checkpoint_of_another_trial_that_it_follows(tmp_path):
    context: Any = SimpleNamespace(
        storage_filesystem=LocalFileSystem(), trial_fs_path=str(tmp_path / "clone")
    )
    storage = TrialStorage(context, keep=None)
    assert storage.follow(checkpoint_at(tmp_path / "clone" / "checkpoint_000000")) is None
    assert storage.origin is None
    assert storage.follow(checkpoint_at(tmp_path / "donor" / "checkpoint_000007")) == "donor"
    assert storage.follow(checkpoint_at(tmp_path / "clone" / "checkpoint_000001")) is None
    assert storage.origin == "donor/checkpoint_000007"


def test_trial_that_starts_again_without_a_checkpoint_says_what_it_repeats(trial):
    for path in Path(trial.path).glob("checkpoint_*"):
        shutil.rmtree(path)
    trial.run_metadata.checkpoint_manager._latest_checkpoint_result = None
    restored = Restored(trial)
    assert restored.round == 0
    assert restored.notes == [
        "the trial stopped after round 12, and no checkpoint was saved; starting from round 0"
    ]


def test_new_trial_has_nothing_to_choose(tmp_path):
    trial = FakeTrial(tmp_path / "new")
    restored = Restored(trial)
    assert (restored.round, restored.notes) == (0, [])


# ---- The callback ------------------------------------------------------------------------------


def test_last_checkpoint_that_was_not_written_is_told_at_the_end(trial, tmp_path, capsys):
    callback, other = CheckpointCallback(), FakeTrial(tmp_path / "other", arm="async_k1")
    for written in (True, False):
        for one in (trial, other):
            hooks = {"iteration": 1, "trials": [trial, other], "trial": one}
            if written or one is other:
                callback.on_checkpoint(checkpoint=None, **hooks)
            callback.on_trial_save(**hooks)
    callback.on_experiment_end(trials=[trial, other])
    (line,) = capsys.readouterr().out.splitlines()
    assert line == "sync/0: its last checkpoint could not be written; the previous one remains"


def test_tune_neither_offers_nor_removes_what_the_trial_has_removed(trial):
    manager = trial.run_metadata.checkpoint_manager
    manager._checkpoint_config.num_to_keep = 2
    for number in (0, 1):
        shutil.rmtree(Path(trial.path) / f"checkpoint_{number:06d}")
    callback = CheckpointCallback()
    callback.on_checkpoint(iteration=1, trials=[trial], trial=trial, checkpoint=None)
    saved(trial, 3, 16)
    rounds = [r.metrics["training_iteration"] for r in manager.best_checkpoint_results]
    assert rounds == [12, 16]
