"""Interrupted responses in virtual time: their share of a round's batch, computed by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest
from virtual_time import all_prompt_indices

from grpo_trainable.config import GRPOConfig
from grpo_trainable.pipeline.rollout_metrics import interrupted_fraction
from grpo_trainable.simulation.groups import group_of
from grpo_trainable.simulation.runtime import constant_durations
from grpo_trainable.simulation.trial import VirtualTrial, virtual_trial

FRACTION = "response/interrupted_fraction"


def interrupted(prompt_index: int, response: int) -> bool:
    """Interrupt the first response to prompts 0 and 3, and the second one to prompts 2 and 5."""
    return (prompt_index + response) % 3 == 0


def trial_of(**settings: Any) -> VirtualTrial:
    """Return a trial with rounds of two prompts and two responses each."""
    rollout = {"prompts": 2, "group_size": 2, "overlong": "interrupt"}
    config = GRPOConfig.from_dict(
        {
            "placement": "disaggregated",
            "rounds": 8,
            "eval": {"every": 8, "prompts": 1, "samples": 1},
            **settings,
            "rollout": rollout | settings.get("rollout", {}),
        }
    )
    durations = constant_durations(rollout=64, optimize=32)
    return virtual_trial(config, durations=durations, interrupted=interrupted)


def by_hand(trial: VirtualTrial) -> list[float]:
    """Compute each round's share of interrupted responses from the prompts that it trained on."""
    shares = []
    for call in trial.trained:
        of_round = [interrupted(index, i) for index in all_prompt_indices(call) for i in range(2)]
        shares.append(sum(of_round) / len(of_round))
    return shares


def test_a_row_tells_the_share_of_responses_that_were_interrupted():
    reports = trial_of().run(3)
    # Of the four responses of each round, one is interrupted for prompts 0 and 1, two for prompts 2
    # and 3, and one for prompts 4 and 5.
    assert [report.metrics[FRACTION] for report in reports] == [0.25, 0.5, 0.25]


@pytest.mark.parametrize("overlong", ["score", "filter", "penalty"])
def test_a_row_of_other_trials_tells_none(overlong: str):
    (report,) = trial_of(rollout={"overlong": overlong}).run(1)
    assert FRACTION not in report.metrics


def test_groups_that_are_used_again_count_each_time():
    replay = {"buffer_capacity": 3, "buffer_sampling": "mixed", "buffer": {"sample_batches": 2}}
    trial = trial_of(placement="colocated", **replay)
    found = [report.metrics[FRACTION] for report in trial.run(8)]
    assert found == by_hand(trial)
    assert any(len(all_prompt_indices(call)) == 4 for call in trial.trained)
    # The two fresh prompts of each round alone would give other shares.
    fresh = [0.25, 0.5, 0.25, 0.25, 0.5, 0.25, 0.25, 0.5]
    assert found != fresh


@pytest.mark.parametrize("weight_update", ["between_batches", "interrupt_recompute", "in_flight"])
def test_interruptions_keep_the_lag_while_weights_arrive(weight_update: str):
    trial = trial_of(lag=2, weight_update=weight_update)
    reports = trial.run(8)
    assert [report.metrics[FRACTION] for report in reports] == by_hand(trial)
    for report in reports:
        assert report.metrics["lag/max"] <= 2
        sampled = [int(g.token_rounds[g.response_mask].min()) for g in report.groups]
        assert report.metrics["lag/max"] == max(report.round - 1 - age for age in sampled)
        assert report.metrics["count/dropped_stale"] == 0
    if weight_update != "between_batches":
        # Weights arrived within interrupted responses.
        assert any(
            len(set(versions[mask].tolist())) > 1 and not mask.all()
            for report in reports
            for group in report.groups
            for versions, mask in zip(group.token_versions, group.response_mask, strict=True)
        )


def test_what_a_response_reads_makes_its_group_no_older():
    weights = [(6, 3), (1, 0), (8, 4)]
    told = group_of(0, rewards=(0.0, 1.0), weights=weights, interrupted=(True, True))
    assert (told.oldest_version, told.oldest_round) == (6, 3)
    assert interrupted_fraction([told]) == 1.0
    half = group_of(0, rewards=(0.0, 1.0), weights=weights, interrupted=(True, False))
    assert (half.oldest_version, half.oldest_round) == (1, 0)
    assert interrupted_fraction([told, half]) == 0.75


def test_a_synchronous_run_with_replay_goes_on_as_if_it_had_not_stopped():
    replay = {"buffer_capacity": 3, "buffer_sampling": "uniform", "buffer": {"sample_batches": 2}}
    whole, first, second = (trial_of(placement="colocated", **replay) for _ in range(3))
    expected = [report.metrics[FRACTION] for report in whole.run(8)]
    rows = first.run(3)
    second.learners.load_state(first.learners.state())
    state = json.loads(json.dumps(first.pipeline.state()))
    second.pipeline.load_state(state, first.pipeline.buffer.groups())
    rows += second.run(5)
    assert [report.metrics[FRACTION] for report in rows] == expected
    trained = [all_prompt_indices(call) for trial in (first, second) for call in trial.trained]
    assert trained == [all_prompt_indices(call) for call in whole.trained]
