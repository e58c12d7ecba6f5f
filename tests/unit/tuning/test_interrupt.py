"""What the command says of an interrupted experiment."""

from __future__ import annotations

import json
from pathlib import Path

import experiments

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
    (behind / "checkpoint_000001").mkdir()  # cut short
    trial("async_k4", 2)

    assert left_off(read_experiment(directory).trials, planned=6) == [
        "interrupted: 1 of 6 trials done, 2 not begun",
        "  sync/0      saved after round 5 of 16",
        "  async_k1/0  reached round 7 of 16, goes on from round 4",
        "  async_k4/0  reached round 2 of 16, not saved: begins anew",
    ]
