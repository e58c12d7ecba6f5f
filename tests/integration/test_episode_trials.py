"""Trials whose responses are episodes: lag, new weights within a batch, replay and a resume."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import checkpoints, fit, rows, untimed
from ray.tune import Callback
from ray.tune.logger import JsonLoggerCallback
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_real_actors import check_log_probs, run

from callbacks import grpo_callbacks
from grpo_trainable.config import GRPOConfig
from grpo_trainable.storage.checkpointing import read_checkpoint
from grpo_trainable.trainable import DetailedGRPO

SPEEDS = {"rollout": 60.0, "optimize": 20.0, "sync": 1.0}


def settings(game: str, **own: Any) -> dict[str, Any]:
    return {
        "placement": "disaggregated",
        "rounds": 4,
        "task": {"name": game},
        "env": {"patience_s": 60.0},
        "rollout": {"prompts": 4, "unit_prompts": 2, "group_size": 4, "max_new_tokens": 24},
        "optim": {"lr": 2e-3},
        "eval": {"every": 4, "prompts": 2, "samples": 1},
        "resources": {"deadline_s": 1e6},
        **own,
    }


REPLAY = {
    "buffer_capacity": 2,
    "buffer_sampling": "mixed",
    "buffer": {"sample_batches": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "own",
    [
        REPLAY,
        {"lag": 2, "weight_update": "in_flight", "loss": {"kl_monitor": False}},
        {"lag": 2, "weight_update": "interrupt_recompute"},
    ],
    ids=["replay", "in flight", "recompute"],
)
def test_every_token_of_an_episode_knows_its_weights(own: dict[str, Any]) -> None:
    config = GRPOConfig.from_dict(settings("guess", **own))
    learner, kept = run(config, SPEEDS, timing=1)
    mixed = check_log_probs(config, kept, learner.rounds)
    assert (mixed > 0) == config.in_mid_batch
    groups = [group for batches in learner.rounds for batch in batches for group in batch]
    holes = sum(int((group.extents - group.response_mask.sum(dim=1)).sum()) for group in groups)
    assert holes > 0
    for group in groups:
        assert group.turn_rewards is not None
        assert torch.equal(group.turn_rewards.nansum(dim=1), group.rewards)
    if config.lag == 0:
        assert learner.first_steps[0] == pytest.approx(1.0, abs=1e-5)


def test_a_resumed_trial_of_episodes_equals_the_one_that_went_on(
    trainable: Any, tmp_path: Path
) -> None:
    config = settings("calculator", placement="colocated", resources={}, **REPLAY)
    trial = trainable(config)
    trial.step()
    trial.step()
    trial.save_checkpoint(str(tmp_path / "middle"))
    expected = [untimed(trial.step()) for _ in range(2)]
    assert all(1 <= row["response/turns_mean"] <= 8 for row in expected)
    assert all(0 < row["env/calls_mean"] <= row["response/turns_mean"] for row in expected)
    trial.save_checkpoint(str(tmp_path / "end"))
    trial.stop()

    resumed = trainable(config)
    resumed.load_checkpoint(str(tmp_path / "middle"))
    assert [untimed(resumed.step()) for _ in range(2)] == expected
    resumed.save_checkpoint(str(tmp_path / "again"))
    one, other = read_checkpoint(tmp_path / "end"), read_checkpoint(tmp_path / "again")
    assert all(one.policy[name].equal(other.policy[name]) for name in one.policy)
    assert all(one.optimizer[name].equal(other.optimizer[name]) for name in one.optimizer)


class Keeps(Callback):
    """A callback such as a user may write. It keeps every row as JSON."""

    def __init__(self) -> None:
        self.rows: list[str] = []

    def on_trial_result(self, iteration: int, trials: list, trial: Any, result: dict, **info: Any):
        self.rows.append(json.dumps({k: v for k, v in result.items() if k != "config"}))


def test_a_users_tuner_with_a_game_logs_plain_rows_and_can_be_restored_outside_tune(
    trainable: Any, tmp_path: Path
) -> None:
    config = settings(
        "guess",
        placement="colocated",
        resources={},
        rounds=3,
        env={"max_turns": 6},
        checkpoint={"every": 1, "keep": 3},
    )
    first, last = Keeps(), Keeps()
    callbacks = [first, JsonLoggerCallback(), *grpo_callbacks(console=False), last]
    (result,) = fit(config, tmp_path / "tuned", DetailedGRPO, callbacks=callbacks)
    assert result.error is None
    directory = Path(result.path)
    assert "{" not in directory.name
    assert "max_turns" not in directory.name
    assert directory.name.startswith("DetailedGRPO_")

    assert first.rows == last.rows
    told = rows(directory)
    assert [json.loads(row)["training_iteration"] for row in first.rows] == [1, 2, 3]
    for row, said in zip(told, map(json.loads, first.rows), strict=True):
        assert said.items() <= row.items()
        assert 1 <= said["env/guesses_mean"] <= 6
        assert said["env/illegal_mean"] <= said["env/guesses_mean"]
        shares = [said[name] for name in said if name.endswith("_fraction") and "time/" in name]
        assert "time/rollout_fraction" in said
        assert sum(shares) - said["time/disturbed_fraction"] == pytest.approx(1.0)
    with (directory / "progress.csv").open(newline="") as file:
        assert [float(line["env/guesses_mean"]) for line in csv.DictReader(file)] == [
            row["env/guesses_mean"] for row in told
        ]
    events = EventAccumulator(str(directory))
    events.Reload()
    assert len(events.Scalars("env/guesses_mean")) == 3

    restored = trainable(config)
    for round_, path in enumerate(checkpoints(directory), start=1):
        restored.restore(path)
        assert restored.iteration == round_
        assert restored.get_state()["time_total"] == pytest.approx(
            told[round_ - 1]["time_total_s"], abs=1e-6
        )
        row = restored.train()
        if round_ < 3:
            assert row["training_iteration"] == round_ + 1
            assert row["time_total_s"] > told[round_ - 1]["time_total_s"]
            assert untimed(row) == untimed(told[round_])
        else:
            assert (row["done"], row["training_iteration"]) == (True, 3)
