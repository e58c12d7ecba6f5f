"""The product's files that a result rests on, and which content they had when it was measured."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"

PACKAGES = ("grpo_trainable", "callbacks", "search_spaces", "reports", "tuning", "launch")

# What a trial runs. `reports` makes table and report when it is over.
TRIAL = ("grpo_trainable", "callbacks", "search_spaces", "tuning", "launch/tune.py")
REFERENCE = re.compile(r"grpo_trainable(\.\w+)+:\w+")
RUNS_TRIALS = '"launch" / "tune.py"'  # appears in the source of whatever runs trials
ASSETS = "grpo_trainable/assets"

# It loads nothing by itself: the names it hands out are imported by those who ask for them.
LAZY = "grpo_trainable/__init__.py"
THIS_FILE = "benchmarks/product.py"  # which names what it looks for


def git(*words: str, text: str = "") -> str:
    """What git prints, run in the repository with `text` as its input."""
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


class Tree(Protocol):
    """Files by their names, relative to the repository."""

    def has(self, name: str) -> bool: ...

    def read(self, name: str) -> str: ...

    def under(self, folders: Iterable[str]) -> list[str]:
        """The files in these folders; a file stands for itself."""
        ...


class WorkingTree:
    """The files as they are now, committed or not."""

    def has(self, name: str) -> bool:
        return (ROOT / name).is_file()

    def read(self, name: str) -> str:
        return (ROOT / name).read_text(encoding="utf-8")

    def under(self, folders: Iterable[str]) -> list[str]:
        return git("ls-files", "--", *folders).splitlines()


class CommittedTree:
    """The files as they were at a commit."""

    def __init__(self, commit: str) -> None:
        self.blobs = blobs_at(commit, ())

    def has(self, name: str) -> bool:
        return name in self.blobs

    def read(self, name: str) -> str:
        return git("cat-file", "blob", self.blobs[name])

    def under(self, folders: Iterable[str]) -> list[str]:
        places = tuple(folders)
        return [name for name in self.blobs if any(_is_in(name, place) for place in places)]


def _is_in(name: str, place: str) -> bool:
    return name == place or name.startswith(f"{place}/")


def product_files(script: str, tree: Tree | None = None) -> list[str]:
    """The product's files, relative to the repository, that a benchmark runs: `script`, named like
    them. Of the working tree, or as another tree has them.

    These are the files it imports, directly or not, read from the sources; everything that a trial
    needs when it starts trials; and the assets when one of the files reads them.
    """
    tree = WorkingTree() if tree is None else tree
    found: set[str] = set()
    waiting = [script]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        if name != LAZY:
            waiting += imported_files(name, tree)
    sources = [tree.read(name) for name in found - {THIS_FILE}]
    folders = TRIAL if any(RUNS_TRIALS in source for source in sources) else ()
    if any('"assets"' in source for source in sources):
        folders = (*folders, ASSETS)
    return sorted(filter(is_product, {*found, *(tree.under(folders) if folders else ())}))


def is_product(name: str) -> bool:
    return name.split("/")[0] in PACKAGES


def imported_files(name: str, tree: Tree) -> list[str]:
    """The files of this repository that a module imports, the packages around them included."""
    path = PurePosixPath(name)
    module = ".".join(path.with_suffix("").parts)
    package = path.name == "__init__.py"
    files = []
    for dotted in imported(module.removesuffix(".__init__"), tree.read(name), package=package):
        parts = dotted.split(".")
        # Benchmarks import their neighbours by bare names.
        for folder in (PurePosixPath(), path.parent):
            for length in range(1, len(parts) + 1):
                base = folder.joinpath(*parts[:length])
                files += [f"{base}.py", f"{base}/__init__.py"]
    return [file for file in files if tree.has(file)]


def imported(module: str, source: str, *, package: bool) -> Iterator[str]:
    """Dotted names a source imports anywhere in it, functions and type-checking blocks included.

    A table names what is imported later as `module:name`, which counts as well.
    """
    parents = module.split(".") if package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = parents[: len(parents) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            # `from grpo_trainable import rollout` names a module as its last part.
            yield from (f"{prefix}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            first = node.args[0] if node.args else None
            if called in ("import_module", "__import__") and isinstance(first, ast.Constant):
                yield str(first.value)
        elif isinstance(node, ast.Constant) and REFERENCE.fullmatch(str(node.value)):
            yield str(node.value).partition(":")[0]


def blobs(files: Iterable[str]) -> dict[str, str]:
    """Git's hash of each file as it is now, committed or not; files that are gone are left out."""
    there = [name for name in files if (ROOT / name).is_file()]
    hashes = git("hash-object", "--stdin-paths", text="".join(f"{name}\n" for name in there))
    return dict(zip(there, hashes.split(), strict=True))


def blobs_at(commit: str, files: Iterable[str]) -> dict[str, str]:
    """Git's hash of each file in a commit; files that it does not have are left out."""
    found = {}
    for line in git("ls-tree", "-r", commit, "--", *files).splitlines():
        about, _, name = line.partition("\t")
        found[name] = about.split()[2]
    return found


def is_dirty() -> bool:
    """Whether something is not committed. What a benchmark writes changes nothing it measures."""
    written = (":(exclude)benchmarks/results", ":(exclude)docs/results")
    return bool(git("status", "--porcelain", "--", ".", *written).strip())


def measurements(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The parts of a result that were measured by one command each, by name ("": the whole)."""
    if "command" in result:
        return {"": result}
    return {name: part for name, part in result.items() if isinstance(part, dict)}


def violations(measurement: dict[str, Any]) -> list[str]:
    """Why a measurement cannot be repeated from what it says of its origin."""
    found = []
    if len(measurement.get("commit", "")) != 40:
        found.append("no commit")
    if measurement.get("dirty") is not False:
        found.append("dirty tree")
    if not measurement.get("product"):
        found.append("no digest of the product")
    return found
