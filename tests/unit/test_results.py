"""Committed results: each says what it rests on, and `stale.py` says what has changed since."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

# They import their neighbours by bare names.
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import measure
import product
import stale
from product import imported_files, measurements, product_files, violations

from grpo_trainable.command_line import UsageError

ROOT = product.ROOT
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))

pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")


def test_every_committed_result_says_what_it_rests_on():
    found = {
        f"{path.name} {part}".rstrip(): violations(measurement)
        for path in RESULTS
        for part, measurement in measurements(json.loads(path.read_text())).items()
    }
    assert {name: why for name, why in found.items() if why} == {}


def test_a_result_needs_commit_clean_tree_and_digest():
    good = {"commit": "a" * 40, "dirty": False, "product": {"grpo_trainable/noise.py": "b"}}
    assert violations(good) == []
    assert violations({**good, "dirty": True}) == ["dirty tree"]
    assert violations({**good, "commit": "unknown"}) == ["no commit"]
    assert violations({**good, "product": {}}) == ["no digest of the product"]
    assert violations({}) == ["no commit", "dirty tree", "no digest of the product"]


@pytest.mark.slow
def test_a_benchmark_rests_on_what_it_imports():
    files = product_files("benchmarks/generation.py")
    assert "grpo_trainable/models/transformer.py" in files  # imported within a function
    assert "grpo_trainable/engines/__init__.py" in files
    assert "grpo_trainable/trainable.py" not in files
    assert not [name for name in files if name.startswith(("benchmarks/", "callbacks/"))]


@pytest.mark.slow
def test_a_benchmark_rests_on_what_a_table_names_for_a_later_import():
    files = product_files("benchmarks/weight_transport.py")
    assert "grpo_trainable/transports/shm.py" in files
    assert "grpo_trainable/engines/torch_engine.py" in files


@pytest.mark.slow
def test_a_benchmark_of_trials_rests_on_all_that_a_trial_runs():
    files = product_files("benchmarks/learning.py")
    for name in ("pipeline/loop.py", "assets/policy/policy.safetensors", "noise.py"):
        assert f"grpo_trainable/{name}" in files
    assert {"callbacks/console.py", "search_spaces/lag.py", "launch/tune.py"} <= set(files)
    assert not [name for name in files if name.startswith("reports/")]  # after the trials


def test_imports_are_followed_to_files_and_the_packages_around_them():
    here = product.WorkingTree()
    # The standard library alone.
    assert imported_files("grpo_trainable/noise.py", here) == []
    names = set(imported_files("grpo_trainable/remote.py", here))
    assert {"grpo_trainable/__init__.py", "grpo_trainable/calls.py"} <= names
    assert "grpo_trainable/pipeline/loop.py" not in names


def test_a_file_has_the_hash_that_git_gives_it():
    path = "grpo_trainable/versions.py"
    content = (ROOT / path).read_bytes()
    digest = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    assert product.blobs([path, "grpo_trainable/gone.py"]) == {path: digest}


def test_a_product_file_that_is_written_while_a_benchmark_runs_is_noticed(monkeypatch, tmp_path):
    monkeypatch.setattr(measure, "ROOT", tmp_path)
    (tmp_path / "a.py").touch()
    written = (tmp_path / "a.py").stat().st_mtime
    monkeypatch.setattr(measure, "STARTED", written + 1)
    assert not measure.touched(["a.py"])
    assert measure.touched(["a.py", "removed.py"])
    monkeypatch.setattr(measure, "STARTED", written - 1)
    assert measure.touched(["a.py"])


def test_a_result_whose_product_changed_meanwhile_is_written_as_dirty(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(measure, "STARTED", 0.0)
    about = {"command": "x", "dirty": False, "product": {"grpo_trainable/noise.py": "b"}}
    measure.write(tmp_path / "x.json", about)
    assert json.loads((tmp_path / "x.json").read_text())["dirty"] is True
    assert "not to be committed" in capsys.readouterr().out


def test_changed_files_are_those_that_differ_or_are_gone():
    recorded = {"a.py": "1", "b.py": "2", "c.py": "3"}
    assert stale.changed(recorded, recorded, set()) == []
    assert stale.changed(recorded, {"a.py": "1", "b.py": "9"}, set()) == ["b.py", "c.py"]


def test_acknowledged_changes_follow_each_other_in_their_direction():
    equal = {("b.py", "2", "8"), ("b.py", "8", "9"), ("a.py", "1", "7")}
    assert stale.changed({"b.py": "2"}, {"b.py": "9"}, equal) == []
    assert stale.changed({"b.py": "2"}, {"b.py": "8"}, equal) == []
    assert stale.changed({"b.py": "9"}, {"b.py": "2"}, equal) == ["b.py"]  # measured later
    assert stale.changed({"b.py": "1"}, {"b.py": "7"}, equal) == ["b.py"]  # of another file


@pytest.fixture
def result(tmp_path, monkeypatch):
    """A result that rests on two files, as they are."""
    monkeypatch.setattr(stale, "RESULTS", tmp_path)
    monkeypatch.setattr(stale, "EQUAL", tmp_path / "equal" / "equal.json")
    (tmp_path / "equal").mkdir()
    files = ["grpo_trainable/noise.py", "grpo_trainable/versions.py"]
    about = {"command": "python benchmarks/x.py", "commit": "c" * 40, "dirty": False}
    path = tmp_path / "x.json"

    def write(**changes: str) -> Path:
        path.write_text(json.dumps({**about, "product": {**product.blobs(files), **changes}}))
        return path

    return write


def run_stale(monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    monkeypatch.setattr(sys, "argv", ["stale.py", *options])
    return stale.main()


def test_nothing_is_said_when_nothing_changed(result, monkeypatch, capsys):
    result()
    assert run_stale(monkeypatch, "--fail") == 0
    assert capsys.readouterr().out == ""


def test_a_changed_file_is_named_with_the_result(result, monkeypatch, capsys):
    result(**{"grpo_trainable/versions.py": "0" * 40})
    assert run_stale(monkeypatch) == 0
    assert capsys.readouterr().out == (
        "x.json: 1 of 2 files changed since ccccccc\n    grpo_trainable/versions.py\n"
    )
    assert run_stale(monkeypatch, "--fail") == 1


def test_a_result_without_a_record_is_unknown(result, monkeypatch, capsys):
    result().write_text(json.dumps({"one": {"command": "x"}, "two": {"command": "x"}}))
    assert run_stale(monkeypatch, "--fail") == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["x.json one", "x.json two"]


def test_an_acknowledged_change_is_not_listed(result, monkeypatch, capsys):
    now = product.blobs(["grpo_trainable/versions.py"])["grpo_trainable/versions.py"]
    result(**{"grpo_trainable/versions.py": "0" * 40})
    pair = {"grpo_trainable/versions.py": ["0" * 40, now]}
    stale.EQUAL.write_text(json.dumps([{"reason": "same bits", "files": pair}]))
    assert run_stale(monkeypatch, "--fail") == 0


@pytest.mark.parametrize("options", [["--equal", "HEAD"], ["--equal", "HEAD~1..HEAD"]])
def test_an_acknowledgement_needs_both_ends_and_a_reason(options, monkeypatch):
    with pytest.raises(UsageError, match="--reason"):
        run_stale(monkeypatch, *options)


def test_a_file_that_is_gone_can_be_acknowledged_as_well(result, monkeypatch, capsys):
    result(**{"grpo_trainable/divided.py": "0" * 40})
    assert run_stale(monkeypatch, "--fail") == 1
    assert "divided.py" in capsys.readouterr().out
    pair = {"grpo_trainable/divided.py": ["0" * 40, None]}
    stale.EQUAL.write_text(json.dumps([{"reason": "divided, the same bits", "files": pair}]))
    assert run_stale(monkeypatch, "--fail") == 0


def test_an_acknowledgement_of_no_commit_is_a_one_line_error(monkeypatch):
    with pytest.raises(SystemExit, match="nothing is no commit"):
        run_stale(monkeypatch, "--equal", "nothing..HEAD", "--reason", "same bits")


def test_acknowledging_commits_notes_the_product_files_they_changed(tmp_path, monkeypatch, capsys):
    repository = tmp_path / "repository"
    (repository / "grpo_trainable").mkdir(parents=True)

    def git(*words: str) -> str:
        who = ("-c", "user.name=t", "-c", "user.email=t@t")
        command = ["git", "-C", str(repository), *who, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    for content in ("one\n", "two\n"):
        for name in ("grpo_trainable/a.py", "README.md"):
            (repository / name).write_text(content)
        (repository / "tests.py").write_text("same")
        git("add", "-A")
        git("commit", "-qm", content)
    monkeypatch.setattr(product, "ROOT", repository)
    monkeypatch.setattr(stale, "ROOT", repository)
    monkeypatch.setattr(stale, "EQUAL", repository / "equal.json")
    assert run_stale(monkeypatch, "--equal", "HEAD~1..HEAD", "--reason", "same bits") == 0
    (entry,) = json.loads(stale.EQUAL.read_text())
    old, new = (git("rev-parse", f"{at}:grpo_trainable/a.py") for at in ("HEAD~1", "HEAD"))
    assert entry["reason"] == "same bits"
    assert entry["files"]["grpo_trainable/a.py"] == [old, new]
