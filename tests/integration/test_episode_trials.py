"""Trials whose responses are episodes: lag, new weights within a batch, replay and a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import untimed
from test_real_actors import check_log_probs, run

from grpo_trainable.config import GRPOConfig
from grpo_trainable.storage.checkpointing import read_checkpoint

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
    trial.save_checkpoint(str(tmp_path / "end"))
    trial.stop()

    resumed = trainable(config)
    resumed.load_checkpoint(str(tmp_path / "middle"))
    assert [untimed(resumed.step()) for _ in range(2)] == expected
    resumed.save_checkpoint(str(tmp_path / "again"))
    one, other = read_checkpoint(tmp_path / "end"), read_checkpoint(tmp_path / "again")
    assert all(one.policy[name].equal(other.policy[name]) for name in one.policy)
    assert all(one.optimizer[name].equal(other.optimizer[name]) for name in one.optimizer)
