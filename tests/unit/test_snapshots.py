"""Tune's snapshots of an experiment: whole or not at all, and refused where they are damaged."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import IO

import pytest
from pyarrow.fs import LocalFileSystem

from tuning import snapshots
from tuning.snapshots import bring, damage

STATE = "experiment_state-2026-11-25_18-00-00.json"


@pytest.fixture
def directories(tmp_path: Path) -> tuple[Path, Path]:
    """What Tune has on this machine, and what the storage path has from a second ago."""
    source, target = tmp_path / "staging", tmp_path / "stored"
    for directory, text in ((source, '{"round": 2}'), (target, '{"round": 1}')):
        (directory / "trial").mkdir(parents=True)
        (directory / STATE).write_text(text)
        (directory / "trial" / "params.json").write_text(text)
    return source, target


def test_a_snapshot_is_brought_with_what_is_below_it(directories: tuple[Path, Path]) -> None:
    source, target = directories
    (source / "trial" / "error.txt").write_text("no reward")
    bring(str(source), LocalFileSystem(), str(target))
    names = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
    assert names == {STATE, "trial/params.json", "trial/error.txt"}
    assert (target / STATE).read_text() == '{"round": 2}'


def test_a_full_disk_leaves_the_snapshot_before(
    directories: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy_half(source: IO[bytes], target: IO[bytes]) -> None:
        target.write(source.read()[:5])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    source, target = directories
    monkeypatch.setattr(snapshots.shutil, "copyfileobj", copy_half)
    with pytest.raises(OSError, match="No space left"):
        bring(str(source), LocalFileSystem(), str(target))
    files = {path.name: path.read_text() for path in target.rglob("*") if path.is_file()}
    assert files == {STATE: '{"round": 1}', "params.json": '{"round": 1}'}


def test_a_snapshot_that_cannot_be_read_is_named(directories: tuple[Path, Path]) -> None:
    _, target = directories
    assert damage(target) is None
    newer = target / STATE.replace("18", "19")
    newer.write_text('{"round"')
    assert damage(target) == f"{newer} is damaged or was cut short"


def test_an_experiment_without_a_snapshot_is_not_begun_anew(tmp_path: Path) -> None:
    assert damage(tmp_path) == f"there is no experiment_state-*.json in {tmp_path}"
