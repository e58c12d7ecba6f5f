"""In an object store, rows follow checkpoints closely, and files that a resume needs are kept."""

from __future__ import annotations

import json
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.fs as pafs
import pytest
import torch
from checkpoints import write_checkpoint
from trials import FakeTrial, row

from callbacks import mirror as mirror_module
from callbacks.mirror import AT_ONCE, Mirror, MirrorCallback, put_older_aside, tell
from callbacks.save_on_interrupt import requested
from grpo_trainable.storage.checkpointing import TrialState, newest_whole
from grpo_trainable.storage.object_store import StoredPath
from grpo_trainable.storage.trial_storage import TrialStorage, round_of_last_row

pytestmark = pytest.mark.slow  # these tests write whole experiment directories

NEVER_S = 1e6


@dataclass(frozen=True)
class WatchedPath(StoredPath):
    """A store that calls `asked` before each request that changes the store."""

    asked: Callable[[str, str], None] = lambda method, path: None

    def __truediv__(self, name: str) -> WatchedPath:
        return replace(self, path=f"{self.path}/{name}")

    def write_bytes(self, content: bytes) -> None:
        self.asked("PUT", self.path)
        super().write_bytes(content)

    def unlink(self) -> None:
        self.asked("DELETE", self.path)
        super().unlink()


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    """Return a local directory that stands in for a bucket."""
    path = tmp_path / "bucket"
    (path / "trial").mkdir(parents=True)
    return path


@pytest.fixture
def no_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the mirror's periodic passes, so that the test triggers each pass itself."""
    monkeypatch.setattr(mirror_module, "PASS_S", NEVER_S)


def stored_in(bucket: Path) -> StoredPath:
    return StoredPath(pafs.SubTreeFileSystem(str(bucket), pafs.LocalFileSystem()), "trial")


def append_row(directory: Path, round_: int) -> None:
    with (directory / "result.json").open("a") as file:
        file.write(json.dumps({"training_iteration": round_}) + "\n")


def part(directory: Path, kind: str, round_: int) -> Path:
    path = directory / kind / f"part-{round_:08d}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"responses")
    return path


def checkpoint(path: Path, round_: int) -> Path:
    state = {"pipeline": {"learner_round": round_}}
    tensors = {"a": torch.full((4,), float(round_))}
    write_checkpoint(path, TrialState(state=state, policy=tensors, optimizer={}, groups=[]))
    return path


def trial_storage(bucket: Path, keep: int) -> TrialStorage:
    stored = stored_in(bucket)
    context: Any = SimpleNamespace(storage_filesystem=stored.filesystem, trial_fs_path=stored.path)
    return TrialStorage(context, keep)


# ---- A kill of the command at any time ---------------------------------------------------------


class Simulation:
    """A trial and its store in virtual time: a round takes 0.2 s, and copying a file `put_s()`."""

    ROUND_S = 0.2
    EVERY = 10  # rounds between two checkpoints
    FILES = ("rollouts", "steps", "versions")

    def __init__(self, bucket: Path, local: Path, put_s: Callable[[], float]) -> None:
        self.now = 0.0
        self.rounds = 0
        self.kills = 0
        self._bucket, self._local, self._put_s = bucket, local, put_s
        self._next_round_at = 0.0
        self._lock = threading.RLock()
        self._storage = trial_storage(bucket, keep=2)
        stored = stored_in(bucket)
        watched = WatchedPath(stored.filesystem, stored.path, asked=self._store_is_asked)
        self.mirror = Mirror(local, watched, clock=lambda: self.now)

    def run(self, seconds: float) -> None:
        while self.now < seconds:
            self._train_for(1.0)  # the pause between two passes of the mirror
            self.mirror.bring()

    def _store_is_asked(self, method: str, path: str) -> None:
        with self._lock:
            self._kill()
            self._train_for(self._put_s() / AT_ONCE)

    def _train_for(self, seconds: float) -> None:
        until = self.now + seconds
        while self._next_round_at <= until:
            self.now = max(self.now, self._next_round_at)
            self._next_round_at = self.now + self.ROUND_S
            if self.mirror.behind_s <= mirror_module.MOST_BEHIND_S:
                self._train()
        self.now = max(self.now, until)

    def _train(self) -> None:
        self.rounds += 1
        for kind in self.FILES:
            part(self._local, kind, self.rounds)
        append_row(self._local, self.rounds)
        self.mirror.row_written()
        if self.rounds % self.EVERY == 0:
            self._save()

    def _save(self) -> None:
        """Copy a checkpoint as Tune does, file by file, in no fixed order."""
        number = self.rounds // self.EVERY
        source = checkpoint(self._local.parent / "saving", self.rounds)
        target = self._bucket / "trial" / f"checkpoint_{number:06d}"
        target.mkdir()
        files = list(source.iterdir())
        random.Random(number).shuffle(files)
        for file in files:
            shutil.copy(file, target)
            self._kill()
        shutil.rmtree(source)
        assert self._storage.remove_older(rows_follow=True) == []
        self._kill()

    def _kill(self) -> None:
        """Check that a command could continue from the current state of the store."""
        self.kills += 1
        stored = stored_in(self._bucket)
        last = round_of_last_row(stored / "result.json")
        for kind in self.FILES:
            if last:
                assert (self._bucket / "trial" / kind / f"part-{last:08d}.parquet").exists()
        whole = newest_whole(stored, last)
        lost = self.rounds - (0 if whole is None else whole[1])
        assert lost <= self.EVERY + 10.0 / self.ROUND_S


