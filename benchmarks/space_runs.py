"""Experiments that a benchmark runs by the command line under a fixed name, so that one that was
cut short goes on where it was, and what their results rest on."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from measure import ROOT, provenance


def run(space: str, name: str, args: argparse.Namespace, options: Sequence[str] = ()) -> None:
    """Runs a space, or goes on with it, as experiment `name` in `args.storage` with `args.seeds`
    seeds from `args.seed` on. Ends the benchmark where the command fails."""
    args.storage.mkdir(parents=True, exist_ok=True)
    origin = provenance(args)
    with _commits_file(args.storage, name).open("a") as file:
        file.write(origin["commit"] + (" and what was not committed" if origin["dirty"] else ""))
        file.write("\n")
    command = [
        *(sys.executable, str(ROOT / "launch" / "tune.py"), "--space", space),
        *("--num-samples", str(args.seeds), "--seed", str(args.seed), *options),
        *("--name", name, "--storage", str(args.storage), "--resume", "auto"),
    ]
    done = subprocess.run(command, cwd=ROOT)
    if done.returncode != 0:
        sys.exit(f"{name}: status {done.returncode}; the same command goes on")


def as_run(origin: Mapping[str, Any], storage: Path, name: str) -> dict[str, Any]:
    """Return `origin` with the commits that the trials ran, oldest first."""
    file = _commits_file(storage, name)
    commits = file.read_text().splitlines() if file.exists() else []
    dirty = origin["dirty"] or any(" " in commit for commit in commits)
    return {**origin, "dirty": dirty, "trials_commits": commits}


def _commits_file(storage: Path, name: str) -> Path:
    """The file with the commit of the code that the trials ran, a line each time that the command
    began or went on."""
    return storage / f"{name}.commits"


def fill(page: Path, name: str, table: str) -> None:
    """Puts the table between its marks."""
    opening, closing = f"<!-- table: {name} -->\n", "\n<!-- end of table -->"
    text = page.read_text()
    before, found, rest = text.partition(opening)
    _, ended, after = rest.partition(closing)
    if not found or not ended:
        sys.exit(f"{page}: has no marks for a table of {name}")
    page.write_text(before + opening + table + closing + after)
