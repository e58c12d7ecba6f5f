"""Tune's snapshots of an experiment: whole or not at all, and refused where they are damaged."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyarrow.fs import LocalFileSystem

from grpo_trainable.atomic import replacing
from tuning import snapshots
from tuning.snapshots import bring, damaged

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
    @contextmanager
    def replacing_half(path: Path) -> Iterator[Any]:
        with replacing(path) as file:
            yield SimpleNamespace(write=lambda content: file.write(content[:5]))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    source, target = directories
    monkeypatch.setattr(snapshots, "replacing", replacing_half)
    with pytest.raises(OSError, match="No space left"):
        bring(str(source), LocalFileSystem(), str(target))
    files = {path.name: path.read_text() for path in target.rglob("*") if path.is_file()}
    assert files == {STATE: '{"round": 1}', "params.json": '{"round": 1}'}


def test_a_snapshot_that_tune_is_writing_is_brought_later(
    directories: tuple[Path, Path],
) -> None:
    source, target = directories
    (source / STATE).write_text('{"round"')
    bring(str(source), LocalFileSystem(), str(target))
    assert (target / STATE).read_text() == '{"round": 1}'
    assert (target / "trial" / "params.json").read_text() == '{"round": 2}'


def test_the_newest_snapshot_is_named_where_it_is_damaged(directories: tuple[Path, Path]) -> None:
    _, target = directories
    assert damaged(target) is None
    newer = target / STATE.replace("18", "19")
    for content in (b"", b'{"round"', b"\xff\xfe"):
        newer.write_bytes(content)
        assert damaged(target) == newer


def test_an_experiment_that_ended_before_its_first_snapshot_begins_anew(tmp_path: Path) -> None:
    assert damaged(tmp_path) is None