@pytest.mark.parametrize(
    ("put_s", "seconds"),
    [
        (lambda rng: 0.05, 20.0),
        (lambda rng: 2.0, 60.0),
        (lambda rng: rng.choice([0.05, 0.05, 0.05, 10.0]), 60.0),
    ],
    ids=["50 ms a file", "2 s a file", "sometimes 10 s"],
)
def test_whenever_the_command_is_killed_little_is_done_again(
    tmp_path: Path,
    bucket: Path,
    no_passes: None,
    put_s: Callable[[random.Random], float],
    seconds: float,
) -> None:
    rng = random.Random(0)
    (tmp_path / "local").mkdir()
    simulation = Simulation(bucket, tmp_path / "local", lambda: put_s(rng))
    simulation.run(seconds)
    assert simulation.rounds > 2 * simulation.EVERY
    assert simulation.kills > 200
    names = [path.name for path in (bucket / "trial").glob("checkpoint_*")]
    assert len(names) <= 2 + 1 + 10.0 / simulation.ROUND_S / simulation.EVERY


# ---- Files that a trial removes ----------------------------------------------------------------


def test_a_checkpoint_counts_once_the_store_has_its_row(bucket: Path) -> None:
    """The command was killed at round 100, when the mirror was three rounds behind."""
    trial, storage = bucket / "trial", trial_storage(bucket, keep=2)
    for number, round_ in enumerate(range(95, 101)):
        checkpoint(trial / f"checkpoint_{number:06d}", round_)
    for n in range(1, 98):
        append_row(trial, n)
    assert storage.remove_older(rows_follow=True) == []
    stored = stored_in(bucket)
    assert stored.names() == [f"checkpoint_{n:06d}" for n in range(1, 6)] + ["result.json"]
    assert newest_whole(stored, 97) == (stored / "checkpoint_000002", 97)
    # With more rows in the store, older checkpoints are removed. With `rows_follow=False`, a
    # checkpoint counts even if the store has no row of its round.
    for n in range(98, 100):
        append_row(trial, n)
    storage.remove_older(rows_follow=True)
    assert stored.names()[0] == "checkpoint_000003"
    storage.remove_older(rows_follow=False)
    assert stored.names()[0] == "checkpoint_000004"


@pytest.mark.parametrize("rows", [None, b"", b"{", b'"no object"\n', b'{"other": 1}\n'])
def test_nothing_is_removed_from_a_store_without_rows(bucket: Path, rows: bytes | None) -> None:
    for number in range(3):
        checkpoint(bucket / "trial" / f"checkpoint_{number:06d}", number)
    if rows is not None:
        (bucket / "trial" / "result.json").write_bytes(rows)
    trial_storage(bucket, keep=1).remove_older(rows_follow=True)
    left = [path.name for path in (bucket / "trial").glob("checkpoint_*")]
    # A checkpoint of round 0 has no row in result.json.
    assert sorted(left) == [f"checkpoint_{number:06d}" for number in range(3)]


