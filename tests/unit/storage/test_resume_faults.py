"""If a file operation fails in a resume, no byte is lost, on a disk or in an object store."""

from __future__ import annotations

import builtins
import errno
import io
import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import pytest
from ray.tune import Callback
from trials import FakeTrial, Restored, contents, detailed, note, saved

from callbacks import grpo_callbacks
from callbacks import mirror as mirror_module
from grpo_trainable.storage.checkpointing import UnreadableCheckpoint, part_file

pytestmark = pytest.mark.slow  # these tests write whole experiment directories

NUMBERS = (errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENOSPC)


class Faults:
    """A counter of operations that makes one of them fail."""

    def __init__(self, fails_at: int = 0, number: int = errno.EIO) -> None:
        self.fails_at, self.number = fails_at, number
        # Place in the code -> number of the first operation at this place.
        self.places: dict[tuple[Any, ...], int] = {}
        self._count = itertools.count(1)  # safe to use from the threads that copy to a store

    def operation(self, path: object) -> None:
        operation = next(self._count)
        self.places.setdefault(place_in_code(), operation)
        if operation == self.fails_at:
            raise OSError(self.number, os.strerror(self.number), str(path))

    def each(self) -> Iterator[Faults]:
        """Yield, for each place in the code, faults that make the first operation there fail."""
        assert len(self.places) > 20
        for operation, number in zip(self.places.values(), itertools.cycle(NUMBERS)):
            yield Faults(operation, number)


def place_in_code() -> tuple[Any, ...]:
    """Return the current line of each function on the stack."""
    frame, lines = sys._getframe(2), []
    while frame is not None:
        lines.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(lines)


class FailingFile:
    """An open file whose reads and writes count as operations."""

    def __init__(self, file: Any, faults: Faults) -> None:
        self._file, self._faults = file, faults

    def __getattr__(self, name: str) -> Any:
        if name in ("read", "readinto", "readline", "write", "truncate"):
            self._faults.operation(getattr(self._file, "name", "a file"))
        return getattr(self._file, name)

    def __enter__(self) -> FailingFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[Any]:
        while line := self.readline():
            yield line


class FailingDisk:
    """A disk whose operations on files below a local directory count as operations of `faults`."""

    NAMES = (
        *((os, name) for name in ("open", "listdir", "scandir", "stat", "rename", "replace")),
        *((os, name) for name in ("unlink", "truncate", "mkdir")),
        (builtins, "open"),
        (io, "open"),
    )

    def __init__(self, directory: Path, faults: Faults) -> None:
        self._directory, self._faults = str(directory), faults
        self._descriptors: set[int] = set()

    @contextmanager
    def installed(self, patch: pytest.MonkeyPatch) -> Iterator[None]:
        with patch.context() as within:
            for owner, name in self.NAMES:
                operation = getattr(owner, name)
                within.setattr(owner, name, self._failing(operation, owner is not os))
            yield

    def _failing(self, operation: Callable[..., Any], gives_files: bool) -> Callable[..., Any]:
        def run(path: Any, *args: Any, **options: Any) -> Any:
            is_open = gives_files and path in self._descriptors
            if not is_open and not str(path).startswith(self._directory):
                return operation(path, *args, **options)
            if is_open:
                self._descriptors.remove(path)
            else:
                self._faults.operation(path)
            found = operation(path, *args, **options)
            if operation is real_open:
                self._descriptors.add(found)
            return FailingFile(found, self._faults) if gives_files else found

        return run


real_open = os.open


