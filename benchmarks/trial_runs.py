"""Trials run as a user runs them, and their rows."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from measure import ROOT


class TrialFailed(SystemExit):
    """What a benchmark ends with, unless failing is a result."""


def run_trial(arm: str, *, seed: int, options: list[str]) -> list[dict[str, Any]]:
    """The rows of one trial of `async_vs_sync`, one a round. TrialFailed when it fails."""
    with finished_trial(arm, seed=seed, options=options) as directory:
        return rows_of(directory)


def rows_of(directory: Path) -> list[dict[str, Any]]:
    """The rows of metrics in a trial's directory, one a round."""
    return [json.loads(line) for line in (directory / "result.json").read_text().splitlines()]


@contextmanager
def finished_trial(arm: str, *, seed: int, options: list[str], tree: Path = ROOT) -> Iterator[Path]:
    """The directory of one trial, run as a checkout has it. TrialFailed when it fails."""
    with tempfile.TemporaryDirectory() as storage:
        command = [
            *(sys.executable, str(tree / "launch" / "tune.py"), "--space", "async_vs_sync"),
            *("--set", f"arm={arm}", "--seed", str(seed), *options),
            *("--name", "trial", "--storage", storage),
        ]
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=tree, env=environment)
        if done.returncode != 0:
            raise TrialFailed(f"{arm} with seed {seed}: status {done.returncode}\n{done.stdout}")
        (path,) = Path(storage).glob("trial/*/result.json")
        yield path.parent


def overhead(rows: list[dict[str, Any]]) -> dict[str, float]:
    """What every benchmark of trials shows: `time/other_s` as a share of the step, the median over
    the rounds, and the largest lag."""
    shares = [row["time/other_s"] / row["time/step_s"] for row in rows]
    return {
        "other_share": statistics.median(shares),
        "largest_lag": max(row["lag/max"] for row in rows),
    }
