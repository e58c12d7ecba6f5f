"""Results from before they said what they rest on are given that record, from git."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# They import their neighbours by bare names.
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import product
import stale

from grpo_trainable.command_line import UsageError

SCRIPT = "import neighbour\nfrom grpo_trainable.sampling import sample\n"
FILES = {
    "benchmarks/speed.py": SCRIPT,
    "benchmarks/neighbour.py": "def f():\n    import grpo_trainable.late\n",
    "grpo_trainable/__init__.py": "",
    "grpo_trainable/sampling.py": "from grpo_trainable import tables\n",
    "grpo_trainable/tables.py": 'LOADED = "grpo_trainable.named:Thing"\n',
    "grpo_trainable/named.py": "Thing = 1\n",
    "grpo_trainable/late.py": "",
    "grpo_trainable/unused.py": "",
    "README.md": "",
}
RESTS_ON = ("__init__", "late", "named", "sampling", "tables")
RESULT = "benchmarks/results/speed.json"


class Repository:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.git("init", "-q")

    def git(self, *words: str) -> str:
        who = ("-c", "user.name=t", "-c", "user.email=t@t")
        command = ["git", "-C", str(self.root), *who, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def commit(self, files: dict[str, str | None]) -> str:
        """Writes these files, None removing one, and commits; gives the commit."""
        for name, content in files.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink() if content is None else path.write_text(content)
        self.git("add", "-A")
        self.git("commit", "-qm", "x")
        return self.git("rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A benchmark with what it rests on, and one commit later the product is another."""
    root = tmp_path / "repository"
    root.mkdir()
    for module in (product, stale):
        monkeypatch.setattr(module, "ROOT", root)
    monkeypatch.setattr(stale, "RESULTS", root / "benchmarks" / "results")
    monkeypatch.setattr(stale, "EQUAL", root / "equal.json")
    return Repository(root)


@pytest.fixture
def measured(repository) -> Callable[..., Path]:
    """Commits a result of the first commit, after the product has changed; gives its file."""
    first = repository.commit(FILES)

    def write(part: str | None = None, **changes: Any) -> Path:
        about = {"command": "python benchmarks/speed.py --repeats 3", "commit": first}
        result = {**about, "dirty": False, "seed": 0, "samples_per_s": 1.5, **changes}
        result = {k: v for k, v in result.items() if v is not None}
        content = json.dumps(result if part is None else {part: result}, indent=2)
        moved = {"grpo_trainable/named.py": None, "grpo_trainable/tables.py": "LOADED = 2\n"}
        repository.commit({**moved, "benchmarks/neighbour.py": "", RESULT: content + "\n"})
        return repository.root / RESULT

    return write


def run(monkeypatch: pytest.MonkeyPatch, *options: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["stale.py", *map(str, options)])
    return stale.main()


def test_the_files_are_those_that_the_benchmark_imported_at_its_commit(
    repository, measured, monkeypatch, capsys
):
    path = measured()
    before = json.loads(path.read_text())
    assert run(monkeypatch, "--adopt", path) == 0
    assert capsys.readouterr().out == "speed.json: 5 product files filled in\n"
    after = json.loads(path.read_text())

    names = [f"grpo_trainable/{name}.py" for name in RESTS_ON]
    first = after["commit"]
    assert after["product"] == {n: repository.git("rev-parse", f"{first}:{n}") for n in names}
    assert after["product_from"] == "the commit, read from git after the measurement"
    # Nothing else has changed, and the record stands where a new measurement has it.
    assert {k: v for k, v in after.items() if not k.startswith("product")} == before
    assert list(after)[3:7] == ["seed", "product", "product_from", "samples_per_s"]
    assert product.violations(after) == []


def test_what_changed_since_is_then_told(measured, monkeypatch, capsys):
    path = measured()
    run(monkeypatch)
    assert "speed.json: unknown" in capsys.readouterr().out
    run(monkeypatch, "--adopt", path)
    capsys.readouterr()
    assert run(monkeypatch, "--fail") == 1
    assert capsys.readouterr().out.splitlines()[1:] == [
        "    grpo_trainable/named.py",
        "    grpo_trainable/tables.py",
    ]


def test_the_record_is_the_one_that_a_new_measurement_writes(repository, measured):
    """At a commit that is checked out, git's files and those of the working tree are the same."""
    measured()
    head = repository.git("rev-parse", "HEAD")
    files = product.product_files("benchmarks/speed.py")
    tree = product.CommittedTree(head)
    assert product.product_files("benchmarks/speed.py", tree) == files
    assert {name: tree.blobs[name] for name in files} == product.blobs(files)


def test_the_parts_of_a_result_are_filled_one_by_one(measured, monkeypatch):
    path = measured(part="scaling")
    assert run(monkeypatch, "--adopt", path) == 0
    (part,) = product.measurements(json.loads(path.read_text())).values()
    assert len(part["product"]) == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dirty": True}, "was measured from files that were not committed"),
        ({"dirty": None}, "does not say whether all files were committed"),
        ({"dirty": "no"}, "does not say whether all files were committed"),
        ({"commit": "0" * 40}, "git has no commit 0000"),
        ({"commit": "HEAD"}, "git has no commit HEAD"),
        ({"commit": None}, "git has no commit of it"),
        ({"command": "python benchmarks/other.py"}, "has no script benchmarks/other.py"),
        ({"command": "make bench"}, "has no script bench"),
        ({"product": {"a.py": "b"}}, "says already which product files it rests on"),
    ],
)
def test_a_result_that_cannot_be_trusted_is_refused_and_left_as_it_is(
    measured, monkeypatch, changes, why
):
    path = measured(**changes)
    before = path.read_bytes()
    with pytest.raises(UsageError, match=why):
        run(monkeypatch, "--adopt", path)
    assert path.read_bytes() == before


def test_a_result_that_is_not_committed_as_it_is_is_refused(measured, monkeypatch, tmp_path):
    path = measured()
    path.write_text(path.read_text().replace("1.5", "2.5"))
    outside = tmp_path / "outside.json"
    outside.write_text("{}")
    for refused in (path, path.with_name("new.json"), outside):
        with pytest.raises(UsageError, match="is not committed as it is"):
            run(monkeypatch, "--adopt", refused)


def test_what_a_trial_runs_is_read_from_the_commit_as_well(repository):
    trial = {
        "benchmarks/speed.py": 'COMMAND = ROOT / "launch" / "tune.py"\n',
        "launch/tune.py": "",
        "launch/report.py": "",
        "callbacks/console.py": "",
        "grpo_trainable/assets/nouns.txt": "",
    }
    commit = repository.commit(trial)
    repository.commit({"callbacks/console.py": None, "callbacks/later.py": ""})
    tree = product.CommittedTree(commit)
    assert product.product_files("benchmarks/speed.py", tree) == [
        *("callbacks/console.py", "grpo_trainable/assets/nouns.txt", "launch/tune.py"),
    ]
