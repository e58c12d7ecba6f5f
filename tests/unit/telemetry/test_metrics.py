from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from virtual_time import one_token_group

from grpo_trainable.pipeline.rollout_metrics import (
    info_means,
    interrupted_fraction,
    part_means,
    repeated_fraction,
    rollout_metrics,
)
from grpo_trainable.telemetry.metrics import (
    BY_TASK,
    EVAL_PART_FIRST,
    EVAL_PART_MEAN,
    INFO_MEAN,
    NAMES,
    PART_MEAN,
    ActorSpan,
    is_named_by_user,
    named_metrics,
    rllib_metrics,
    stage_seconds,
)
from grpo_trainable.telemetry.stages import WORK
from grpo_trainable.telemetry.timers import Span


def test_names_are_area_and_name() -> None:
    assert all(
        re.fullmatch(r"[a-z_]+(/[a-z_0-9]+){1,2}|num_env_steps_sampled_lifetime", n) for n in NAMES
    )


def test_rollout_metrics_by_hand() -> None:
    # Round 5 trains on groups that the weights of rounds 5, 3 and 1 sampled. It is the first use of
    # the groups of rounds 5 and 3, and the second use of the group of round 1.
    long = replace(
        one_token_group(1, rewards=(1.0, 0.0), round_=3, uses=1),
        response_ids=torch.zeros(2, 3, dtype=torch.int64),
        response_mask=torch.tensor([[True, True, True], [True, False, True]]),
        token_rounds=torch.tensor([[3, 4, 5], [4, 0, 5]], dtype=torch.int32),
        finished=torch.tensor([False, True]),
    )
    groups = [
        one_token_group(0, rewards=(1.0, 1.0), round_=5, uses=1),
        long,
        one_token_group(2, rewards=(0.5, 0.0), round_=1, uses=2),
    ]
    row = rollout_metrics(groups, learner_round=5)
    rewards = [1.0, 1.0, 1.0, 0.0, 0.5, 0.0]
    mean = sum(rewards) / 6
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / 5)
    assert row == pytest.approx(
        {
            "reward/train_mean": mean,
            "reward/train_std": std,
            "response/length_mean": (1 + 1 + 3 + 2 + 1 + 1) / 6,
            "response/truncated_fraction": 1 / 6,
            "response/repeated_fraction": 0.0,  # no response has four tokens
            "group/zero_advantage_fraction": 1 / 3,
            "lag/max": 2.0,  # only first uses count, and the round 0 in the hole does not
            "lag/mean": 1.0,
            "buffer/age_max": 4.0,
            "buffer/age_mean": 2.0,
            "buffer/uses_mean": 4 / 3,
        }
    )
    assert all(type(value) is float for value in row.values())
    assert row.keys() <= NAMES


def test_runs_of_four_tokens_that_occurred_before_count_as_repeated() -> None:
    ids = torch.tensor(
        [
            [7, 7, 7, 7, 7, 7],  # three equal runs: 2/3
            [1, 2, 3, 4, 5, 6],  # three different runs: 0
            [1, 2, 3, 4, 0, 0],  # one run, then padding: 0
            [1, 1, 1, 0, 0, 0],  # no run, so the response does not count
        ]
    )
    mask = torch.tensor([[True] * n + [False] * (6 - n) for n in (6, 6, 4, 3)])
    group = replace(one_token_group(0, rewards=(1.0, 0.0, 0.0, 0.0), uses=1), response_ids=ids)
    assert repeated_fraction([replace(group, response_mask=mask)]) == pytest.approx(2 / 9)


def test_a_response_with_a_hole_was_interrupted() -> None:
    masks = (
        [[True, True, True], [True, False, True]],  # a token was inserted into the second response
        [[True, False, False], [True, True, False]],  # these ended early, which is not a hole
    )
    groups = [
        replace(one_token_group(i, rewards=(1.0, 0.0), uses=1), response_mask=torch.tensor(mask))
        for i, mask in enumerate(masks)
    ]
    assert interrupted_fraction(groups) == 1 / 4
    assert "response/interrupted_fraction" in NAMES


