"""Experiments in an object store: a server on this machine that speaks the protocol of S3."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias, cast

import pytest
import torch
from checkpoints import write_checkpoint
from conftest import untimed, wait_for
from experiments import SPACE, config, row, write_experiment, write_part, write_trial
from pyarrow.fs import copy_files
from s3_server import Store, s3_store
from trials import FakeTrial

from callbacks.mirror import Mirror
from callbacks.trial_files import parts_after
from grpo_trainable.storage.checkpointing import (
    MANIFEST,
    CheckpointError,
    TrialState,
    UnreadableCheckpoint,
    checkpoint_round,
    checkpoints_named,
    newest_whole,
    numbered_checkpoints,
    part_file,
    read_checkpoint,
    remove_older,
    unverified_round,
)
from grpo_trainable.storage.object_store import StoredPath, fetched, refusal, stored_path
from grpo_trainable.storage.trial_storage import TrialStorage, checkpoint_at, verify_copy
from reports.report import ReportError, write_report
from reports.stored import at_hand

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """Yield a store with the bucket `bucket`, for use by this process and its children."""
    with s3_store() as store:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        store.make_bucket("bucket")
        yield store


def brought(directory: Path, stored: StoredPath) -> StoredPath:
    """Copy the files of a directory to a store, and return their path there."""
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            (stored / path.relative_to(directory).as_posix()).write_bytes(path.read_bytes())
    return stored


def checkpoint(directory: Path, round_: int) -> Path:
    state = {"pipeline": {"learner_round": round_}}
    tensors = {"a": torch.full((64,), float(round_))}
    write_checkpoint(directory, TrialState(state=state, policy=tensors, optimizer={}, groups=[]))
    return directory


# ---- Paths -------------------------------------------------------------------------------------


def test_files_are_written_whole_listed_and_removed(store: Store, tmp_path: Path) -> None:
    directory = stored_path("s3://bucket/a/")
    assert str(directory / "b") == "s3://bucket/a/b"
    assert not directory.exists()
    assert directory.names() == []
    (directory / "b" / "c.txt").write_bytes(b"one")
    (directory / "b" / "c.txt").write_bytes(b"two")
    (directory / "d.txt").write_bytes(b"")
    assert (directory / "b" / "c.txt").read_bytes() == b"two"
    assert directory.names() == ["b", "d.txt"]
    assert directory.files() == {"b/c.txt": 3, "d.txt": 0}
    with fetched(directory, lambda name: name != "d.txt") as copy:
        assert copy.name == "a"
        assert [path.name for path in copy.rglob("*")] == ["b", "c.txt"]
    assert not copy.exists()
    (directory / "d.txt").unlink()
    directory.remove_tree()
    assert not directory.exists()
    with pytest.raises(FileNotFoundError):
        (directory / "d.txt").read_bytes()


@pytest.mark.parametrize(
    "uri", ["s3://", "s3://key:secret@bucket/a", "s3://bucket?region=x", "s3:/bucket", "s3://b#c"]
)
def test_what_is_no_plain_address_of_a_directory_is_refused(uri: str) -> None:
    with pytest.raises(ValueError, match="must be s3://BUCKET/PATH; set credentials and endpoint"):
        stored_path(uri)


def test_a_store_says_in_one_line_why_nothing_can_be_kept_there(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refusal(stored_path("s3://bucket/a")) is None
    assert stored_path("s3://bucket/a").names() == []
    assert refusal(stored_path("s3://nobody/a")) == "there is no bucket nobody; create it first"
    store.refuses = lambda method, path: "403 AccessDenied" if method == "PUT" else None
    assert "ACCESS_DENIED" in (refusal(stored_path("s3://bucket/a")) or "")
    store.refuses = lambda method, path: None
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    assert "ACCESS_DENIED" in (refusal(stored_path("s3://bucket/a")) or "")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert "NETWORK_CONNECTION" in (refusal(stored_path("s3://bucket/a")) or "")


# ---- Checkpoints -------------------------------------------------------------------------------


def test_a_checkpoint_is_read_from_the_store(store: Store, tmp_path: Path) -> None:
    trial = stored_path("s3://bucket/runs/trial")
    brought(checkpoint(tmp_path / "one", 3), trial / "checkpoint_000000")
    (named,) = checkpoints_named(trial)
    assert torch.equal(read_checkpoint(named).policy["a"], torch.full((64,), 3.0))
    with pytest.raises(CheckpointError, match=r"one of its trials: s3://bucket/runs/trial$"):
        checkpoints_named(stored_path("s3://bucket/runs"))


def test_a_copy_that_lacks_a_file_or_a_part_of_one_is_an_error(
    store: Store, tmp_path: Path
) -> None:
    local, stored = tmp_path / "checkpoint_000000", stored_path("s3://bucket/checkpoint_000000")
    (local / "in").mkdir(parents=True)
    (local / "a").write_bytes(b"one")
    (local / "in" / "b").write_bytes(b"two")
    store.refuses = lambda method, path: "507 Full" if path.endswith("in/b") else None
    copy_files(str(local), stored.path, destination_filesystem=stored.filesystem)  # no error
    with pytest.raises(OSError, match="the store did not accept checkpoint_000000/in/b"):
        verify_copy(local, stored)
    store.refuses = lambda method, path: None
    brought(local, stored)
    verify_copy(local, stored)
    (stored / "a").write_bytes(b"on")
    with pytest.raises(OSError, match="the store did not accept checkpoint_000000/a"):
        verify_copy(local, stored)


@pytest.mark.parametrize("words", [["evaluate.py", "--checkpoint"], ["export.py"]])
@pytest.mark.parametrize(
    ("where", "key", "told"),
    [
        ("s3://nobody/trial", "a-key", "s3://nobody/trial: is not a directory"),
        ("s3://bucket/trial", "another", "s3://bucket/trial: cannot be read (ACCESS_DENIED)"),
        ("s3://key:secret@bucket/trial", "a-key", "set credentials and endpoint in the"),
    ],
)
def test_a_checkpoint_that_cannot_be_had_from_a_store_is_one_line(
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    words: list[str],
    where: str,
    key: str,
    told: str,
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
    script, *option = words
    out = [] if option else [str(tmp_path / "out")]
    argv = [sys.executable, str(ROOT / "launch" / script), *option, where, *out]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert told in line


def test_the_newest_whole_checkpoint_is_found_and_older_ones_are_removed(
    store: Store, tmp_path: Path
) -> None:
    trial = stored_path("s3://bucket/trial")
    for number, round_ in enumerate((2, 4, 6, 8)):
        brought(checkpoint(tmp_path / str(number), round_), trial / f"checkpoint_{number:06d}")
    assert newest_whole(trial) == (trial / "checkpoint_000003", 8)
    assert newest_whole(trial, last=7) == (trial / "checkpoint_000002", 6)
    policy = trial / "checkpoint_000003" / part_file("policy")
    content = policy.read_bytes()
    policy.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert newest_whole(trial) == (trial / "checkpoint_000002", 6)
    policy.write_bytes(content)
    remove_older(trial, 1, shared_rounds=[4])
    assert trial.names() == ["checkpoint_000001", "checkpoint_000003"]
    assert checkpoint_round(trial / "checkpoint_000001") == 4


def going_on(stored: StoredPath, noted: StoredPath) -> tuple[int, list[str]]:
    """Return the round from which a trial continues, and the notes about the choice."""
    context = SimpleNamespace(storage_filesystem=stored.filesystem, trial_fs_path=stored.path)
    restored: list[int] = []

    def restore(checkpoint: Any) -> int:
        with checkpoint.as_directory() as directory:
            restored.append(read_checkpoint(directory).state["pipeline"]["learner_round"])
        return restored[-1]

    notes = TrialStorage(cast(Any, context), keep=None).go_on(
        checkpoint_at(noted), restore, rows_follow=True
    )
    return (restored[-1] if restored else 0), notes


@pytest.mark.parametrize("damaged", [False, True])
def test_a_trial_goes_on_from_a_checkpoint_whose_rounds_the_store_has(
    store: Store, tmp_path: Path, damaged: bool
) -> None:
    """A trial has checkpoints of rounds 4, 8 and 12, but the store has rows only up to round 11."""
    stored = stored_path("s3://bucket/e/trial")
    rows = "".join(json.dumps(row(n)) + "\n" for n in range(1, 12))
    (stored / "result.json").write_bytes(rows.encode())
    for number, round_ in enumerate((4, 8, 12)):
        brought(checkpoint(tmp_path / str(round_), round_), stored / f"checkpoint_{number:06d}")
    if damaged:
        (stored / "checkpoint_000001" / MANIFEST).unlink()
    round_, (note,) = going_on(stored, stored / "checkpoint_000002")
    assert round_ == (4 if damaged else 8)
    said = "checkpoint_000002 is newer than the trial's last row (round 11)"
    assert note.startswith(said)
    assert note.endswith(f"continuing from checkpoint_00000{0 if damaged else 1} (round {round_})")


def test_a_store_that_fails_is_no_proof_of_damage(store: Store, tmp_path: Path) -> None:
    stored = stored_path("s3://bucket/e/trial")
    (stored / "result.json").write_bytes((json.dumps(row(4)) + "\n").encode())
    brought(checkpoint(tmp_path / "4", 4), stored / "checkpoint_000000")
    before = {name: (stored / name).read_bytes() for name in stored.files()}
    store.refuses = lambda method, path: "403 AccessDenied" if "policy" in path else None
    with pytest.raises(UnreadableCheckpoint, match="nothing is lost: try again"):
        going_on(stored, stored / "checkpoint_000000")
    store.refuses = lambda method, path: None
    assert {name: (stored / name).read_bytes() for name in stored.files()} == before
    assert going_on(stored, stored / "checkpoint_000000") == (4, [])


def test_what_belongs_to_damaged_checkpoints_is_set_aside_in_the_store(
    store: Store, tmp_path: Path
) -> None:
    stored = stored_path("s3://bucket/e/trial")
    (stored / "result.json").write_bytes((json.dumps(row(4)) + "\n").encode())
    (stored / "rollouts" / "part-00000004.parquet").write_bytes(b"responses")
    brought(checkpoint(tmp_path / "4", 4), stored / "checkpoint_000000")
    policy = stored / "checkpoint_000000" / part_file("policy")
    policy.write_bytes(policy.read_bytes()[:-1])
    before = {name: (stored / name).read_bytes() for name in stored.files()}
    round_, (note,) = going_on(stored, stored / "checkpoint_000000")
    assert round_ == 0
    assert note.endswith("; the trial's earlier files are in set-aside-1; starting from round 0")
    aside = stored / "set-aside-1"
    assert {name: (aside / name).read_bytes() for name in aside.files()} == before
    assert stored.names() == ["set-aside-1"]
    # A checkpoint whose rows never reached the store is kept as well.
    brought(checkpoint(tmp_path / "8", 8), stored / "checkpoint_000000")
    round_, (note,) = going_on(stored, stored / "checkpoint_000000")
    assert round_ == 0
    assert note.endswith("the trial's earlier files are in set-aside-2; starting from round 0")
    assert checkpoint_round(stored / "set-aside-2" / "checkpoint_000000") == 8
    # Files that were set aside do not count as files of the trial.
    trial: Any = FakeTrial(tmp_path / "trial")
    trial.path, trial.storage.storage_filesystem = stored.path, stored.filesystem
    assert parts_after(stored, 0) == []


# ---- Files of a running trial ------------------------------------------------------------------


def test_what_is_written_is_brought_and_the_rows_come_last(store: Store, tmp_path: Path) -> None:
    stored, local = stored_path("s3://bucket/trial"), tmp_path / "trial"
    (local / "rollouts").mkdir(parents=True)
    mirror = Mirror(local, stored)
    (local / "rollouts" / "part-00000001.parquet").write_bytes(b"responses")
    (local / "trace.json").write_bytes(b"[]")
    (local / ".half.parquet").write_bytes(b"being written")
    (local / "result.json").write_bytes(b"row 1\n")
    store.asked.clear()
    mirror.bring()
    written = [path for method, path in store.asked if method == "PUT"]
    assert written[-1] == "/bucket/trial/result.json"
    assert sorted(stored.files()) == ["result.json", "rollouts/part-00000001.parquet", "trace.json"]
    store.asked.clear()
    mirror.bring()
    assert store.asked == []  # nothing has changed since the last transfer
    (local / "result.json").write_bytes(b"row 1\nrow 2\n")
    (local / "rollouts" / "part-00000001.parquet").unlink()
    mirror.cut(0)
    assert mirror.close() == 0
    assert (stored / "result.json").read_bytes() == b"row 1\nrow 2\n"
    assert sorted(stored.files()) == ["result.json", "trace.json"]


def test_a_store_that_fails_holds_nobody_up_and_gets_everything_later(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored, local = stored_path("s3://bucket/trial"), tmp_path / "trial"
    local.mkdir()
    store.refuses = lambda method, path: "507 InsufficientStorage"
    mirror = Mirror(local, stored)
    (local / "result.json").write_bytes(b"row 1\n")
    wait_for(lambda: caplog.records, 20.0)
    assert "does not accept the files of a trial" in caplog.text
    assert str(local) in caplog.text
    store.refuses = lambda method, path: None
    assert mirror.close() == 0
    assert (stored / "result.json").read_bytes() == b"row 1\n"
    assert "accepts files again" in caplog.text
    assert len(caplog.records) == 2  # the failure and the recovery are reported once each


def test_a_silent_store_is_an_error_after_a_while(store: Store) -> None:
    store.refuses = lambda method, path: "stall"
    started = threading.Event()

    def ask() -> None:
        with pytest.raises(OSError, match="Timeout was reached"):
            stored_path("s3://bucket/a").read_bytes()
        started.set()

    threading.Thread(target=ask, daemon=True).start()
    assert started.wait(60.0)


# ---- Reports -----------------------------------------------------------------------------------


def test_a_report_of_a_store_is_that_of_a_directory(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    # Without a fixed time, the two reports could show different minutes.
    monkeypatch.setattr("reports.page.time", SimpleNamespace(strftime=lambda *_: "now"))
    here = write_experiment(tmp_path / "experiment")
    for arm in list(SPACE.arms)[:2]:
        trial = write_trial(here, config(arm), [row(n) for n in range(1, 5)])
        write_part(trial, "versions", 1, [{"at": 1.0, "side": "learner"}])
    stored = brought(here, stored_path("s3://bucket/runs/experiment"))
    (stored / "a" / "checkpoint_000001" / "policy").write_bytes(b"not fetched")
    (stored / "tuner.pkl").write_bytes(b"not fetched")
    write_report(here, lambda text: None)
    store.asked.clear()
    with at_hand(stored) as copy:
        write_report(copy, lambda text: None)
    assert not [path for _, path in store.asked if "checkpoint_000001/" in path or ".pkl" in path]
    for name in ("report.json", "report.html"):
        of_local = (here / name).read_bytes().replace(str(tmp_path).encode(), b"s3://bucket/runs")
        assert (stored / name).read_bytes() == of_local
    plots = sorted(path.name for path in (here / "plots").iterdir())
    assert (stored / "plots").names() == plots


def test_what_is_wrong_with_a_report_names_the_store(store: Store) -> None:
    with (
        pytest.raises(ReportError, match=r"^s3://bucket/nothing: does not exist$"),
        at_hand(stored_path("s3://bucket/nothing")),
    ):
        pass
    empty = stored_path("s3://bucket/no_experiment")
    (empty / "a.txt").write_bytes(b"")
    with pytest.raises(ReportError, match=r"^s3://bucket/no_experiment: is not an experiment"):  # noqa: SIM117
        with at_hand(empty) as copy:
            write_report(copy)


# ---- The command -------------------------------------------------------------------------------

ARGV = [
    *("--space", "async_vs_sync", "--set", "arm=colocated_k1", "--name", "run"),
    *("--set", "eval.prompts=8", "--set", "eval.samples=1", "--set", "rollout.prompts=4"),
    *("--set", "rollout.max_new_tokens=12", "--set", "eval.every=2"),
    *("--iterations", "8", "--checkpoint-every", "2"),
]


def command(storage: str, *arguments: str) -> list[str]:
    script = str(ROOT / "launch" / "tune.py")
    return [sys.executable, script, *arguments, "--storage", storage]


def tune(storage: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(storage, *arguments), capture_output=True, text=True, cwd=cwd, timeout=600
    )


Process: TypeAlias = "subprocess.Popen[bytes]"


@pytest.fixture
def killed_at_the_end() -> Iterator[Callable[[Process], Process]]:
    """Yield a function that returns a given process and kills it at the end of the test."""
    taken: list[Process] = []
    yield lambda process: taken.append(process) or process
    for process in taken:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("storage", "key", "told"),
    [
        (
            "s3://nobody/runs",
            "a-key",
            "s3://nobody/runs: there is no bucket nobody; create it first",
        ),
        ("s3://bucket/runs", "another", "ACCESS_DENIED"),
        ("s3://key:secret@bucket/runs", "a-key", "set credentials and endpoint in the"),
    ],
)
def test_a_store_that_cannot_be_used_is_one_line(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, storage: str, key: str, told: str
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
    done = tune(storage, *ARGV, cwd=tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert told in line
    assert done.stdout == ""
    assert not [path for method, path in store.asked if method == "PUT" and "run/" in path]


def rows(content: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in content.splitlines()]


def test_a_run_that_was_killed_goes_on_elsewhere_and_equals_one_that_was_not(
    store: Store, tmp_path: Path, killed_at_the_end: Callable[[Process], Process]
) -> None:
    pytest.importorskip("matplotlib")
    storage, runs = "s3://bucket/runs", stored_path("s3://bucket/runs") / "run"
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()

    # The store refuses one file of the first checkpoint, for which pyarrow raises no error.
    def refused(method: str, path: str) -> str | None:
        return "507 Full" if path.endswith("checkpoint_000000/manifest.json") else None

    store.refuses = refused
    process = killed_at_the_end(
        subprocess.Popen(
            command(storage, *ARGV), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=here
        )
    )

    def stored_rows() -> list[dict[str, Any]]:
        (name,) = [name for name in runs.names() if name.startswith("colocated_k1-0")] or [None]
        file = None if name is None else runs / name / "result.json"
        return rows(file.read_bytes()) if file is not None and file.exists() else []

    wait_for(lambda: len(stored_rows()) >= 5, 720.0)
    assert any(line["count/checkpoint_failures"] for line in stored_rows())
    process.send_signal(signal.SIGKILL)
    printed = process.communicate()[0].decode()
    assert "the checkpoint could not be written" in printed

    # Resume as on another machine, which has no local file of the first run.
    done = tune(storage, "--resume", "must", "--name", "run", cwd=there)
    assert done.returncode == 0, done.stderr
    assert f"report: {runs}/report.html" in done.stdout
    local = tune(str(tmp_path / "local"), *ARGV, cwd=tmp_path)
    assert local.returncode == 0, local.stderr

    (trial,) = (tmp_path / "local" / "run").glob("colocated_k1-0*")
    expected = rows((trial / "result.json").read_bytes())
    found = stored_rows()
    assert [line["training_iteration"] for line in found] == list(range(1, 9))
    apart = ("count/checkpoint_failures",)
    told = [untimed(line, apart=apart) for line in found]
    assert told == [untimed(line, apart=apart) for line in expected]

    (name,) = [name for name in runs.names() if name.startswith("colocated_k1-0")]
    kinds = ("rollouts", "evaluations", "steps", "versions")
    for kind in kinds:
        assert (runs / name / kind).names() == sorted(p.name for p in (trial / kind).iterdir())
    names = set((runs / name).names())
    assert {"progress.csv", "trace.json", "params.json"} <= names
    assert [found for found in names if found.startswith("events.out.tfevents")]
    # At least two checkpoints stay: an older checkpoint is kept until the store has all rows up to
    # the round of a later checkpoint.
    rounds = [unverified_round(path) for path in numbered_checkpoints(runs / name)]
    assert len(rounds) >= 2
    assert rounds[-1] == 8
    report = json.loads((runs / "report.json").read_bytes())
    of_local = json.loads((tmp_path / "local" / "run" / "report.json").read_text())
    arm, other = report["arms"]["colocated_k1"], of_local["arms"]["colocated_k1"]
    for key in ("seeds", "rounds", "samples", "reward_before", "reward_after", "changes"):
        assert arm[key] == other[key]
    assert report["problems"] == of_local["problems"] == []

    # No file in the store contains a credential.
    for relative in runs.files():
        assert b"a-secret-that-nobody" not in (runs / relative).read_bytes()
    shutil.rmtree(tmp_path / "local")
