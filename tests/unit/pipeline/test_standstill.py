"""A trial whose rewards teach nothing says so once, and again after a phase with signal."""

from __future__ import annotations

import json
from typing import Any

import pytest

from grpo_trainable.config import GRPOConfig
from grpo_trainable.pipeline.standstill import PATIENCE
from grpo_trainable.simulation.trial import VirtualTrial, virtual_trial
from grpo_trainable.telemetry.metrics import without_signal

PROMPTS = 2  # per round


def config_of(rounds: int, **values: Any) -> GRPOConfig:
    data: dict[str, Any] = {
        "placement": "disaggregated",
        "rounds": rounds,
        "rollout": {"prompts": PROMPTS, "group_size": 2},
        "eval": {"every": 64, "prompts": 3, "samples": 2},
        "resources": {"deadline_s": 1e6},
    }
    for name, value in values.items():
        data[name] = {**data.get(name, {}), **value} if isinstance(value, dict) else value
    return GRPOConfig.from_dict(data)


def still_in(config: GRPOConfig, *rounds: int) -> VirtualTrial:
    """Return a trial in which, in these rounds, all responses to a prompt earn the same reward.

    Rounds count from 1.
    """
    return virtual_trial(
        config, equal_rewards=lambda index, weights_round: index // PROMPTS + 1 in rounds
    )


def told(trial: VirtualTrial, rounds: int) -> list[int]:
    """Return the rounds whose report notes that there is no signal."""
    return [
        report.round
        for report in trial.run(rounds)
        if any(note.startswith("no signal") for note in report.notes)
    ]


def test_it_is_told_once_after_four_rounds_in_a_row():
    assert PATIENCE == 4
    assert told(still_in(config_of(7), *range(1, 8)), 7) == [4]


def test_a_round_with_signal_begins_the_count_anew():
    assert told(still_in(config_of(8), 1, 2, 3, 5, 6, 7), 8) == []
    assert told(still_in(config_of(12), *range(1, 6), *range(7, 13)), 12) == [4, 10]


@pytest.mark.parametrize("zero_advantage", ["filter", "resample"])
def test_rounds_that_were_left_without_a_group_count(zero_advantage):
    rollout = {"zero_advantage": zero_advantage}
    trial = virtual_trial(config_of(6, rollout=rollout), equal_rewards=lambda index, round_: True)
    assert told(trial, 6) == [4]


def test_the_note_is_one_line_that_says_what_to_do():
    *_, last = still_in(config_of(4), 1, 2, 3, 4).run(4)
    (note,) = last.notes
    assert "\n" not in note
    assert note.startswith("no signal for 4 rounds: all responses to each prompt earned the same")
    for word in ("(mean 0.", "task.reward", "rollout.temperature", "prompts",
                 "rollout.zero_advantage=resample", "docs/running.md"):  # fmt: skip
        assert word in note


@pytest.mark.parametrize("advantage", ["batch", "gae"])
def test_advantages_that_learn_from_equal_rewards_never_stand_still(advantage):
    config = config_of(6, loss={"advantage": advantage})
    assert told(still_in(config, *range(1, 7)), 6) == []


@pytest.mark.parametrize(
    "values",
    [
        {"loss": {"teacher": "/a/policy"}},
        {"loss": {"kl_coef": 0.1, "kl_in": "reward"}},
        {"rollout": {"overlong": "penalty"}},
        {"task": {"length_penalty": 0.1, "length_target": 9}},
        {"task": {"reward_weights": '{"format": 1, "answer": 1}', "normalize_parts": True}},
    ],
)
def test_what_is_taught_otherwise_does_not_stand_still(values):
    assert told(still_in(config_of(6, **values), *range(1, 7)), 6) == []


def test_weights_of_parts_do_not_teach_what_their_sum_does_not():
    config = config_of(4, task={"reward_weights": '{"format": 1, "answer": 1}'})
    assert told(still_in(config, *range(1, 5)), 4) == [4]


def test_a_penalty_does_not_teach_what_is_left_out_by_its_rewards():
    config = config_of(6, rollout={"overlong": "penalty", "zero_advantage": "filter"})
    assert told(still_in(config, *range(1, 7)), 6) == [4]


@pytest.mark.parametrize("before", [2, 4, 5])
def test_a_restored_trial_goes_on_counting(before):
    config = config_of(8)
    first, second = still_in(config, *range(1, 9)), still_in(config, *range(1, 9))
    notes = told(first, before)
    second.learners.load_state(first.learners.state())
    state = json.loads(json.dumps(first.pipeline.state()))
    second.pipeline.load_state(state, first.pipeline.buffer.groups())
    assert notes + told(second, 8 - before) == [4]


@pytest.mark.parametrize(
    ("row", "still"),
    [
        ({"reward/train_mean": 0.5, "group/zero_advantage_fraction": 1.0}, True),
        ({"reward/train_mean": 0.5, "group/zero_advantage_fraction": 0.9}, False),
        ({"count/skipped_rounds": 1.0}, True),
    ],
)
def test_signal_by_hand(row, still):
    assert without_signal(row) is still