def test_turns_of_episodes_are_the_actions_that_were_answered() -> None:
    """One episode has three turns, one has a single turn, and two have two turns each.

    The second episode ends with an action that was cut off, which is not a turn.
    """
    nan = math.nan
    turns = (
        [[0.0, nan, 0.0, 1.0], [0.0, nan, nan, nan]],
        [[0.0, 1.0], [0.0, 0.5]],
    )
    groups = [
        replace(one_token_group(i, rewards=(1.0, 0.0), uses=1), turn_rewards=torch.tensor(own))
        for i, own in enumerate(turns)
    ]
    row = rollout_metrics(groups, learner_round=0)
    assert row["response/turns_mean"] == (3 + 1 + 2 + 2) / 4
    assert row.keys() <= NAMES


def test_numbers_of_environments_are_means_over_all_episodes() -> None:
    """Two of four groups have episodes with calls, and one group has no `info` at all."""
    infos: list[dict[str, float] | None] = [{"calls": 1.5}, {"calls": 0.5, "a/b": 2.0}, {}, None]
    groups = [
        replace(one_token_group(i, rewards=(1.0, 0.0), uses=1), info=info)
        for i, info in enumerate(infos)
    ]
    means = info_means(groups, ["a/b", "calls", "never"])
    row = named_metrics(INFO_MEAN, means)
    assert row == {"env/a/b_mean": 0.5, "env/calls_mean": 0.5, "env/never_mean": 0.0}
    assert all(map(is_named_by_user, row))
    assert not any(map(is_named_by_user, NAMES | set(BY_TASK)))


def test_parts_of_a_reward_are_means_over_the_responses_that_have_them() -> None:
    """Four responses have parts. Two are short, one is not, and one has only the part `found`."""
    parts: list[dict[str, list[float | None]] | None] = [
        {"found": [1.0, 0.0], "short": [1.0, None]},
        {"found": [1.0, 1.0], "short": [1.0, 0.0]},
        None,
    ]
    groups = [
        replace(one_token_group(i, rewards=(1.0, 0.0), uses=1), parts=own)
        for i, own in enumerate(parts)
    ]
    means = part_means(groups)
    assert means == {"found": 0.75, "short": pytest.approx(2 / 3)}
    row = named_metrics(PART_MEAN, means) | named_metrics(EVAL_PART_MEAN, means)
    row |= named_metrics(EVAL_PART_FIRST, means)
    assert set(row) == {
        *("part/found_mean", "part/short_mean"),
        *("eval_part/found_mean", "eval_part/short_mean"),
        *("eval_part/found_first", "eval_part/short_first"),
    }
    assert all(map(is_named_by_user, row))
    assert part_means(groups[2:]) == {}


def test_a_single_reward_has_no_spread() -> None:
    row = rollout_metrics([one_token_group(0, rewards=(0.5,), uses=1)], learner_round=0)
    assert row["reward/train_std"] == 0.0