class FailingStore(pafs.FileSystemHandler):
    """A store in a local directory. Each request and each piece of a file is an operation."""

    def __init__(self, bucket: Path, faults: Faults) -> None:
        self._files = pafs.SubTreeFileSystem(str(bucket), pafs.LocalFileSystem())
        self._faults = faults

    def _asked(self, path: str) -> pafs.FileSystem:
        self._faults.operation(path)
        return self._files

    def _make_parent(self, path: str) -> None:
        """Create the directory of a file, because a store has no directories."""
        self._files.create_dir(path.rpartition("/")[0])

    def get_type_name(self) -> str:
        return "failing"

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: list[str]) -> list[pafs.FileInfo]:
        return self._asked(paths[0]).get_file_info(paths)

    def get_file_info_selector(self, selector: pafs.FileSelector) -> list[pafs.FileInfo]:
        return self._asked(selector.base_dir).get_file_info(selector)

    def create_dir(self, path: str, recursive: bool) -> None:
        self._asked(path).create_dir(path, recursive=recursive)

    def delete_dir(self, path: str) -> None:
        self._asked(path).delete_dir(path)

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        self._asked(path).delete_dir_contents(path, missing_dir_ok=missing_dir_ok)

    def delete_root_dir_contents(self) -> None:
        raise NotImplementedError

    def delete_file(self, path: str) -> None:
        self._asked(path).delete_file(path)

    def move(self, src: str, dest: str) -> None:
        self._asked(src).move(src, dest)

    def copy_file(self, src: str, dest: str) -> None:
        self._make_parent(dest)
        self._asked(src).copy_file(src, dest)

    def open_input_file(self, path: str) -> pa.PythonFile:
        with self._asked(path).open_input_stream(path) as file:
            content = io.BytesIO(file.read())
        return pa.PythonFile(FailingFile(content, self._faults), mode="r")

    open_input_stream = open_input_file

    def open_output_stream(self, path: str, metadata: dict[str, str]) -> pa.PythonFile:
        self._make_parent(path)
        return pa.PythonFile(WholeFile(self._asked(path), path, self._faults), mode="w")

    def open_append_stream(self, path: str, metadata: dict[str, str]) -> pa.PythonFile:
        raise NotImplementedError


class WholeFile(io.BytesIO):
    """A store's file, which appears when it is closed, and only if nothing failed."""

    def __init__(self, files: pafs.FileSystem, path: str, faults: Faults) -> None:
        super().__init__()
        self._files, self._path, self._faults = files, path, faults
        self._failed = False

    def write(self, content: Any) -> int:
        self._failed = True
        self._faults.operation(self._path)
        self._failed = False
        return super().write(content)

    def close(self) -> None:
        if not self.closed and not self._failed:
            with self._files.open_output_stream(self._path) as file:
                file.write(self.getvalue())
        super().close()


def in_store(directory: Path, bucket: Path, faults: Faults) -> FakeTrial:
    """Return a trial whose files are in the directory `trial` of a store."""
    trial = FakeTrial(directory / "session" / "trial")
    trial.path = "trial"
    files = pafs.PyFileSystem(FailingStore(bucket, faults))
    trial.storage = SimpleNamespace(storage_filesystem=files)
    return trial


# ---- Resumed trials ----------------------------------------------------------------------------


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """Write three rounds with every callback file, and checkpoints after rounds 1 and 2."""
    trial = FakeTrial(tmp_path / "written")
    run(trial, callbacks(), range(1, 4))
    for number, round_ in enumerate((1, 2)):
        saved(trial, number, round_)
    return tmp_path / "written"


def callbacks() -> list[Callback]:
    return grpo_callbacks(console=False)


def run(trial: FakeTrial, hooks: list[Callback], rounds: range) -> None:
    for hook in hooks:
        hook.on_trial_start(iteration=0, trials=[trial], trial=trial)
    for round_ in rounds:
        result = detailed(round_)
        for hook in hooks:
            hook.on_trial_result(iteration=round_, trials=[trial], trial=trial, result=result)


def resume(trial: FakeTrial, last: int = 4) -> None:
    """Restore the trial, then train up to round `last`, as a resumed command does."""
    restored = Restored(trial)
    run(trial, hooks := callbacks(), range(restored.round + 1, last + 1))
    for hook in hooks:
        hook.on_trial_complete(iteration=last, trials=[trial], trial=trial)
    for hook in hooks:
        hook.on_experiment_end(trials=[trial])


