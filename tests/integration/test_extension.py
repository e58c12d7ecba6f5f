"""A finished experiment that gets a second seed."""

from __future__ import annotations

import hashlib
from pathlib import Path

from commands import SMALL, tune

from reports.experiment import read_experiment


def digests(directory: Path) -> dict[Path, str]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_an_extended_experiment_is_one_experiment_and_its_first_trial_stays_as_it_was(tmp_path):
    start = ("--space", "async_vs_sync", "--set", "arm=colocated_k1", "--iterations", "1", *SMALL)
    done = tune(*start, "--name", "mine", storage=tmp_path)
    assert done.returncode == 0, done.stderr
    (first,) = read_experiment(tmp_path / "mine").trials
    before = digests(first.directory)

    more = tune("--extend", "--name", "mine", "--num-samples", "2", storage=tmp_path)
    assert more.returncode == 0, more.stderr
    record = read_experiment(tmp_path / "mine")

    assert [(t.label, t.finished, t.path[:-1]) for t in record.trials] == [
        ("colocated_k1/0", True, ()),
        ("colocated_k1/1", True, ("extensions", "1")),
    ]
    assert digests(first.directory) == before
    assert (record.not_begun, record.problems) == ([], [])
    assert "Medians over 2 seeds" in more.stdout
    assert "Added later" in (tmp_path / "mine" / "report.html").read_text()
