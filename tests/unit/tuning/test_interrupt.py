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
    (behind / "checkpoint_000001").mkdir()  # cut off
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
        "interrupted: 1 of 5 trials done, 1 stopped by the scheduler, 3 not started"
    ]


SILENT_TUNE = """
import signal, sys, time
from functools import partial
from launch.tune import plan_of, parse_arguments, say_last_words
from tuning import interrupt

storage, words, words_s = sys.argv[1:]
interrupt.ROUND_S[signal.SIGINT], interrupt.TUNE_S, interrupt.WORDS_S = 0.1, 0.1, float(words_s)
argv = ["--space", "async_vs_sync", "--name", "e", "--storage", storage]
plan = plan_of(parse_arguments(argv))
last = {"said": partial(say_last_words, plan), "hang": lambda: time.sleep(600)}
interrupt.Interrupt(last[words], lambda: None).install()
signal.signal(signal.SIGUSR1, lambda *_: None)  # as Tune's, which waits for trials to stop
signal.raise_signal(signal.SIGINT)
time.sleep(600)
"""


def end_of_silent_tune(storage: Path, words: str, words_s: float) -> subprocess.CompletedProcess:
    """Run the command when Tune does not end in time."""
    arguments = [sys.executable, "-c", SILENT_TUNE, str(storage), words, str(words_s)]
    root = Path(__file__).resolve().parents[3]
    run = subprocess.run(arguments, cwd=root, capture_output=True, text=True, timeout=120)
    assert run.returncode == 130, run.stderr
    return run


@pytest.mark.slow
def test_a_trial_whose_round_takes_too_long_is_told_with_what_it_loses(tmp_path):
    directory = experiments.write_experiment(tmp_path / "e")
    rows = [experiments.row(n) for n in range(1, 4)]
    experiments.write_trial(directory, experiments.config("colocated_k8", rounds=12), rows)
    run = end_of_silent_tune(tmp_path, "said", 60.0)
    text = "time is up: a trial that has not saved continues from its last checkpoint"
    assert run.stderr.splitlines()[-1] == text
    go_on, *left = run.stdout.splitlines()
    assert go_on.startswith("continue with: ")
    assert "--resume must --name e" in go_on
    assert left == [
        "interrupted: 0 of 8 trials done, 7 not started",
        "  colocated_k8/0  reached round 3 of 12, not saved: starts from round 0",
    ]


@pytest.mark.slow
def test_a_disk_that_hangs_does_not_keep_the_command_from_ending(tmp_path):
    assert end_of_silent_tune(tmp_path, "hang", 0.1).stdout == ""
