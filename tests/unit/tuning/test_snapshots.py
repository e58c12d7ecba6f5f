"""Tune's snapshots of an experiment are complete or absent, and damaged snapshots are rejected."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyarrow.fs import FileSystem, LocalFileSystem, SubTreeFileSystem
from ray.train._internal.storage import StorageContext
from ray.tune import ResumeConfig
from ray.tune.execution.tune_controller import TuneController

from grpo_trainable.storage.atomic import replacing
from tuning import snapshots
from tuning.snapshots import StateUnreadable, bring, refuse_to_begin_anew

STATE = "experiment_state-2026-11-25_18-00-00.json"


@pytest.fixture
def directories(tmp_path: Path) -> tuple[Path, Path]:
    """Return Tune's local directory, and the storage directory with an earlier state."""
    source, target = tmp_path / "staging", tmp_path / "stored"
    for directory, text in ((source, '{"round": 2}'), (target, '{"round": 1}')):
        (directory / "trial").mkdir(parents=True)
        (directory / STATE).write_text(text)
        (directory / "trial" / "params.json").write_text(text)
    return source, target


Bring = Callable[[], None]


@pytest.fixture(params=["disk", "store"])
def brings(request: pytest.FixtureRequest, directories: tuple[Path, Path]) -> Bring:
    source, target = directories
    fs: FileSystem = LocalFileSystem()
    path = str(target)
    if request.param == "store":
        fs, path = SubTreeFileSystem(str(target.parent), fs), target.name
    return lambda: bring(str(source), fs, path)


def test_a_snapshot_is_brought_with_what_is_below_it(
    directories: tuple[Path, Path], brings: Bring
) -> None:
    source, target = directories
    (source / "trial" / "error.txt").write_text("no reward")
    brings()
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


@pytest.mark.parametrize("half", ['{"round"', ""])
def test_a_snapshot_that_tune_is_writing_is_brought_later(
    directories: tuple[Path, Path], brings: Bring, half: str
) -> None:
    source, target = directories
    (source / STATE).write_text(half)
    brings()
    assert (target / STATE).read_text() == '{"round": 1}'
    assert (target / "trial" / "params.json").read_text() == '{"round": 2}'
    (source / STATE).write_text('{"round": 2}')
    brings()
    assert (target / STATE).read_text() == '{"round": 2}'


def test_only_what_has_changed_is_brought_again(
    directories: tuple[Path, Path], brings: Bring
) -> None:
    source, target = directories
    brings()
    for path in (target / STATE, target / "trial" / "params.json"):
        path.write_text("of somebody else")
    (source / STATE).write_text('{"round": 30}')
    brings()
    assert (target / STATE).read_text() == '{"round": 30}'
    assert (target / "trial" / "params.json").read_text() == "of somebody else"


# ---- Unreadable states -------------------------------------------------------------------------


@pytest.fixture
def resume(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that resumes an experiment, as Tune's controller does in its first step."""
    # monkeypatch restores this afterwards
    monkeypatch.setattr(TuneController, "resume", TuneController.resume)
    refuse_to_begin_anew()

    def resume(directory: Path) -> None:
        controller: Any = SimpleNamespace(
            _storage=StorageContext(str(directory.parent), directory.name)
        )
        TuneController.resume(controller, resume_config=ResumeConfig())

    return resume


@pytest.mark.parametrize("content", [b"", b'{"round"', b"\xff\xfe", b"{}"])
def test_a_damaged_state_does_not_begin_all_trials_anew(
    tmp_path: Path, resume: Any, content: bytes
) -> None:
    (tmp_path / STATE).write_bytes(content)
    with pytest.raises(StateUnreadable):
        resume(tmp_path)


def test_a_state_that_a_disk_does_not_give_does_not_either(
    tmp_path: Path, resume: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any, **options: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(snapshots, "_tunes_resume", fails)
    with pytest.raises(StateUnreadable, match=r"^Input/output error$"):
        resume(tmp_path)


def test_an_experiment_that_ended_before_its_first_snapshot_begins_anew(
    tmp_path: Path, resume: Any
) -> None:
    with pytest.raises(ValueError, match="no experiment state file"):  # Tune catches this error
        resume(tmp_path)