def rounds_in(directory: Path) -> dict[str, list[int]]:
    """Return the rounds in each kind of file."""
    lines = (directory / "result.json").read_text().splitlines()
    trace = json.loads((directory / "trace.json").read_text())
    kinds = ("rollouts", "steps", "versions")
    return {
        "rows": [json.loads(line)["training_iteration"] for line in lines],
        "csv": list(range(1, len((directory / "progress.csv").read_text().splitlines()))),
        "trace": [e["args"]["round"] for e in trace if e["name"] == "rollout"],
        **{kind: sorted(int(p.stem[5:]) for p in (directory / kind).iterdir()) for kind in kinds},
    }


def refuses(trial: FakeTrial) -> bool:
    """Resume, and return True if the resume is refused."""
    try:
        resume(trial)
    except UnreadableCheckpoint as error:
        said = str(error)
    else:
        return False
    assert "nothing is lost: try again with --resume" in said
    return True


def assert_whole(directory: Path, before: dict[str, bytes]) -> None:
    """Check that every round is there exactly once and that the checkpoints are unchanged."""
    assert set(map(tuple, rounds_in(directory).values())) == {(1, 2, 3, 4)}
    kept = {name for name in before if name.startswith("checkpoint")}
    after = contents(directory)
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}


@pytest.mark.parametrize("noted", [True, False])
def test_a_disk_that_fails_once_in_a_resume(written, tmp_path, monkeypatch, noted):
    """An attempt with a fault succeeds, or it is refused and changes no file.

    The next attempt succeeds.
    """
    before, refused = contents(written), []

    def resume_with(faults: Faults) -> None:
        directory = tmp_path / "try" / "trial"
        shutil.copytree(written, directory)
        trial = FakeTrial(directory)
        if noted:
            note(trial, directory / "checkpoint_000001", 2)
        with FailingDisk(directory, faults).installed(monkeypatch):
            was_refused = refuses(trial)
        if was_refused:
            refused.append(faults.fails_at)
            assert contents(directory) == before
            resume(trial)
        assert_whole(directory, before)
        shutil.rmtree(directory.parent)

    resume_with(none := Faults())
    assert not refused
    for faults in none.each():
        resume_with(faults)
    assert len(refused) > 5


@pytest.mark.parametrize("same_machine", [True, False])
def test_a_store_that_fails_once_in_a_resume(written, tmp_path, monkeypatch, same_machine):
    monkeypatch.setattr(mirror_module, "PASS_S", 0.001)
    before, refused = contents(written), []

    def resume_with(faults: Faults) -> None:
        bucket, machine = tmp_path / "bucket", tmp_path / "machine"
        shutil.copytree(written, bucket / "trial")
        if same_machine:
            local = machine / "session-mirrored" / "trial"
            shutil.copytree(written, local, ignore=shutil.ignore_patterns("checkpoint_*"))
        trial = in_store(machine, bucket, faults)
        if refuses(trial):
            refused.append(faults.fails_at)
            assert contents(bucket / "trial") == before
            resume(trial)
        assert_whole(bucket / "trial", before)
        shutil.rmtree(bucket)
        shutil.rmtree(machine)

    resume_with(none := Faults())
    assert not refused
    for faults in none.each():
        resume_with(faults)
    assert len(refused) > 5


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("where", ["disk", "store"])
def test_setting_aside_that_fails_in_the_middle_loses_nothing(
    written, tmp_path, monkeypatch, number, where
):
    for path in written.glob("checkpoint_*"):
        file = path / part_file("policy")
        file.write_bytes(file.read_bytes()[:-1])
    directory = tmp_path / "bucket" / "trial"
    shutil.copytree(written, directory)
    before = sorted(contents(directory).values())
    fails_at, refused = 0, 0
    while fails_at == 0 or refused == fails_at:
        fails_at += 1
        faults = Faults(fails_at, number)
        try:
            if where == "disk":
                with FailingDisk(directory, faults).installed(monkeypatch):
                    restored = Restored(FakeTrial(directory))
            else:
                restored = Restored(in_store(tmp_path, directory.parent, faults))
        except UnreadableCheckpoint:
            refused += 1
        after = sorted(contents(directory).values())
        # A store moves a file by copying and removing it, so the file may be in both places.
        assert after == before if where == "disk" else set(after) == set(before)
        assert fails_at < 200
    assert restored.round == 0
    assert refused > 10
