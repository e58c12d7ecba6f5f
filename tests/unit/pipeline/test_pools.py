"""Difficulty pools: the example that each prompt draws, and identical draws in a resumed run."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_pipeline import (
    bounded,
    config_of,
    config_with_generators,
    configs,
    hand_over,
    history,
    seeds,
    speeds,
    untimed,
)
from test_resample import assert_accounts_close, resampled, shares, some_equal
from virtual_time import long_tailed_durations

from grpo_trainable.config import ConfigError, GRPOConfig
from grpo_trainable.models.directory import policy_tokenizer
from grpo_trainable.pipeline.pools import DifficultyPools
from grpo_trainable.simulation.trial import VirtualTrial, virtual_trial
from grpo_trainable.tasks.prompts import Prompts, build_task


def pools_of(size: int, **settings: Any) -> DifficultyPools:
    config = GRPOConfig.from_dict({"seed": 3, "pools": {"enabled": True, **settings}})
    return DifficultyPools(config, size)


def settled(pools: DifficultyPools, answers: dict[int, float | None]) -> dict[str, float]:
    """Pick all examples and settle them. `answers` maps each example to its score, or to None."""
    by_example = dict(zip(pools.pick(range(len(answers))), range(len(answers)), strict=True))
    assert by_example.keys() == answers.keys(), "each was picked once"
    known = {by_example[e]: answer for e, answer in answers.items() if answer is not None}
    return pools.settle(range(len(answers)), known)


def test_every_example_is_drawn_once_before_any_is_drawn_again() -> None:
    pools = pools_of(7)
    first, second = pools.pick(range(7)), pools.pick(range(7, 14))
    assert sorted(first) == sorted(second) == list(range(7))
    assert first != second
    assert first != list(range(7))


def test_a_prompt_is_the_same_example_when_it_is_asked_for_again() -> None:
    pools = pools_of(100)
    assert pools.pick(range(5)) == pools.pick(range(5))
    other = pools_of(100)
    other.pick(range(3))
    assert other.pick(range(3, 5)) == pools.pick([3, 4])


def test_pools_by_hand() -> None:
    """Easy is above 0.8 and hard below 0.2; examples without a score are in between."""
    pools = pools_of(6)
    row = settled(pools, {0: 1.0, 1: 0.9, 2: 0.8, 3: 0.2, 4: 0.0, 5: None})
    assert row == {
        "pool/easy_size": 2,
        "pool/mid_size": 3,
        "pool/hard_size": 1,
        "pool/new_size": 1,
        "pool/easy_drawn": 0,
        "pool/mid_drawn": 6,
        "pool/hard_drawn": 0,
    }


def test_the_pass_rate_runs_by_hand() -> None:
    # The pass rate of one example: 1, then 0.75 · 1 + 0.25 · 0 = 0.75, then 0.75 · 0.75 = 0.5625.
    pools = pools_of(1, memory=0.75, easy_above=0.74, hard_below=0.57)
    sizes = []
    for index, answer in enumerate((1.0, 0.0, 0.0)):
        pools.pick([index])
        row = pools.settle([index], {index: answer})
        sizes.append([row[f"pool/{name}_size"] for name in ("easy", "mid", "hard")])
    assert sizes == [[1, 0, 0], [1, 0, 0], [0, 0, 1]]


def test_a_memory_of_0_is_the_latest_group_alone() -> None:
    pools = pools_of(1, memory=0.0)
    for index, answer in enumerate((1.0, 0.0, 0.5)):
        pools.pick([index])
        row = pools.settle([index], {index: answer})
    assert row["pool/mid_size"] == 1


@pytest.mark.slow
def test_pools_are_drawn_by_their_shares() -> None:
    pools = pools_of(9, easy=1.0, mid=2.0, hard=5.0)
    settled(pools, {e: (1.0, 0.5, 0.0)[e % 3] for e in range(9)})
    drawn = Counter(e % 3 for e in pools.pick(range(9, 4009)))
    # 500, 1000 and 2500 of 4000, within five standard deviations.
    for kind, (expected, sd) in enumerate(((500, 20.9), (1000, 27.4), (2500, 30.6))):
        assert abs(drawn[kind] - expected) < 5 * sd


def test_a_pool_is_gone_through_evenly() -> None:
    pools = pools_of(9, easy=0.0, mid=0.0, hard=1.0)
    settled(pools, {e: (1.0, 0.5, 0.0)[e % 3] for e in range(9)})
    assert Counter(pools.pick(range(9, 39))) == {2: 10, 5: 10, 8: 10}


def test_where_every_pool_with_a_share_is_empty_the_others_are_drawn() -> None:
    pools = pools_of(5, easy=0.0, mid=0.0, hard=1.0)
    assert sorted(pools.pick(range(5))) == list(range(5))


@pytest.mark.parametrize("stop", [0, 1, 7])
def test_pools_go_on_from_a_state_as_they_would_have(stop: int) -> None:
    def answers(drawn: list[int]) -> dict[int, float]:
        return {index: (index * 7 % 11) / 10 for index in drawn if index % 5}

    def run(pools: DifficultyPools, rounds: range) -> list[Any]:
        seen = []
        for round_ in rounds:
            # Two rounds are in flight at a time.
            seen.append(pools.pick(range(4 * round_, 4 * round_ + 8)))
            drawn = list(range(4 * round_, 4 * round_ + 4))
            seen.append(pools.settle(drawn, answers(drawn)))
        return seen

    whole = pools_of(10)
    expected = run(whole, range(12))
    first, second = pools_of(10), pools_of(10)
    seen = run(first, range(stop))
    second.load_state(json.loads(json.dumps(first.state())))
    assert [*seen, *run(second, range(stop, 12))] == expected


# ---- Settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pools", "message"),
    [
        (
            {"enabled": True, "easy": 0, "mid": 0, "hard": 0},
            "pools.mid=0.0: the shares of all pools are 0, so no prompt could be drawn; raise one "
            "of them",
        ),
        (
            {"enabled": True, "hard_below": 0.6, "easy_above": 0.5},
            "pools.hard_below=0.6: must be <= pools.easy_above=0.5",
        ),
        ({"hard": 0.5}, "pools.hard=0.5: has no effect with pools.enabled=false; needs "
         "pools.enabled=true"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(pools: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        GRPOConfig.from_dict({"pools": pools})
    assert str(caught.value) == message


def test_a_task_that_does_not_know_its_size_is_refused() -> None:
    config = GRPOConfig.from_dict({"pools": {"enabled": True}})
    task = build_task(config)

    class Endless:
        def __getattr__(self, name: str) -> Any:
            if name == "train_size":
                raise AttributeError(name)
            return getattr(task, name)

    with pytest.raises(ValueError, match=r"^pools\.enabled=true: the task does not state"):
        Prompts(config, Endless(), None)  # type: ignore[arg-type]


@pytest.mark.slow
def test_with_pools_any_example_of_a_task_may_be_drawn() -> None:
    counts = []
    for pools in ({}, {"enabled": True}):
        config = GRPOConfig.from_dict({"rounds": 3, "pools": pools})
        task = build_task(config)
        counts.append(Prompts(config, task, policy_tokenizer(config.model)).train_count)
    assert counts == [3 * 16, task.train_size]  # type: ignore[attr-defined]


@pytest.mark.slow
def test_tasks_that_ship_know_how_many_examples_a_pass_has() -> None:
    for name in ("keyword", "math"):
        task = build_task(GRPOConfig.from_dict({"task": {"name": name}}))
        size = task.train_size  # type: ignore[attr-defined]
        examples = [str(task.train_example(index)) for index in range(2 * size)]
        assert sorted(examples[:size]) == sorted(examples[size:])


# ---- In a trial ----------------------------------------------------------------------------------


@st.composite
def pooled(draw: st.DrawFn, lags: st.SearchStrategy[int] | None = None) -> GRPOConfig:
    config = draw(st.one_of(configs(lags), resampled(configs(lags))))
    pools = {"enabled": True, "memory": draw(st.sampled_from([0.0, 0.5, 0.9]))}
    pools |= draw(st.sampled_from([{}, {"easy": 1.0, "mid": 1.0, "hard": 1.0}, {"mid": 0.0}]))
    return GRPOConfig.from_dict({**config.to_dict(), "pools": pools})


@pytest.mark.slow
@bounded
@given(pooled(st.just(0)), speeds, seeds, shares, st.data())
def test_synchronous_draws_depend_on_no_timing_and_resume_exactly(
    config: GRPOConfig, scale: dict[str, float], seed: int, share: float, data: st.DataObject
) -> None:
    def new_trial(config: GRPOConfig, timing: int) -> VirtualTrial:
        return virtual_trial(
            config,
            durations=long_tailed_durations(timing, scale),
            seed=timing,
            equal_rewards=some_equal(seed, share),
        )

    whole = new_trial(config, seed)
    expected = [untimed(report) for report in whole.run(config.rounds)]
    others = new_trial(config_with_generators(config, 3), seed + 1)
    assert [untimed(report) for report in others.run(config.rounds)] == expected
    assert others.requests.examples == whole.requests.examples
    assert all(row["group/drawn"] == sum_drawn(row) for row in expected)

    rounds_before = data.draw(st.integers(0, config.rounds - 1))
    first, second = new_trial(config, seed + 2), new_trial(config, seed + 3)
    rows = first.run(rounds_before)
    hand_over(first, second)
    rows += second.run(config.rounds - rounds_before)
    assert [untimed(row) for row in rows] == expected
    assert history(first, second) == history(whole)
    assert first.requests.examples | second.requests.examples == whole.requests.examples


def sum_drawn(row: dict[str, float]) -> float:
    return sum(row[f"pool/{name}_drawn"] for name in ("easy", "mid", "hard"))


@pytest.mark.slow
@bounded
@given(pooled(), speeds, seeds, shares, st.data())
def test_a_resumed_run_keeps_the_examples_of_prompts_under_way(
    config: GRPOConfig, scale: dict[str, float], seed: int, share: float, data: st.DataObject
) -> None:
    rounds_before = data.draw(st.integers(0, config.rounds - 1))
    trials = []
    for timing in range(2):
        durations = long_tailed_durations(seed + timing, scale)
        equal = some_equal(seed, share)
        trials.append(
            virtual_trial(config, durations=durations, seed=seed + timing, equal_rewards=equal)
        )
    first, second = trials
    reports = first.run(rounds_before)
    hand_over(first, second)
    reports += second.run(config.rounds - rounds_before)
    assert_accounts_close(reports)
    ours, theirs = second.requests.examples, first.requests.examples
    assert all(ours[index] == theirs[index] for index in ours.keys() & theirs.keys())
    assert all(0 <= example < 24 for example in (ours | theirs).values())
    last = reports[-1].metrics
    assert sum(last[f"pool/{name}_size"] for name in ("easy", "mid", "hard")) == 24


def test_pools_turned_on_for_a_restored_trial_begin_with_new_prompts() -> None:
    config = config_of(rounds=4)
    first = virtual_trial(config)
    first.run(2)
    second = virtual_trial(GRPOConfig.from_dict({**config.to_dict(), "pools": {"enabled": True}}))
    second.learners.load_state(first.learners.state())
    second.pipeline.load_state(first.pipeline.state(), first.pipeline.buffer.groups())
    rows = [report.metrics for report in second.run(2)]
    assert rows[-1]["pool/new_size"] == 24 - 4