def test_nothing_is_removed_while_the_rows_cannot_be_read(bucket: Path) -> None:
    for number in range(3):
        checkpoint(bucket / "trial" / f"checkpoint_{number:06d}", number)
    (bucket / "trial" / "result.json").mkdir()  # a directory, which cannot be opened as a file
    (said,) = trial_storage(bucket, keep=1).remove_older(rows_follow=True)
    assert said.startswith("older checkpoints were not removed: ")
    assert len(list((bucket / "trial").glob("checkpoint_*"))) == 3


def test_the_last_row_is_found_at_the_end_of_a_long_file(bucket: Path) -> None:
    rows = [json.dumps({"training_iteration": n, "text": "x" * 10_000}) for n in range(1, 101)]
    path = bucket / "trial" / "result.json"
    path.write_text("\n".join(rows) + "\n" + rows[0][:-3])  # the last row was cut off
    assert round_of_last_row(stored_in(bucket) / "result.json") == 100


# ---- Passes of the mirror ----------------------------------------------------------------------


def test_a_pass_brings_files_side_by_side_and_the_rows_last(
    tmp_path: Path, bucket: Path, no_passes: None
) -> None:
    asked: list[str] = []
    together = threading.Barrier(AT_ONCE, timeout=60.0)

    def note(method: str, path: str) -> None:
        asked.append(path)
        if "rollouts" in path:
            together.wait()

    local = tmp_path / "local"
    for n in range(1, AT_ONCE + 1):
        part(local, "rollouts", n)
    append_row(local, AT_ONCE)
    stored = stored_in(bucket)
    Mirror(local, WatchedPath(stored.filesystem, stored.path, asked=note)).bring()
    assert asked[-1] == "trial/result.json"
    assert len(stored.files()) == AT_ONCE + 1


def test_a_pass_that_fails_brings_no_rows(tmp_path: Path, bucket: Path, no_passes: None) -> None:
    def refuse(method: str, path: str) -> None:
        if "00000003" in path:
            raise OSError("no space")

    local = tmp_path / "local"
    for n in range(1, 6):
        part(local, "rollouts", n)
    append_row(local, 5)
    stored = stored_in(bucket)
    mirror = Mirror(local, WatchedPath(stored.filesystem, stored.path, asked=refuse))
    mirror.row_written()
    with pytest.raises(OSError, match="no space"):
        mirror.bring()
    assert "result.json" not in stored.files()
    assert mirror.rows_behind == 1


def test_rows_are_cut_in_the_store_before_their_parts_are_removed(
    tmp_path: Path, bucket: Path, no_passes: None
) -> None:
    last_rows: list[int] = []
    stored, local = stored_in(bucket), tmp_path / "local"
    for n in range(1, 10):
        part(bucket / "trial", "rollouts", n)
        append_row(bucket / "trial", n)

    def note(method: str, path: str) -> None:
        if method == "DELETE":
            last_rows.append(round_of_last_row(stored / "result.json"))

    local.mkdir()
    append_row(local, 6)
    mirror = Mirror(local, WatchedPath(stored.filesystem, stored.path, asked=note))
    mirror.cut(6)
    mirror.bring()
    assert last_rows == [6, 6, 6]
    assert len(stored.files()) == 7


# ---- Training that waits for the store ---------------------------------------------------------


class Store:
    """A replacement for `StoredPath._write` that can fail, or block until it is `opened`."""

    def __init__(self) -> None:
        self.fails = False
        self.opened = threading.Event()
        self.opened.set()
        self._write = StoredPath._write

    def write(self, path: StoredPath, content: bytes) -> None:
        assert self.opened.wait(60.0)
        if self.fails:
            raise OSError("507 InsufficientStorage")
        self._write(path, content)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    store = Store()
    monkeypatch.setattr(StoredPath, "_write", lambda path, content: store.write(path, content))
    yield store
    store.opened.set()


