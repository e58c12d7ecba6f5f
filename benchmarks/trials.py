"""Trials run as a user runs them, and their rows."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import ROOT


def run_trial(arm: str, *, seed: int, options: list[str]) -> list[dict[str, Any]]:
    """The rows of one trial of `async_vs_sync`, one a round. SystemExit when it fails."""
    with tempfile.TemporaryDirectory() as storage:
        command = [
            *(sys.executable, str(ROOT / "launch" / "tune.py"), "--space", "async_vs_sync"),
            *("--set", f"arm={arm}", "--seed", str(seed), *options),
            *("--name", "trial", "--storage", storage),
        ]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        if done.returncode != 0:
            sys.exit(f"{arm} with seed {seed}: status {done.returncode}\n{done.stdout}")
        (path,) = Path(storage).glob("trial/*/result.json")
        return [json.loads(line) for line in path.read_text().splitlines()]
