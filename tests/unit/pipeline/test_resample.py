"""Groups of equal rewards: kept, left out, or replaced by others, whatever the timing."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from test_pipeline import (
    bounded,
    config_of,
    config_with_generators,
    configs,
    hand_over,
    history,
    overlaps,
    replaying,
    seeds,
    some_die,
    some_fail,
    speeds,
    trained_prompts,
    untimed,
)
from virtual_time import (
    all_prompt_indices,
    long_tailed_durations,
    of_stream,
    one_token_group,
    used_after_release,
)

from grpo_trainable.config import ConfigError, GRPOConfig, schedule
from grpo_trainable.pipeline import RoundReport
from grpo_trainable.pipeline.collector import DrawnLengths
from grpo_trainable.pipeline.ledger import BatchRule
from grpo_trainable.protocol.calls import ActorFailed
from grpo_trainable.protocol.messages import FailedPrompt, Scored
from grpo_trainable.protocol.rollout import RolloutGroup
from grpo_trainable.simulation.runtime import constant_durations
from grpo_trainable.simulation.trial import VirtualTrial, virtual_trial


def test_a_group_has_signal_when_its_rewards_differ() -> None:
    assert one_token_group(0, rewards=(0.0, 0.0, 1.0)).has_signal
    assert not one_token_group(0, rewards=(1.0, 1.0, 1.0)).has_signal
    # Equal rewards of 1/3 have no signal, even if rounding changes their mean in float32.
    assert not one_token_group(0, rewards=(1 / 3,) * 7).has_signal


# ---- Settings ------------------------------------------------------------------------------------


def rollout(**values: Any) -> dict[str, Any]:
    return {"prompts": 4, "group_size": 2, **values}


def test_how_many_prompts_are_drawn_at_most() -> None:
    assert schedule.most_drawn(config_of(rollout=rollout(zero_advantage="filter"))) == 4
    resample = rollout(zero_advantage="resample")
    assert schedule.most_drawn(config_of(rollout=resample)) == 16
    assert schedule.most_drawn(config_of(rollout=resample | {"redraws": 2})) == 12
    assert (
        schedule.most_drawn(config_of(rollout=resample | {"prompts": 10, "oversample": 1.1})) == 11
    )
    fresh = config_of(rollout=resample, k=2, k_mode="fresh_batches", rounds=3)
    assert schedule.most_prompts(fresh) == 96


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"rollout": rollout(zero_advantage="filter"), "loss": {"advantage": "batch"}},
            "rollout.zero_advantage=filter: must be keep with loss.advantage=batch, which also "
            "learns from groups of equal rewards; needs one of group_std, group_mean, rloo, "
            "group_mean_batch_std, maxrl, group_to_go or a function of your own",
        ),
        (
            {
                "rollout": rollout(zero_advantage="resample", group_size=1),
                "loss": {"advantage": "my:advantage"},
            },
            "rollout.zero_advantage=resample: must be keep with rollout.group_size=1: a group of "
            "one response always has equal rewards",
        ),
        (
            {"rollout": rollout(zero_advantage="resample", oversample=1.2)},
            "rollout.oversample=1.2: allows no prompt beyond rollout.prompts=4; raise "
            "rollout.oversample, or set rollout.zero_advantage=filter",
        ),
        (
            {"rollout": rollout(zero_advantage="filter", redraws=3)},
            "rollout.redraws=3: has no effect with rollout.zero_advantage=filter; needs "
            "rollout.zero_advantage=resample",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(**values)
    assert str(caught.value) == message


# ---- Examples by hand ----------------------------------------------------------------------------


def equal_on(*prompt_indices: int) -> Callable[[int, int], bool]:
    return lambda index, weights_round: index in prompt_indices


def test_filter_leaves_groups_of_equal_rewards_out_and_counts_them() -> None:
    config = config_of(rounds=3, rollout=rollout(zero_advantage="filter"))
    w = virtual_trial(config, equal_rewards=equal_on(1, 3, 4, 5, 6, 7))
    reports = w.run(3)
    assert [call.prompt_indices for call in w.trained] == [((0, 2),), (), ((8, 9, 10, 11),)]
    rows = [report.metrics for report in reports]
    assert [row["group/drawn"] for row in rows] == [4, 4, 4]
    assert [row["group/filtered"] for row in rows] == [2, 4, 0]
    assert [row["group/resampled"] for row in rows] == [0, 0, 0]
    assert [row["count/dropped_zero_advantage"] for row in rows] == [2, 6, 6]
    assert [row["count/skipped_rounds"] for row in rows] == [0, 1, 1]
    assert rows[-1]["count/requested"] == 12
    assert rows[-1]["count/trained"] == 6
    # The mean over all drawn groups includes those that are not trained on.
    assert "reward/train_mean" not in rows[1]
    assert 0 < rows[1]["reward/drawn_mean"] < 1
    (note,) = reports[1].notes
    assert "took no gradient step" in note


def test_resample_draws_others_in_their_place() -> None:
    config = config_of(rounds=2, rollout=rollout(zero_advantage="resample"))
    w = virtual_trial(config, equal_rewards=equal_on(1, 3, 4, 9))
    reports = w.run(2)
    # Prompts 4 and 5 replace 1 and 3, and 6 replaces 4. The next round draws 7 to 10, and prompt 11
    # replaces 9.
    assert [call.prompt_indices for call in w.trained] == [((0, 2, 5, 6),), ((7, 8, 10, 11),)]
    rows = [report.metrics for report in reports]
    assert [row["group/drawn"] for row in rows] == [7, 5]
    assert [row["group/filtered"] for row in rows] == [3, 1]
    assert [row["group/resampled"] for row in rows] == [3, 1]
    assert [row["count/dropped_zero_advantage"] for row in rows] == [3, 4]
    assert rows[-1]["count/short_batches"] == 0
    assert rows[-1]["group/zero_advantage_fraction"] == 0
    sampled = [call.prompt_indices for call in of_stream(w, "train")]
    assert sampled == [(0, 1, 2, 3), (4, 5), (6,), (7, 8, 9, 10), (11,)]
    assert not any(report.notes for report in reports)


def test_reward_of_what_was_drawn_is_the_mean_over_all_of_it() -> None:
    config = config_of(rounds=1, rollout=rollout(zero_advantage="resample"))
    w = virtual_trial(config, equal_rewards=equal_on(0))
    (report,) = w.run(1)
    keep = virtual_trial(config_of(rounds=1, rollout=rollout(prompts=5)), equal_rewards=equal_on(0))
    (kept,) = keep.run(1)
    # Both trials draw prompts 0 to 4, but the first trains only on prompts 1 to 4.
    assert trained_prompts(w) == [1, 2, 3, 4]
    assert report.metrics["reward/drawn_mean"] == kept.metrics["reward/drawn_mean"]
    assert kept.metrics["reward/drawn_mean"] == pytest.approx(kept.metrics["reward/train_mean"])


def test_length_of_what_was_drawn_includes_groups_that_are_not_trained_on() -> None:
    lengths = DrawnLengths(group_size=2)
    long = replace(one_token_group(3), response_mask=torch.ones(2, 6, dtype=torch.bool))
    lengths.add(scored([one_token_group(0), long], [FailedPrompt(1, "no reward", tokens=9)]))
    lengths.add(scored([one_token_group(2)], []))
    restored = DrawnLengths(group_size=2)
    restored.load_state(json.loads(json.dumps(lengths.state())))
    # Prompts 0 to 2 have 2, 9 and 2 tokens, in six responses. Prompt 3 belongs to a later round.
    assert restored.take_metrics([0, 1, 2]) == {"response/drawn_length_mean": 13 / 6}
    assert restored.take_metrics([3]) == {"response/drawn_length_mean": 6.0}
    assert restored.take_metrics([4]) == {}


def scored(groups: list[RolloutGroup], failed: list[FailedPrompt]) -> Scored:
    return Scored(groups=groups, failed=failed, reward_errors=0, unverified=0, loaded=[], spans=[])


def test_failed_rewards_are_replaced_too() -> None:
    config = config_of(
        rounds=1, rollout=rollout(zero_advantage="resample"), task={"max_error_rate": 0.5}
    )
    w = virtual_trial(config, reward_fails=lambda stream, index: stream == "train" and index == 2)
    (report,) = w.run(1)
    assert trained_prompts(w) == [0, 1, 3, 4]
    assert report.metrics["count/dropped_reward"] == 1
    assert report.metrics["group/filtered"] == 0
    assert report.metrics["group/resampled"] == 1


@pytest.mark.parametrize("lag", [0, 3])
def test_a_task_that_is_always_right_ends_its_rounds_with_a_count_and_a_warning(lag: int) -> None:
    config = config_of(
        rounds=5, lag=lag, rollout=rollout(zero_advantage="resample", oversample=3.0)
    )
    w = virtual_trial(config, equal_rewards=lambda index, weights_round: True)
    reports = w.run(5)
    assert [call.prompt_indices for call in w.trained] == [()] * 5
    for place, report in enumerate(reports):
        row = report.metrics
        assert row["group/drawn"] == row["group/filtered"] == 12
        assert row["group/resampled"] == 8
        assert row["count/short_batches"] == row["count/skipped_rounds"] == place + 1
        # round 4 also notes that there has been no signal
        assert len(report.notes) == (3 if report.round == 4 else 2)
        assert report.notes[0] == (
            "12 prompts gave only 0 of 4 groups to train on: each of the other prompts had equal "
            "rewards or a failed reward (rollout.oversample=3, rollout.redraws=8)"
        )
    assert row["count/requested"] == row["count/dropped_zero_advantage"] == 60
    assert row["version/learner"] == 0
    assert not w.runtime.uncollected


def test_redraws_bound_how_long_a_round_waits_for_the_last_groups() -> None:
    """Prompts that are left out are replaced, so the draws have 4, 2, 1 and 1 prompts."""
    equal = equal_on(1, 3, 5, 6)
    for redraws, trained in ((2, (0, 2, 4)), (3, (0, 2, 4, 7))):
        config = config_of(rounds=1, rollout=rollout(zero_advantage="resample", redraws=redraws))
        w = virtual_trial(config, equal_rewards=equal)
        (report,) = w.run(1)
        assert trained_prompts(w) == list(trained)
        assert report.metrics["count/short_batches"] == (redraws == 2)
        assert report.metrics["group/drawn"] == 4 + 2 + 1 + (redraws == 3)


def test_with_a_lag_sampling_goes_on_while_others_are_replaced() -> None:
    config = config_of(
        rounds=12, lag=1, rollout=rollout(zero_advantage="resample"), eval={"every": 99}
    )
    w = virtual_trial(
        config,
        durations=constant_durations(rollout=32, optimize=32),
        equal_rewards=lambda index, weights_round: index % 3 == 0,
    )
    w.run(12)
    assert overlaps(w)
    assert trained_prompts(w) == [index for index in range(72) if index % 3][:48]


# ---- Slow prompts --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("generators", [1, 3])
@pytest.mark.parametrize("lag", [0, 1, 4])
@pytest.mark.parametrize("left_out", [0.0, 0.4])
def test_slow_prompts_are_trained_on_as_often_as_they_are_drawn(
    lag: int, generators: int, left_out: float
) -> None:
    """Compare two trials. In one of them, every fifth prompt takes ten times as long."""

    def equal(index: int, weights_round: int) -> bool:
        return random.Random(f"equal {index}").random() < left_out

    config = config_of(
        rounds=10,
        lag=lag,
        rollout=rollout(zero_advantage="resample", oversample=16.0, redraws=64, unit_prompts=1),
        resources={"num_generators": generators},
        eval={"every": 99},
    )
    runs = {}
    for times in (1.0, 10.0):
        w = virtual_trial(
            config,
            durations=constant_durations(rollout=8, optimize=8),
            equal_rewards=equal,
            slowness=lambda index, times=times: times if index % 5 == 0 else 1.0,
        )
        last = w.run(10)[-1].metrics
        drawn = [index for call in of_stream(w, "train") for index in call.prompt_indices]
        with_signal = Counter(index for index in drawn if not equal(index, 0))
        assert Counter(trained_prompts(w)) == with_signal
        assert last["count/short_batches"] == last["count/waiting"] == 0
        runs[times] = [call.prompt_indices for call in w.trained]
    # The batches are identical, however long some prompts took.
    assert runs[10.0] == runs[1.0]


# ---- Random worlds -------------------------------------------------------------------------------


@st.composite
def resampled(draw: st.DrawFn, base: st.SearchStrategy[GRPOConfig] | None = None) -> GRPOConfig:
    """Return a config that leaves out groups of equal rewards or draws replacements."""
    config = draw(base if base is not None else configs())
    least = 1 + 1 / config.rollout.prompts
    settings = replace(
        config.rollout,
        zero_advantage=draw(st.sampled_from(["filter", "resample", "resample"])),
    )
    if settings.zero_advantage == "resample":
        settings = replace(
            settings,
            oversample=draw(st.sampled_from([least, 2.5, 6.0])),
            redraws=draw(st.integers(1, 8)),
        )
        settings = replace(settings, oversample=max(settings.oversample, least))
    return replace(config, rollout=settings)


shares = st.sampled_from([0.0, 0.3, 0.7, 1.0])


def some_equal(seed: int, share: float) -> Callable[[int, int], bool]:
    """Return a rule that depends only on the prompt, so the same prompts are always left out."""
    return lambda index, weights_round: random.Random(f"{seed}={index}").random() < share


def expected_batches(
    config: GRPOConfig, left_out: Callable[[int], bool]
) -> list[tuple[range, list[int]]]:
    """Compute all rollout batches of a trial from the prompts that are left out."""
    rule = BatchRule(config.rollout.prompts, schedule.most_drawn(config), schedule.redraws(config))
    gone = [index for index in range(schedule.most_prompts(config)) if left_out(index)]
    batches, start = [], 0
    for _ in range(config.rounds * schedule.batches_per_round(config)):
        end = rule.end(start, gone)
        batches.append((range(start, end), [i for i in range(start, end) if not left_out(i)]))
        start = end
    return batches


def expected_trained(
    config: GRPOConfig, left_out: Callable[[int], bool]
) -> list[tuple[tuple[int, ...], ...]]:
    """Return the rollout batches of each round, without the empty batches."""
    batches = [tuple(accepted) for _, accepted in expected_batches(config, left_out)]
    a_round = schedule.batches_per_round(config)
    rounds = [batches[i : i + a_round] for i in range(0, len(batches), a_round)]
    return [tuple(batch for batch in of_round if batch) for of_round in rounds]


def assert_accounts_close(reports: list[RoundReport]) -> None:
    parts = ("trained", "dropped", "waiting", "in_flight")
    causes = ("stale", "reward", "lost", "zero_advantage")
    for report in reports:
        row = report.metrics
        assert row["count/requested"] == sum(row[f"count/{part}"] for part in parts)
        assert row["count/dropped"] == sum(row[f"count/dropped_{cause}"] for cause in causes)
    last = reports[-1].metrics
    assert last["count/waiting"] == last["count/in_flight"] == 0


@pytest.mark.slow
@bounded
@given(
    resampled(), speeds, seeds, shares, st.sampled_from([0.0, 0.3]), st.sampled_from([0, 1 / 64])
)
def test_any_timing_fills_the_same_batches_within_the_lag(
    config: GRPOConfig,
    scale: dict[str, float],
    seed: int,
    share: float,
    failing: float,
    latency: float,
) -> None:
    fails, equal = some_fail(config, seed, failing), some_equal(seed, share)

    def left_out(index: int) -> bool:
        return fails("train", index) or equal(index, 0)

    w = virtual_trial(
        config,
        durations=long_tailed_durations(seed, scale),
        seed=seed,
        latency=latency,
        reward_fails=fails,
        equal_rewards=equal,
        slowness=lambda index: 10.0 if index % 3 == 1 else 1.0,
    )
    reports = w.run(config.rounds)
    assert [call.prompt_indices for call in w.trained] == expected_trained(config, left_out)
    for call in w.trained:
        assert all(call.round - r <= config.lag for batch in call.group_rounds for r in batch)
    assert_accounts_close(reports)
    assert not used_after_release(w)
    assert not w.runtime.uncollected
    # Each prompt is requested once, and every requested prompt belongs to a batch.
    batches = expected_batches(config, left_out)
    asked = [index for stream, index in w.requests.asked if stream == "train"]
    assert sorted(asked) == list(range(batches[-1][0].stop))
    last = reports[-1].metrics
    assert last["count/trained"] == sum(len(accepted) for _, accepted in batches)
    assert last["count/dropped_reward"] == sum(fails("train", index) for index in asked)
    assert last["count/dropped_stale"] == 0
    assert sum(report.metrics["group/drawn"] for report in reports) == len(asked)
    filtered = sum(report.metrics["group/filtered"] for report in reports)
    assert filtered == last["count/dropped_zero_advantage"]
    assert filtered == sum(equal(index, 0) and not fails("train", index) for index in asked)
    if config.lag == 0:
        assert not overlaps(w)


@pytest.mark.slow
@bounded
@given(resampled(configs(lags=st.just(0))), speeds, seeds, shares, st.data())
def test_synchronous_resampling_depends_on_no_timing_and_resumes_exactly(
    config: GRPOConfig, scale: dict[str, float], seed: int, share: float, data: st.DataObject
) -> None:
    def equal(index: int, weights_round: int) -> bool:
        return random.Random(f"{seed} {index} {weights_round}").random() < share

    def new_trial(config: GRPOConfig, timing: int) -> VirtualTrial:
        durations = long_tailed_durations(timing, scale)
        return virtual_trial(config, durations=durations, seed=timing, equal_rewards=equal)

    uninterrupted = new_trial(config, seed)
    expected = [untimed(report) for report in uninterrupted.run(config.rounds)]
    for generators in (1, 3):
        others = new_trial(config_with_generators(config, generators), seed + generators)
        assert [untimed(report) for report in others.run(config.rounds)] == expected
        assert history(others) == history(uninterrupted)
        # The chunks must be the same, too, because rounding depends on which responses are sampled
        # together.
        assert chunks_sampled(others) == chunks_sampled(uninterrupted)

    rounds_before = data.draw(st.integers(0, config.rounds - 1))
    first, second = new_trial(config, seed + 5), new_trial(config, seed + 6)
    rows = first.run(rounds_before)
    hand_over(first, second)
    rows += second.run(config.rounds - rounds_before)
    assert [untimed(row) for row in rows] == expected
    assert history(first, second) == history(uninterrupted)


def chunks_sampled(w: VirtualTrial) -> list[tuple[int, ...]]:
    return sorted(call.prompt_indices for call in of_stream(w, "train"))


@pytest.mark.slow
@bounded
@given(resampled(), speeds, seeds, shares, st.data())
def test_a_resumed_run_fills_the_batches_that_the_other_would_have(
    config: GRPOConfig, scale: dict[str, float], seed: int, share: float, data: st.DataObject
) -> None:
    """Check trials of any lag that are stopped and resumed twice."""
    equal = some_equal(seed, share)
    stops = sorted(data.draw(st.integers(0, config.rounds)) for _ in range(2))
    trials, reports, done = [], [], 0
    for timing, until in enumerate([*stops, config.rounds]):
        durations = long_tailed_durations(seed + timing, scale)
        w = virtual_trial(config, durations=durations, seed=seed + timing, equal_rewards=equal)
        if trials:
            w.learners.load_state(trials[-1].learners.state())
            w.pipeline.load_state(
                json.loads(json.dumps(trials[-1].pipeline.state())),
                trials[-1].pipeline.buffer.groups(),
            )
        reports += w.run(until - done)
        done = until
        trials.append(w)
    trained = [call.prompt_indices for w in trials for call in w.trained]
    assert trained == expected_trained(config, lambda index: equal(index, 0))
    assert_accounts_close(reports)
    for w in trials:
        for call in w.trained:
            assert all(call.round - r <= config.lag for batch in call.group_rounds for r in batch)


@pytest.mark.slow
@bounded
@given(resampled(), speeds, seeds, shares, st.sampled_from([0.1, 0.5]))
def test_lost_generators_change_no_batch(
    config: GRPOConfig, scale: dict[str, float], seed: int, share: float, dying: float
) -> None:
    config = config_with_generators(config, config.resources.num_generators)
    equal = some_equal(seed, share)
    w = virtual_trial(
        config,
        durations=long_tailed_durations(seed, scale),
        seed=seed,
        equal_rewards=equal,
        dies=some_die(config, seed, dying),
    )
    reports = []
    w.pipeline.send_first_weights()
    for _ in range(config.rounds):
        try:
            reports.append(w.pipeline.run_round())
        except ActorFailed as error:
            # The drawn deaths may contain four losses in a row, which end a trial.
            assume("without finishing any work" not in str(error))
            raise
    trained = [call.prompt_indices for call in w.trained]
    assert trained == expected_trained(config, lambda index: equal(index, 0))
    assert_accounts_close(reports)
    for call in w.trained:
        assert all(call.round - r <= config.lag for batch in call.group_rounds for r in batch)
    assert not used_after_release(w)


@pytest.mark.parametrize("lag", [0, 2])
def test_a_generator_that_hangs_while_others_are_replaced_costs_nothing_but_time(lag: int) -> None:
    config = config_of(
        rounds=4,
        lag=lag,
        rollout=rollout(zero_advantage="resample", unit_prompts=1),
        resources={"deadline_s": 30.0, "num_generators": 2},
    )
    equal = equal_on(1, 2, 5, 8, 9, 13)
    w = virtual_trial(
        config,
        equal_rewards=equal,
        hangs=lambda name, stage, n: (name, stage, n) == ("generator-1", "rollout", 5),
    )
    reports = w.run(4)
    assert reports[-1].metrics["count/redispatched"] > 0
    trained = [call.prompt_indices for call in w.trained]
    assert trained == expected_trained(config, lambda index: equal(index, 0))
    assert_accounts_close(reports)


@pytest.mark.slow
@bounded
@given(resampled(replaying()), speeds, seeds, shares)
def test_replay_of_resampled_batches_keeps_both_bounds_and_its_accounts(
    config: GRPOConfig, scale: dict[str, float], seed: int, share: float
) -> None:
    equal = some_equal(seed, share)
    durations = long_tailed_durations(seed, scale)
    w = virtual_trial(config, durations=durations, seed=seed, equal_rewards=equal)
    reports = w.run(config.rounds)
    batches = expected_batches(config, lambda index: equal(index, 0))
    a_round = schedule.batches_per_round(config)
    window = {
        round_: {
            index
            for _, accepted in batches[
                max(0, round_ + 1 - config.buffer_capacity) * a_round : (round_ + 1) * a_round
            ]
            for index in accepted
        }
        for round_ in range(config.rounds)
    }
    uses: Counter[int] = Counter()
    for call in w.trained:
        assert set(all_prompt_indices(call)) <= window[call.round]
        for indices, rounds in zip(call.prompt_indices, call.group_rounds, strict=True):
            for index, round_ in zip(indices, rounds, strict=True):
                uses[index] += 1
                age = call.round - round_
                assert age <= (config.lag if uses[index] == 1 else schedule.max_age(config))
    parts = ("trained", "dropped", "waiting", "in_flight")
    for report in reports:
        row = report.metrics
        assert row["count/requested"] == sum(row[f"count/{part}"] for part in parts)
    assert reports[-1].metrics["count/trained"] == len(uses)
    assert reports[-1].metrics["count/in_flight"] == 0
