"""Functions that run our commands as a user does: each in a process with its own Ray."""

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


def environment_with(code: str, directory: Path, **variables: str) -> dict[str, str]:
    """Return an environment in which every Python process runs `code` when it starts.

    Args:
        code: The code of the module `sitecustomize`, which Python imports.
        directory: The directory for this module.
        **variables: Further environment variables.
    """
    (directory / "sitecustomize.py").write_text(code)
    paths = os.pathsep.join(filter(None, [str(directory), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": paths, **variables}


def run(script: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command to its end in the directory `cwd`."""
    # The tests set this variable for their own Ray. The command must set it on its own.
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
    """Run an experiment to its end. Its storage is also the current directory."""
    return run("tune.py", *arguments, "--storage", str(storage), cwd=storage)


def trial_directories(experiment: Path) -> list[Path]:
    return sorted(path.parent for path in experiment.glob("*/result.json"))


def parts(trial: Path, kind: str) -> list[dict[str, Any]]:
    """Return the records of one kind that a trial wrote as Parquet."""
    paths = sorted((trial / kind).glob("part-*.parquet"))
    return [entry for path in paths for entry in pq.read_table(path).to_pylist()]


def spans(trial: Path) -> dict[str, list[tuple[str, float, float]]]:
    """Return the spans of each actor in the trace, as (stage, start, end)."""
    events = json.loads((trial / "trace.json").read_text())
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    by_actor: dict[str, list[tuple[str, float, float]]] = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] == "X":
            span = (event["name"], event["ts"], event["ts"] + event["dur"])
            by_actor[names[event["tid"]]].append(span)
    return by_actor


def overlap(first: list[tuple], second: list[tuple]) -> float:
    """Return the total time in which a span of `first` and a span of `second` overlap."""
    return sum(
        max(0.0, min(a[2], b[2]) - max(a[1], b[1])) for a, b in itertools.product(first, second)
    )
