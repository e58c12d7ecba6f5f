"""Processes killed during a running experiment."""

from __future__ import annotations

import csv
import errno
import io
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import checkpoints
import psutil
import pyarrow.parquet as pq
import pytest
from conftest import assert_no_actor_left, rows, trial_config
from ray import cloudpickle, tune

from callbacks import grpo_callbacks
from grpo_trainable.storage.checkpointing import TrialState, checkpoint_round
from grpo_trainable.trainable import DetailedGRPO
from reports.experiment import read_experiment
from reports.summary import compare, table

# The actors' processes can import neither this file nor `checkpoints`, which belongs to the unit
# tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(checkpoints)


class Killer(tune.Callback):
    """Callback that sends SIGKILL once to the process of each given role, after a given round."""

    def __init__(self, roles: dict[int, str]) -> None:
        """Set the roles to kill. Each key is the round after which the role is killed."""
        self.left = dict(roles)

    def on_trial_result(self, iteration: int, trials: list, trial: Any, result: dict, **info: Any):
        role = self.left.get(result["training_iteration"])
        for process in psutil.Process().children(recursive=True) if role else ():
            if f"ray::{role}" in " ".join(process.cmdline()):
                process.kill()
                self.left.pop(result["training_iteration"], None)


@pytest.mark.parametrize(
    ("placement", "killed"),
    [
        ("disaggregated", {2: "Generator", 4: "Learner", 7: "DetailedGRPO"}),
        ("colocated", {4: "Colocated"}),
    ],
)
def test_killed_process_costs_no_round_and_leaves_none_twice(
    ray_session: None, tmp_path: Path, placement: str, killed: dict[int, str]
) -> None:
    config = trial_config(placement=placement, rounds=8, checkpoint={"every": 3})
    killer = Killer(killed)
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
    assert not result.error
    assert not killer.left
    lines = rows(result.path)
    assert [line["training_iteration"] for line in lines] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert lines[-1]["count/trained"] == 32
    # A killed generator is replaced. After any other kill, the trial restarts from its last
    # checkpoint.
    asked_again = [line["count/redispatched"] > 0 for line in lines]
    generator_after = min((r for r, role in killed.items() if role == "Generator"), default=8)
    assert asked_again == [round_ > generator_after for round_ in range(1, 9)]
    restarts = {3 * (r // 3) for r, role in killed.items() if role != "Generator"}
    since = [line["iterations_since_restore"] for line in lines]
    assert [round_ for round_, n in enumerate(since) if n == 1] == [0, *sorted(restarts)]
    rounds = [
        entry["round"]
        for path in sorted((Path(result.path) / "rollouts").glob("*.parquet"))
        for entry in pq.read_table(path, columns=["round"]).to_pylist()
    ]
    assert rounds == [round_ for round_ in range(1, 9) for _ in range(16)]
    assert_no_actor_left()


class FullDisk(DetailedGRPO):
    """A trial that finds a full disk after round 4.

    After round 2, it also writes a checkpoint that Tune does not record.
    """

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        if self.iteration == 4:
            raise OSError(errno.ENOSPC, "a library's own words")
        super().save_checkpoint(checkpoint_dir)
        if self.iteration == 2:
            assert self._storage is not None
            state = {"pipeline": {"learner_round": 0}}
            checkpoints.write_checkpoint(
                Path(self._storage.trial_fs_path, "checkpoint_000004"),
                TrialState(state=state, policy={}, optimizer={}, groups=[]),
            )


@pytest.fixture(scope="module")
def troubled(
    ray_session: None, tmp_path_factory: pytest.TempPathFactory
) -> tuple[tune.Result, str]:
    """Run a trial of six rounds that finds a full disk; return its result and its output.

    The reward fails on one of three prompts. Each round has one prompt.
    """
    storage = tmp_path_factory.mktemp("troubled")
    prompts = [{"prompt": f"Write about {word}:", "answer": word} for word in ("a", "b", "bad")]
    train, held_out, reward = (storage / name for name in ("t.jsonl", "e.jsonl", "reward.py"))
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
        rounds=6,
        rollout={"prompts": 1, "unit_prompts": 1},
        eval={"prompts": 1},
        checkpoint={"every": 2},
        task={
            "train_file": str(train),
            "eval_file": str(held_out),
            "reward": f"{reward}:score",
        },
        resources={"deadline_s": 300.0},
    )
    with redirect_stdout(io.StringIO()) as out:
        (result,) = tune.Tuner(
            FullDisk,
            param_space=config,
            run_config=tune.RunConfig(
                name="troubled", storage_path=str(storage), verbose=0, callbacks=grpo_callbacks()
            ),
        ).fit()
    assert not result.error
    return result, out.getvalue()


def test_checkpoint_that_finds_no_space_is_counted_and_the_trial_goes_on(
    troubled: tuple[tune.Result, str],
) -> None:
    result, out = troubled
    trial, lines = Path(result.path), rows(result.path)
    assert [line["count/checkpoint_failures"] for line in lines] == [0, 0, 0, 0, 1, 1]
    # The previous checkpoint stays, and no checkpoint is overwritten.
    found = {path.name: checkpoint_round(path) for path in trial.glob("checkpoint_*")}
    # What could not be saved after round 4 is saved after round 5.
    numbers = {name.removeprefix("checkpoint_00000"): round_ for name, round_ in found.items()}
    assert numbers == {"0": 2, "4": 0, "5": 5, "6": 6}
    assert "could not be written (No space left on device)" in out


def test_round_of_a_prompt_that_cannot_be_scored_is_skipped_and_every_file_goes_on(
    troubled: tuple[tune.Result, str],
) -> None:
    """Each pass over the three prompts takes three rounds."""
    trial, history = Path(troubled[0].path), rows(troubled[0].path)
    assert [row["training_iteration"] for row in history] == [1, 2, 3, 4, 5, 6]
    assert (history[-1]["count/skipped_rounds"], history[-1]["version/learner"]) == (2, 4)
    skipped = [row["training_iteration"] for row in history if "reward/train_mean" not in row]
    assert len(skipped) == 2
    for kind in ("rollouts", "steps", "versions"):
        parts = {path.name: pq.read_table(path) for path in (trial / kind).glob("*.parquet")}
        assert len(parts) == 6
        for round_ in skipped:
            empty = parts[f"part-{round_:08d}.parquet"].num_rows == 0
            assert empty == (kind != "versions")
    with (trial / "progress.csv").open() as file:
        trained = [row["reward/train_mean"] for row in csv.DictReader(file)]
    assert [value == "" for value in trained] == [
        row["training_iteration"] in skipped for row in history
    ]
    # The report reads the same files.
    experiment = read_experiment(trial.parent)
    assert not experiment.trials[0].problems
    assert experiment.trials[0].arm in table(compare(experiment.trials))