def test_stage_seconds_by_hand() -> None:
    spans = [
        ActorSpan("generator", "generator-0", Span("rollout", 0.0, 2.0)),
        ActorSpan("generator", "generator-0", Span("rollout", 5.0, 6.0)),
        ActorSpan("generator", "generator-1", Span("rollout", 0.0, 2.5)),
        ActorSpan("generator", "generator-1", Span("reward", 2.5, 3.0)),
        ActorSpan("generator", "generator-0", Span("sync", 6.0, 6.25)),
        ActorSpan("generator", "generator-1", Span("sync", 6.0, 6.5)),
        ActorSpan("learner", "learner", Span("sync", 5.0, 6.0)),
        ActorSpan("learner", "learner", Span("optimize", 3.0, 5.0)),
        ActorSpan("generator", "generator-0", Span("idle", 2.0, 5.0)),
        ActorSpan("generator", "generator-1", Span("idle", 3.0, 6.0)),
        ActorSpan("generator", "generator-1", Span("idle", 6.5, 7.5)),
        ActorSpan("learner", "learner", Span("idle", 0.0, 3.0)),
    ]
    assert stage_seconds(spans) == {
        "time/rollout_s": 3.0,  # of the generator with the longest rollout time
        "time/vine_s": 0.0,
        "time/reward_s": 0.5,
        "time/optimize_s": 2.0,
        "time/sync_s": 1.0 + 0.5,  # publish and load run one after the other
        "time/reference_s": 0.0,
        "time/eval_s": 0.0,
        "time/generator_idle_s": (3.0 + 4.0) / 2,
        "time/learner_idle_s": 3.0,
    }


def test_stage_seconds_of_nothing_are_zero() -> None:
    seconds = stage_seconds([])
    assert set(seconds.values()) == {0.0}
    assert seconds.keys() <= NAMES


def test_what_two_threads_of_an_actor_do_in_one_stage_at_a_time_counts_once() -> None:
    spans = [
        ActorSpan("generator", "generator-0", Span("eval", 0.0, 4.0)),
        ActorSpan("generator", "generator-0", Span("eval", 3.0, 5.0, concurrent=True)),
        ActorSpan("generator", "generator-0", Span("eval", 6.0, 7.0, concurrent=True)),
    ]
    assert stage_seconds(spans)["time/eval_s"] == 6.0


def test_both_roles_of_a_colocated_actor_are_told_apart() -> None:
    spans = [
        ActorSpan("generator", "worker", Span("sync", 1.0, 2.0)),
        ActorSpan("learner", "worker", Span("sync", 0.0, 1.0)),
    ]
    assert stage_seconds(spans)["time/sync_s"] == 2.0


def test_every_stage_that_an_actor_times_is_in_the_list_of_stages() -> None:
    root = Path(__file__).resolve().parents[3] / "grpo_trainable"
    source = "".join(path.read_text(encoding="utf-8") for path in root.rglob("*.py"))
    timed = re.findall(r"\b(?:clock|Span)\(([^)]*)\)", source)
    found = set(re.findall(r'"([a-z]+)"', "".join(timed)))
    assert {"rollout", "optimize", "sync", "eval", "reference"} <= found
    beside = {"checkpoint", "round"}  # spans of the trial, which are only in traces
    assert found <= {*WORK, *beside}


def test_rllib_names_repeat_our_figures() -> None:
    row = {"reward/train_mean": 0.5, "loss/policy": -0.25, "optim/lr": 1e-4, "optim/grad_norm": 2.0}
    got = rllib_metrics(row, responses=64, tokens=640)
    assert got == {
        "env_runners/episode_return_mean": 0.5,
        "env_runners/num_episodes_lifetime": 64.0,
        "num_env_steps_sampled_lifetime": 640.0,
        "learners/default_policy/total_loss": -0.25,
        "learners/default_policy/curr_lr": 1e-4,
        "learners/default_policy/gradients_default_optimizer_global_norm": 2.0,
    }
    assert got.keys() <= NAMES


def test_every_metric_has_a_row_in_the_docs_and_every_row_is_a_metric() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "metrics.md").read_text("utf-8")
    lines = (line for line in page.splitlines() if line.startswith("| `"))
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    # The rows of metrics have five cells: name, unit, source, healthy value, when absent.
    of_metrics = [row for row in rows if len(row) == 5]
    metrics = {*NAMES, *BY_TASK, INFO_MEAN, PART_MEAN, EVAL_PART_MEAN, EVAL_PART_FIRST}
    assert sorted(row[0].strip("`") for row in of_metrics) == sorted(metrics)
    assert [row[0] for row in of_metrics if not all(row[1:4]) and "_fraction" not in row[0]] == []
