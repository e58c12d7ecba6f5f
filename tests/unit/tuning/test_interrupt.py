"""Messages of the command about an interrupted experiment."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import experiments
import pytest

from reports.experiment import read_experiment
from tuning.interrupt import left_off


def checkpoint(trial: Path, number: int, round_: int) -> None:
    directory = trial / f"checkpoint_{number:06d}"
    directory.mkdir()
    state = {"pipeline": {"learner_round": round_}}
    (directory / "state.json").write_text(json.dumps(state))


def test_each_trial_that_has_begun_is_told_with_the_round_it_goes_on_from(tmp_path):
    directory = experiments.write_experiment(tmp_path / "e")

    def trial(arm: str, rounds: int, *, done: bool = False) -> Path:
        rows = [experiments.row(n, done=done and n == rounds) for n in range(1, rounds + 1)]
        return experiments.write_trial(directory, experiments.config(arm, rounds=16), rows)

    trial("colocated_k1", 16, done=True)
    saved = trial("sync", 5)
    checkpoint(saved, 0, 4)
    checkpoint(saved, 1, 5)
    behind = trial("async_k1", 7)
    checkpoint(behind, 0, 4)
    (behind / "checkpoint_000001").mkdir()  # cut off before its first file
    trial("async_k4", 2)
    trial("colocated_k8", 0)

    assert left_off(read_experiment(directory).trials, planned=7) == [
        "interrupted: 1 of 7 trials done, 2 not started",
        "  colocated_k8/0  had not finished its first round: starts from round 0",
        "  sync/0          saved after round 5 of 16",
        "  async_k1/0      reached round 7 of 16, continues from round 4",
        "  async_k4/0      reached round 2 of 16, not saved: starts from round 0",
    ]


def test_trials_that_a_scheduler_stopped_are_counted_apart(tmp_path):
    directory = experiments.write_experiment(tmp_path / "e")
    for arm, rounds in (("colocated_k1", 16), ("sync", 4)):
        rows = [experiments.row(n, done=n == rounds) for n in range(1, rounds + 1)]
        experiments.write_trial(directory, experiments.config(arm, rounds=16), rows)
    assert left_off(read_experiment(directory).trials, planned=5) == [
        "interrupted: 1 of 5 trials done, 1 stopped by a scheduler or stopper, 3 not started"
    ]


AFTER_RAY = """
import os, signal, sys
from tuning.interrupt import raise_on_interrupt

raise_on_interrupt()
signal.signal(signal.SIGINT, lambda *_: print("a handler of Ray"))
signal.signal(signal.SIGTERM, lambda *_: print("a handler of Ray"))
raise_on_interrupt()
try:
    signal.raise_signal(getattr(signal, sys.argv[1]))
except KeyboardInterrupt:
    print("interrupted", os.environ["TUNE_DISABLE_SIGINT_HANDLER"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_while_tune_does_not_run_ends_the_command(name):
    root = Path(__file__).resolve().parents[3]
    arguments = [sys.executable, "-c", AFTER_RAY, name]
    run = subprocess.run(arguments, cwd=root, capture_output=True, text=True, timeout=120)
    assert run.stdout == "interrupted 1\n", run.stderr
