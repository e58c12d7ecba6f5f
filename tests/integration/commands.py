"""Our commands as a user runs them: in processes of their own, with a Ray of their own."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    *("--set", "eval.prompts=8", "--set", "eval.samples=1", "--set", "rollout.prompts=4"),
    *("--set", "rollout.max_new_tokens=12"),
]


def tune_command(*arguments: str, storage: Path) -> list[str]:
    script = str(ROOT / "launch" / "tune.py")
    return [sys.executable, script, *arguments, "--storage", str(storage)]


def run(script: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A command from start to end, in a directory."""
    # The tests set it for the Ray that they start. The command has to see to its own.
    environment = {k: v for k, v in os.environ.items() if k != "RAY_worker_niceness"}
    return subprocess.run(
        [sys.executable, str(ROOT / "launch" / script), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=cwd,
        env=environment,
        check=False,
    )


def tune(*arguments: str, storage: Path) -> subprocess.CompletedProcess[str]:
    """An experiment from start to end, in the storage's directory."""
    return run("tune.py", *arguments, "--storage", str(storage), cwd=storage)


def trial_directories(experiment: Path) -> list[Path]:
    return sorted(path.parent for path in experiment.glob("*/result.json"))


def parts(trial: Path, kind: str) -> list[dict[str, Any]]:
    """The records of a kind that a trial wrote as Parquet."""
    paths = sorted((trial / kind).glob("part-*.parquet"))
    return [entry for path in paths for entry in pq.read_table(path).to_pylist()]


def spans(trial: Path) -> dict[str, list[tuple[str, float, float]]]:
    """(stage, start, end) by actor, of the trace."""
    events = json.loads((trial / "trace.json").read_text())
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    by_actor: dict[str, list[tuple[str, float, float]]] = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] == "X":
            span = (event["name"], event["ts"], event["ts"] + event["dur"])
            by_actor[names[event["tid"]]].append(span)
    return by_actor


def overlap(first: list[tuple], second: list[tuple]) -> float:
    """For how long spans of both kinds went on at once."""
    return sum(
        max(0.0, min(a[2], b[2]) - max(a[1], b[1])) for a, b in itertools.product(first, second)
    )
