"""Processes that are killed under a running experiment."""

from __future__ import annotations

import csv
import errno
import json
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
from conftest import assert_no_actor_left, trial_config
from ray import tune

from callbacks import grpo_callbacks
from grpo_trainable.checkpointing import TrialState, checkpoint_round, write_checkpoint
from grpo_trainable.trainable import DetailedGRPO
from reports.experiment import read_experiment
from reports.summary import compare, table


class KillOnce(tune.Callback):
    """SIGKILL to the process of a role after round 3, once."""

    def __init__(self, role: str) -> None:
        self._role, self._done = role, False

    def on_trial_result(self, iteration: int, trials: list, trial: Any, result: dict, **info: Any):
        if self._done or result["training_iteration"] < 3:
            return
        for process in psutil.Process().children(recursive=True):
            if f"ray::{self._role}" in " ".join(process.cmdline()):
                process.kill()
                self._done = True
        assert self._done


@pytest.mark.parametrize(
    ("role", "placement", "starts_over"),
    [
        ("Generator", "disaggregated", False),
        ("Learner", "disaggregated", True),
        ("Colocated", "colocated", True),
        ("DetailedGRPO", "disaggregated", True),
    ],
)
def test_killed_process_costs_no_round_and_leaves_none_twice(
    ray_session: None, tmp_path: Path, role: str, placement: str, starts_over: bool
) -> None:
    config = trial_config(placement=placement, rounds=6, checkpoint={"every": 2})
    killer = KillOnce(role)
    (result,) = tune.Tuner(
        DetailedGRPO,
        param_space=config,
        run_config=tune.RunConfig(
            name="killed",
            storage_path=str(tmp_path),
            verbose=0,
            callbacks=[*grpo_callbacks(console=False), killer],
            failure_config=tune.FailureConfig(max_failures=2),
        ),
    ).fit()
    assert result.error is None or not result.error
    assert killer._done
    trial = Path(result.path)
    lines = [json.loads(line) for line in (trial / "result.json").read_text().splitlines()]
    assert [line["training_iteration"] for line in lines] == [1, 2, 3, 4, 5, 6]
    last = lines[-1]
    assert last["count/trained"] == 24
    assert (last["count/redispatched"] > 0) == (role == "Generator")
    # A trial that was started again went on from its last checkpoint, not from the start.
    assert (last["iterations_since_restore"] < 6) == starts_over
    rounds = [
        entry["round"]
        for path in sorted((trial / "rollouts").glob("*.parquet"))
        for entry in pq.read_table(path, columns=["round"]).to_pylist()
    ]
    assert rounds == [round_ for round_ in range(1, 7) for _ in range(16)]
    assert_no_actor_left()


def test_checkpoint_that_finds_no_space_is_counted_and_the_trial_goes_on(
    ray_session: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class FullDisk(DetailedGRPO):
        """There is no space for the checkpoint after round 4, and Tune has not noted one."""

        def save_checkpoint(self, checkpoint_dir: str) -> None:
            if self.iteration == 4:
                raise OSError(errno.ENOSPC, "a library's own words")
            super().save_checkpoint(checkpoint_dir)
            if self.iteration == 2:
                write_checkpoint(Path(self._storage.trial_fs_path, "checkpoint_000004"), nobodys)

    nobodys = TrialState(
        state={"pipeline": {"learner_round": 0}}, policy={}, optimizer={}, groups=[]
    )

    (result,) = tune.Tuner(
        FullDisk,
        param_space=trial_config(placement="colocated", rounds=5, checkpoint={"every": 2}),
        run_config=tune.RunConfig(
            name="full", storage_path=str(tmp_path), verbose=0, callbacks=grpo_callbacks()
        ),
    ).fit()
    assert not result.error
    trial = Path(result.path)
    lines = [json.loads(line) for line in (trial / "result.json").read_text().splitlines()]
    assert [line["count/checkpoint_failures"] for line in lines] == [0, 0, 0, 0, 1]
    # The one before stays, and none is written over.
    found = {path.name: checkpoint_round(path) for path in trial.glob("checkpoint_*")}
    assert found == {"checkpoint_000000": 2, "checkpoint_000004": 0, "checkpoint_000005": 5}
    assert "could not be written (No space left on device)" in capsys.readouterr().out


def test_round_of_a_prompt_that_cannot_be_scored_is_skipped_and_every_file_goes_on(
    ray_session: None, tmp_path: Path
) -> None:
    """One of three prompts fails, one prompt a round."""
    prompts = [{"prompt": f"Write about {word}:", "answer": word} for word in ("a", "b", "bad")]
    train, held_out, reward = (tmp_path / name for name in ("t.jsonl", "e.jsonl", "reward.py"))
    train.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    held_out.write_text(json.dumps(prompts[0]) + "\n")
    reward.write_text(
        "def score(response, ground_truth):\n"
        "    if ground_truth == 'bad':\n"
        "        raise ValueError('no answer')\n"
        "    return float(len(response) % 2)\n"
    )
    config = trial_config(
        placement="colocated",
        rounds=3,
        rollout={"prompts": 1, "unit_prompts": 1},
        eval={"prompts": 1},
        task={
            "train_file": str(train),
            "eval_file": str(held_out),
            "reward": f"{reward}:score",
        },
        resources={"deadline_s": 300.0},
    )
    (result,) = tune.Tuner(
        DetailedGRPO,
        param_space=config,
        run_config=tune.RunConfig(
            name="skips",
            storage_path=str(tmp_path),
            verbose=0,
            callbacks=grpo_callbacks(console=False),
        ),
    ).fit()
    assert not result.error
    trial = Path(result.path)
    rows = [json.loads(line) for line in (trial / "result.json").read_text().splitlines()]
    assert [row["training_iteration"] for row in rows] == [1, 2, 3]
    assert (rows[-1]["count/skipped_rounds"], rows[-1]["version/learner"]) == (1, 2)
    (skipped,) = (row for row in rows if "reward/train_mean" not in row)
    for kind in ("rollouts", "steps", "versions"):
        parts = {path.name: pq.read_table(path) for path in (trial / kind).glob("*.parquet")}
        assert len(parts) == 3
        empty = parts[f"part-{skipped['training_iteration']:08d}.parquet"].num_rows == 0
        assert empty == (kind != "versions")
    with (trial / "progress.csv").open() as file:
        trained = [row["reward/train_mean"] for row in csv.DictReader(file)]
    assert [value == "" for value in trained] == [row is skipped for row in rows]
    # The report is made of the same files.
    experiment = read_experiment(tmp_path / "skips")
    assert not experiment.trials[0].problems
    assert experiment.trials[0].arm in table(compare(experiment.trials))
