"""A disk that fails briefly while the real command resumes an experiment.

At the end, the finished experiment gets a second seed.

tests/unit/storage/test_resume_faults.py makes every other file operation of a resume fail.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
from commands import SMALL, environment_with, parts, trial_directories, tune, tune_command
from conftest import actor_processes, rows, wait_for

from reports.experiment import read_experiment

ROUNDS = 10

# In every process of the command, this code makes given file operations fail for paths that contain
# a given text. After a given number of failures, the operations succeed.
FAILING = """
import builtins, io, json, os, pathlib

def failing(operation, match, number, times, counted):
    def run(path, *args, **options):
        if isinstance(path, (str, pathlib.PurePath)) and match in str(path):
            file = pathlib.Path(counted)
            failed = file.stat().st_size if file.exists() else 0
            if failed < times:
                with plain(counted, "ab") as counter:
                    counter.write(b".")
                raise OSError(number, os.strerror(number), str(path))
        return operation(path, *args, **options)
    return run

plain = builtins.open
for owner, name, *how in json.loads(os.environ["FAILING"]):
    owner = {"os": os, "io": io}[owner]
    setattr(owner, name, failing(getattr(owner, name), *how))
"""
ALWAYS = 10**6


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kill an experiment that has checkpoints of at least rounds 2 and 4; return its directory."""
    storage = tmp_path_factory.mktemp("storage")
    argv = ["--space", "async_vs_sync", "--name", "cut", "--set", "arm=colocated_k1", *SMALL]
    argv += ["--iterations", str(ROUNDS), "--checkpoint-every", "2", "--set", "eval.every=10"]
    command = tune_command(*argv, storage=storage)
    process = subprocess.Popen(command, cwd=storage, stdout=subprocess.DEVNULL)
    directory = storage / "cut"
    wait_for(lambda: list(directory.glob("*/checkpoint_000001/manifest.json")), 120)
    wait_for(lambda: len(rows(trial_directories(directory)[0])) >= 5, 60)
    family = psutil.Process(process.pid).children(recursive=True)
    actors = [own for own in family if own.pid in actor_processes()]
    assert actors
    process.send_signal(signal.SIGKILL)
    process.wait()
    # The process of the trial may still be removing an older checkpoint.
    _, alive = psutil.wait_procs(actors, timeout=60)
    assert not alive
    return directory


def resume(
    experiment: Path, tmp_path: Path, *faults: tuple[Any, ...], max_failures: int
) -> tuple[int, str]:
    """Resume while the operations in `faults` fail; return exit status and output."""
    told = [[*fault, str(tmp_path / f"failed-{n}")] for n, fault in enumerate(faults)]
    argv = ["--resume", "must", "--name", "cut", "--max-failures", str(max_failures)]
    done = subprocess.run(
        tune_command(*argv, storage=experiment.parent),
        capture_output=True,
        text=True,
        timeout=300,
        cwd=experiment.parent,
        env=environment_with(FAILING, tmp_path, FAILING=json.dumps(told)),
        check=False,
    )
    for n in range(len(faults)):
        assert (tmp_path / f"failed-{n}").exists(), f"fault {n} never happened"
    return done.returncode, done.stdout + done.stderr


def written(experiment: Path) -> dict[str, bytes]:
    """Return the files of the trial by path, without those in which Tune notes the failure."""
    (trial,) = trial_directories(experiment)
    files = [path for path in trial.rglob("*") if path.is_file() and path.suffix != ".pkl"]
    named = {path.relative_to(trial).as_posix(): path for path in files}
    return {n: p.read_bytes() for n, p in named.items() if not n.startswith(("error.", "params."))}


def test_a_trial_whose_checkpoints_cannot_be_read_is_refused_and_loses_nothing(
    experiment: Path, tmp_path: Path
) -> None:
    before = written(experiment)
    fault = ("os", "open", "policy-", errno.EIO, ALWAYS)
    status, told = resume(experiment, tmp_path, fault, max_failures=0)
    assert status == 1
    assert f"cannot be read ({os.strerror(errno.EIO)}); nothing is lost: try again" in told
    assert written(experiment) == before


@pytest.fixture(scope="module")
def finished(experiment: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, str]:
    """Finish the experiment, with one retry, on a disk where three operations each fail once."""
    faults = [
        ("os", "open", "manifest.json", errno.EMFILE, 1),
        ("io", "open", "result.json", errno.EIO, 1),
        ("os", "replace", "part-", errno.ENOSPC, 1),
    ]
    status, told = resume(experiment, tmp_path_factory.mktemp("faults"), *faults, max_failures=1)
    return experiment, status, told


def test_a_trial_that_cannot_read_its_checkpoints_once_goes_on_in_its_next_attempt(
    finished: tuple[Path, int, str],
) -> None:
    _, status, told = finished
    assert status == 0, told
    assert f"cannot be read ({os.strerror(errno.EMFILE)}); nothing is lost: try again" in told


def test_what_the_disk_refuses_once_is_written_with_the_next_round(
    finished: tuple[Path, int, str],
) -> None:
    (trial,) = trial_directories(finished[0])
    every = list(range(1, ROUNDS + 1))
    assert [row["training_iteration"] for row in rows(trial)] == every
    for kind in ("rollouts", "steps", "versions"):
        assert sorted({entry["round"] for entry in parts(trial, kind)}) == every


def digests(directory: Path) -> dict[Path, str]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_an_extended_experiment_is_one_experiment_and_its_first_trial_stays_as_it_was(
    finished: tuple[Path, int, str],
) -> None:
    experiment = finished[0]
    (first,) = read_experiment(experiment).trials
    before = digests(first.directory)

    more = tune("--extend", "--name", "cut", "--num-samples", "2", storage=experiment.parent)
    assert more.returncode == 0, more.stderr
    record = read_experiment(experiment)

    assert [(t.label, t.finished, t.path[:-1]) for t in record.trials] == [
        ("colocated_k1/0", True, ()),
        ("colocated_k1/1", True, ("extensions", "1")),
    ]
    assert digests(first.directory) == before
    assert (record.not_begun, record.problems) == ([], [])
    assert "Medians over 2 seeds" in more.stdout
    assert "Added later" in (experiment / "report.html").read_text()