class Training:
    """A trial with a `MirrorCallback`. `round` returns when the callback has handled the row."""

    def __init__(self, directory: Path, bucket: Path) -> None:
        self.trial: Any = FakeTrial(directory / "session" / "trial")
        self.trial.path = "trial"
        self.trial.storage = SimpleNamespace(storage_filesystem=stored_in(bucket).filesystem)
        self.local = directory / "session-mirrored" / "trial"
        self.callback = MirrorCallback()
        self.start()

    def start(self) -> None:
        self.callback.on_trial_start(iteration=0, trials=[self.trial], trial=self.trial)

    def round(self, round_: int) -> None:
        append_row(self.local, round_)
        thread = threading.Thread(
            target=lambda: self.callback.on_trial_result(
                iteration=round_, trials=[self.trial], trial=self.trial, result=row(round_)
            ),
            daemon=True,
        )
        thread.start()
        thread.join(60.0)
        assert not thread.is_alive()

    @property
    def mirror(self) -> Mirror:
        return self.callback._mirrors[self.trial.trial_id]


@pytest.fixture
def training(tmp_path: Path, bucket: Path, monkeypatch: pytest.MonkeyPatch) -> Training:
    monkeypatch.setattr(mirror_module, "MOST_BEHIND_S", 0.0)
    return Training(tmp_path, bucket)


def test_training_waits_for_a_store_that_is_behind(
    store: Store, training: Training, bucket: Path
) -> None:
    for n in range(1, 4):
        training.round(n)
        assert round_of_last_row(stored_in(bucket) / "result.json") == n
    assert training.mirror.rows_behind == 0


def test_training_goes_on_while_the_store_fails_and_files_come_later(
    store: Store, training: Training, bucket: Path
) -> None:
    store.fails = True
    for n in range(1, 4):
        training.round(n)
    assert not training.mirror.answers
    assert training.mirror.rows_behind == 3
    assert not stored_in(bucket).files()
    store.fails = False
    assert training.mirror.close() == 0
    assert round_of_last_row(stored_in(bucket) / "result.json") == 3


def test_files_that_the_store_lacks_are_named(
    store: Store, training: Training, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    store.opened.clear()
    append_row(training.local, 1)
    part(training.local, "rollouts", 1)
    line = f"sync/0: s3://trial lacks 2 files of the trial; see {training.local}"
    assert training.callback.not_copied([training.trial]) == [line]
    monkeypatch.setattr(mirror_module, "LAST_S", 0.1)
    training.callback.on_experiment_end(trials=[training.trial])
    assert capsys.readouterr().out.splitlines() == [line]
    assert training.callback.not_copied([training.trial]) == []


def test_an_end_waits_for_a_silent_store_only_so_long(store: Store, training: Training) -> None:
    append_row(training.local, 1)
    store.opened.clear()
    assert training.mirror.close(last_s=0.1) == 1


def test_training_goes_on_while_the_store_is_silent(
    store: Store, training: Training, bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror_module, "SILENT_S", 0.1)
    store.opened.clear()
    for n in range(1, 4):
        training.round(n)
    assert not training.mirror.answers
    store.opened.set()
    assert training.mirror.close() == 0
    assert round_of_last_row(stored_in(bucket) / "result.json") == 3


def test_an_interrupt_ends_the_wait(
    store: Store, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror_module, "SILENT_S", NEVER_S)
    store.opened.clear()
    timer = threading.Timer(0.5, requested.set)
    timer.start()
    try:
        training.round(1)
        assert requested.is_set()
        assert training.mirror.rows_behind == 1
    finally:
        timer.cancel()
        requested.clear()


def test_rows_that_are_done_again_are_gone_before_the_next_checkpoint(
    store: Store, training: Training, bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror_module, "MOST_BEHIND_S", NEVER_S)
    stored = stored_in(bucket)
    for n in range(1, 10):
        append_row(bucket / "trial", n)
        part(bucket / "trial", "rollouts", n)
        part(bucket / "trial" / "aside", "rollouts", n)
    training.trial.checkpoint_at(6)
    training.start()
    assert round_of_last_row(stored / "result.json") == 9  # a start alone removes no rows
    for n in range(1, 7):
        append_row(training.local, n)
    part(training.local, "rollouts", 7)
    training.round(7)
    assert round_of_last_row(stored / "result.json") == 7
    kept = [f"part-{n:08d}.parquet" for n in range(1, 8)]
    assert training.mirror.close() == 0
    assert (stored / "rollouts").names() == kept
    assert len((stored / "aside" / "rollouts").names()) == 9


def test_a_lag_is_told_when_it_has_doubled_and_when_it_is_over(
    training: Training, capsys: pytest.CaptureFixture[str]
) -> None:
    mirror: Any = SimpleNamespace(
        behind_s=0.0, rows_behind=0, answers=True, told_s=0.0, local=training.local
    )
    for behind_s, answers in (
        *((4.0, True), (11.0, True), (15.0, True), (23.0, False), (0.0, True), (0.0, True)),
        *((12.0, True), (20.0, True)),
    ):
        mirror.behind_s, mirror.rows_behind, mirror.answers = behind_s, int(behind_s), answers
        tell(training.trial, mirror)
    assert capsys.readouterr().out.splitlines() == [
        "sync/0: s3://trial is 11 s (11 rounds) behind; training waits for it",
        f"sync/0: s3://trial is 23 s (23 rounds) behind; files remain in {training.local} for now",
        "sync/0: s3://trial has caught up",
        # After the store has caught up, a new delay is reported like the first one.
        "sync/0: s3://trial is 12 s (12 rounds) behind; training waits for it",
    ]


@pytest.mark.parametrize(("here", "there", "kept"), [(5, 5, True), (6, 5, True), (5, 9, False)])
def test_files_that_are_older_than_those_of_the_store_do_not_replace_them(
    bucket: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    here: int,
    there: int,
    kept: bool,
) -> None:
    """A trial continued on another machine, and then came back to this machine."""
    local = tmp_path / "local"
    local.mkdir()
    for directory, last in ((local, here), (bucket / "trial", there)):
        for n in range(1, last + 1):
            append_row(directory, n)
    put_older_aside(local, stored_in(bucket))
    assert (local / "result.json").exists() == kept
    kept_rows = list(tmp_path.glob("local*/result.json"))
    assert len(kept_rows) == 1
    assert ("has later rows" in capsys.readouterr().out) == (not kept)


@pytest.fixture
def unread(training: Training, monkeypatch: pytest.MonkeyPatch) -> Training:
    """Return a trial that has started again while the rows in the store could not be read.

    An earlier command has written rows up to round 5 on this machine.
    """
    for n in range(1, 6):
        append_row(training.local, n)
    training.mirror.close(last_s=0.0)
    training.callback = MirrorCallback()

    def fail(path: StoredPath, most_bytes: int) -> bytes:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(StoredPath, "read_end", fail)
        training.start()
    return training


def test_no_file_is_moved_if_the_rows_in_the_store_cannot_be_read(
    capsys: pytest.CaptureFixture[str], unread: Training
) -> None:
    assert [path.name for path in unread.local.parent.iterdir()] == [unread.local.name]
    assert len((unread.local / "result.json").read_text().splitlines()) == 5
    assert unread.callback._mirrors == {}
    assert capsys.readouterr().out == (
        "sync/0: the rows in s3://trial cannot be read (Input/output error)\n"
    )


def test_files_are_copied_once_the_store_answers(unread: Training, bucket: Path) -> None:
    unread.round(6)
    assert unread.mirror.close() == 0
    assert round_of_last_row(stored_in(bucket) / "result.json") == 6


def test_files_that_lack_rows_of_another_machine_are_not_copied(
    unread: Training, bucket: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unread.round(8)
    assert unread.callback._mirrors == {}
    assert "lack round 7, so none is copied to s3://trial" in capsys.readouterr().out


def test_an_error_that_is_none_of_the_system_does_not_end_the_mirror(
    bucket: Path, tmp_path: Path, no_passes: None, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(method: str, path: str) -> None:
        raise ValueError("a library's own")

    (tmp_path / "local").mkdir()
    append_row(tmp_path / "local", 1)
    stored = stored_in(bucket)
    mirror = Mirror(tmp_path / "local", WatchedPath(stored.filesystem, stored.path, asked=fails))
    mirror._try_pass()
    assert not mirror.answers
    assert "a library's own" in caplog.text
    assert mirror.close(last_s=0.0) == 1
