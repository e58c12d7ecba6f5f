"""The pipeline over fake actors in virtual time: properties that must hold for any timing."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Collection
from copy import copy
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from virtual_time import (
    all_prompt_indices,
    long_tailed_durations,
    of_stream,
    one_token_group,
    used_after_release,
)

from grpo_trainable.config import ConfigError, GRPOConfig, schedule
from grpo_trainable.pipeline import RoundReport
from grpo_trainable.pipeline.by_task import ByTask
from grpo_trainable.pipeline.collector import Collector
from grpo_trainable.pipeline.evaluation import held_out_rewards
from grpo_trainable.pipeline.report import Recorder, evaluation_metrics, update_metrics
from grpo_trainable.protocol.calls import ActorFailed
from grpo_trainable.protocol.messages import Scored
from grpo_trainable.protocol.rollout import RolloutGroup
from grpo_trainable.protocol.stopping import RoundAbandoned, StoppableRounds
from grpo_trainable.protocol.versions import StalenessGate, Sync
from grpo_trainable.simulation.groups import group_of
from grpo_trainable.simulation.runtime import constant_durations
from grpo_trainable.simulation.trial import SCORED_APART, VirtualTrial, virtual_trial
from grpo_trainable.telemetry.metrics import is_named_by_user
from grpo_trainable.telemetry.stages import shares_of_work

# The first examples of a run build the first torch tensors, which takes a while.
bounded = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)


def config_of(**values: Any) -> GRPOConfig:
    """Return a small config, disaggregated unless `values` changes that."""
    data: dict[str, Any] = {
        "placement": "disaggregated",
        "rounds": 4,
        "rollout": {"prompts": 2, "group_size": 2},
        "eval": {"every": 2, "prompts": 3, "samples": 2},
        "resources": {"deadline_s": 1e6},
        # A stand-in for a user's reward, because the task's built-in reward never fails.
        "task": {"reward": "virtual:reward", "reward_deadline_s": 0.1},
    }
    for name, value in values.items():
        data[name] = {**data[name], **value} if isinstance(data.get(name), dict) else value
    return GRPOConfig.from_dict(data)


@st.composite
def configs(draw: st.DrawFn, lags: st.SearchStrategy[int] | None = None) -> GRPOConfig:
    lag = draw(lags if lags is not None else st.integers(0, 4))
    k_mode = draw(st.sampled_from(["same_batch", "fresh_batches", "minibatches"]))
    prompts = draw(st.integers(1, 5))
    k = draw(st.integers(1, min(3, prompts) if k_mode == "minibatches" else 3))
    colocated = lag == 0 and draw(st.booleans())
    config = config_of(
        placement="colocated" if colocated else "disaggregated",
        weight_update="between_batches"
        if lag == 0
        else draw(st.sampled_from(["between_batches", "interrupt_recompute", "in_flight"])),
        lag=lag,
        k=k,
        k_mode=k_mode,
        rounds=draw(st.integers(1, 6)),
        rollout={"prompts": prompts, "unit_prompts": draw(st.integers(1, prompts))},
        eval={"every": draw(st.integers(1, 7)), "prompts": draw(st.integers(1, 5))},
        # A user's reward runs while the next chunk is sampled.
        task={
            "max_error_rate": 1.0,
            "reward": draw(st.sampled_from(["virtual:reward", SCORED_APART])),
        },
    )
    return config if colocated else config_with_generators(config, draw(st.integers(1, 3)))


speeds = st.fixed_dictionaries(
    {
        stage: st.sampled_from([1.0, 10.0, 100.0])
        for stage in ("rollout", "reward", "optimize", "sync", "eval")
    }
)
seeds = st.integers(0, 2**16)


def some_fail(config: GRPOConfig, seed: int, share: float):
    """Return a reward that fails on a share of the prompts.

    The reward never fails on the first held-out prompt, because an evaluation without any score is
    an error.
    """

    def fails(stream: str, index: int) -> bool:
        spared = stream == "eval" and index == 0
        return not spared and random.Random(f"{seed}/{stream}/{index}").random() < share

    return fails


def all_prompts(config: GRPOConfig) -> list[int]:
    return list(range(config.rounds * schedule.prompts_per_round(config)))


def trained_prompts(*trials: VirtualTrial) -> list[int]:
    return [index for w in trials for call in w.trained for index in all_prompt_indices(call)]


def rollout_batches(
    config: GRPOConfig, scored: Collection[int]
) -> list[tuple[tuple[int, ...], ...]]:
    """Return the rollout batches of each round, restricted to prompts that were scored."""
    prompts, a_round = config.rollout.prompts, schedule.prompts_per_round(config)
    batches = [
        [
            tuple(c for c in range(first, first + prompts) if c in scored)
            for first in range(start, start + a_round, prompts)
        ]
        for start in range(0, config.rounds * a_round, a_round)
    ]
    return [tuple(batch for batch in of_round if batch) for of_round in batches]


def steps_a_batch(config: GRPOConfig) -> int:
    return 1 if config.k_mode == "fresh_batches" else config.k


def overlaps(w: VirtualTrial) -> bool:
    """Return True if a generator sampled for training while the learner updated."""
    return any(
        g.start < t.end and t.start < g.end for g in of_stream(w, "train") for t in w.trained
    )


def assert_counts_close(report: RoundReport, w: VirtualTrial) -> None:
    row = {name: report.metrics[f"count/{name}"] for name in
           ("requested", "trained", "dropped", "waiting", "in_flight")}  # fmt: skip
    requested = row.pop("requested")
    assert requested == sum(row.values())
    assert row["dropped"] == sum(
        report.metrics[f"count/dropped_{cause}"]
        for cause in ("stale", "reward", "lost", "zero_advantage")
    )
    assert row["trained"] == len(trained_prompts(w))
    assert requested == sum(stream == "train" for stream, _ in w.requests.asked)


def assert_evaluated(w: VirtualTrial) -> None:
    """Check that all held-out prompts run exactly once per evaluation, under the newest weights.

    Evaluations run at round 0, when due, and after the last round.
    """
    config = w.config
    due = {0, config.rounds, *range(config.eval.every, config.rounds, config.eval.every)}
    seen = held_out_prompts(w)
    assert seen.keys() == due
    assert all(sorted(c) == list(range(config.eval.prompts)) for c in seen.values())


def held_out_prompts(w: VirtualTrial) -> dict[int, list[int]]:
    """Return the prompts of each evaluation, by the round of the evaluated weights."""
    seen: dict[int, list[int]] = {}
    for call in of_stream(w, "eval"):
        seen.setdefault(call.weights_round, []).extend(call.prompt_indices)
    return seen


@pytest.mark.slow
@bounded
@given(configs(), speeds, seeds, st.sampled_from([0.0, 0.3, 0.8]), st.sampled_from([0.0, 1 / 64]))
def test_any_timing_trains_every_prompt_once_in_order_within_the_lag(
    config: GRPOConfig, scale: dict[str, float], seed: int, failing: float, latency: float
) -> None:
    fails = some_fail(config, seed, failing)
    w = virtual_trial(
        config,
        durations=long_tailed_durations(seed, scale),
        seed=seed,
        latency=latency,
        reward_fails=fails,
    )
    w.pipeline.send_first_weights()
    for round_ in range(config.rounds):
        report = w.pipeline.run_round()
        assert report.round == round_ + 1
        assert_counts_close(report, w)
        assert report.metrics.get("lag/max", 0) <= config.lag
        if config.lag == 0:
            assert not w.runtime.uncollected, "something is in flight between two rounds"

    # The learner's records show that no group was too old.
    assert [call.round for call in w.trained] == list(range(config.rounds))
    for call in w.trained:
        assert all(call.round - r <= config.lag for batch in call.group_rounds for r in batch)
    scored = [index for index in all_prompts(config) if not fails("train", index)]
    assert trained_prompts(w) == scored
    assert not used_after_release(w)
    # A batch is left out when all its groups failed, and a round without batches is skipped.
    left = rollout_batches(config, scored)
    assert [call.prompt_indices for call in w.trained] == left
    skipped = sum(not batches for batches in left)
    assert report.metrics["count/skipped_rounds"] == skipped
    assert report.metrics["version/learner"] == sum(map(len, left)) * steps_a_batch(config)

    # Each prompt is requested once, and no prompt is requested for rounds after the last one.
    # Otherwise, VirtualRequests would have raised an error.
    asked = [index for stream, index in w.requests.asked if stream == "train"]
    assert asked == all_prompts(config)
    assert_evaluated(w)
    assert not w.runtime.uncollected
    assert report.metrics["count/waiting"] == report.metrics["count/in_flight"] == 0
    assert report.metrics["eval/round"] == config.rounds
    if config.lag == 0:
        assert not overlaps(w)


@pytest.mark.slow
@bounded
@given(configs(lags=st.just(0)), speeds, seeds, st.sampled_from([0.0, 0.3, 0.8]))
def test_synchronous_results_depend_on_neither_generators_nor_speeds(
    config: GRPOConfig, scale: dict[str, float], seed: int, failing: float
) -> None:
    fails = some_fail(config, seed, failing)
    alone = virtual_trial(config_with_generators(config, 1), reward_fails=fails)
    rows = [untimed(report) for report in alone.run(config.rounds)]
    for generators in (2, 3):
        several = virtual_trial(
            config_with_generators(config, generators),
            durations=long_tailed_durations(seed, scale),
            seed=seed,
            reward_fails=fails,
        )
        assert [untimed(report) for report in several.run(config.rounds)] == rows
        assert history(several) == history(alone)


@pytest.mark.parametrize("generators", [2, 3, 5])
@pytest.mark.parametrize("batches", [1, 3])
def test_every_generator_samples_in_every_synchronous_round_by_default(
    generators: int, batches: int
) -> None:
    config = config_of(
        rounds=3,
        k=batches,
        k_mode="fresh_batches",
        rollout={"prompts": 7},
        resources={"num_generators": generators},
        eval={"every": 3},
    )
    w = virtual_trial(config)
    w.run(3)
    # Every generator samples, even in the first round, which begins when all have evaluated.
    calls = Counter((call.actor, call.weights_round) for call in of_stream(w, "train"))
    assert calls.keys() == {(f"generator-{i}", r) for i in range(generators) for r in range(3)}
    assert len(set(calls.values())) == 1  # all generators have the same number of chunks
    assert trained_prompts(w) == all_prompts(config)


def config_with_generators(config: GRPOConfig, count: int) -> GRPOConfig:
    """Return the config with `count` generators, but at most one for each chunk."""
    data = config.to_dict()
    data["placement"] = "disaggregated"
    data["resources"]["num_generators"] = min(count, schedule.chunks_at_once(config))
    return GRPOConfig.from_dict(data)


def untimed(report: RoundReport) -> dict[str, float]:
    # Each generator receives the weights, and `sync/bytes` counts all copies.
    apart = ("time/", "sync/", "fleet/")
    return {k: v for k, v in report.metrics.items() if not k.startswith(apart)}


def hand_over(first: VirtualTrial, second: VirtualTrial) -> None:
    """Continue a trial from another trial's state, as if the state came from a checkpoint."""
    second.learners.load_state(first.learners.state())
    second.pipeline.load_state(
        json.loads(json.dumps(first.pipeline.state())), first.pipeline.buffer.groups()
    )


def history(*trials: VirtualTrial) -> list[tuple]:
    return [
        (call.round, call.prompt_indices, call.group_rounds, call.rewards)
        for w in trials
        for call in w.trained
    ]


@pytest.mark.parametrize("stopped_after", [1, 2, 3])
def test_numbers_of_environments_are_logged_from_their_first_round_on_also_after_a_resume(
    monkeypatch: pytest.MonkeyPatch, stopped_after: int
) -> None:
    """Prompts of round 1 report `calls`, and the first prompt of round 2 reports `errors`."""
    config = config_of(rounds=4)
    prompts = schedule.prompts_per_round(config)

    def reporting(prompt_index: int, **values: Any) -> RolloutGroup:
        info = {"calls": 1.0} if prompt_index < prompts else {}
        if prompt_index == prompts:
            info = {"errors": 1.0}
        return replace(group_of(prompt_index, **values), info=info)

    monkeypatch.setattr("grpo_trainable.simulation.roles.group_of", reporting)
    first, second = virtual_trial(config), virtual_trial(config)
    reports = first.run(stopped_after)
    hand_over(first, second)
    reports += second.run(config.rounds - stopped_after)
    found = [
        {name: value for name, value in report.metrics.items() if is_named_by_user(name)}
        for report in reports
    ]
    nothing = {"env/calls_mean": 0.0, "env/errors_mean": 0.0}
    assert found == [
        {"env/calls_mean": 1.0},
        {"env/calls_mean": 0.0, "env/errors_mean": 1 / prompts},
        nothing,
        nothing,
    ]


def test_the_last_evaluation_has_more_prompts_also_after_a_resume() -> None:
    config = config_of(rounds=4, eval={"final_prompts": 5})
    whole = virtual_trial(config)
    rows = whole.run(4)
    first, second = virtual_trial(config), virtual_trial(config)
    first.run(3)
    hand_over(first, second)
    (resumed,) = second.run(1)

    assert held_out_prompts(whole) == {0: [0, 1, 2], 2: [0, 1, 2], 4: [0, 1, 2, 3, 4]}
    assert held_out_prompts(second) == {4: [0, 1, 2, 3, 4]}
    assert untimed(resumed) == untimed(rows[-1])
    (held_out,) = resumed.evaluations
    assert [group.prompt_index for group in held_out.groups] == [0, 1, 2, 3, 4]


@pytest.mark.slow
@bounded
@given(configs(), speeds, seeds, st.sampled_from([0.0, 0.3, 0.8]), st.data())
def test_restored_run_goes_on_where_the_other_stopped(
    config: GRPOConfig, scale: dict[str, float], seed: int, failing: float, data: st.DataObject
) -> None:
    fails = some_fail(config, seed, failing)
    rounds_before = data.draw(st.integers(0, config.rounds - 1))

    def new_trial(timing: int) -> VirtualTrial:
        durations = long_tailed_durations(timing, scale)
        return virtual_trial(config, durations=durations, seed=timing, reward_fails=fails)

    first = new_trial(seed)
    rows = first.run(rounds_before)
    # The state as a checkpoint stores it.
    state = json.loads(json.dumps(first.pipeline.state()))
    if data.draw(st.booleans(), label="written by an earlier version"):
        # An earlier version did not store these keys. A still earlier version stored two of them,
        # each with the only value that it could have.
        for key in ("zero_advantage", "oversample", "redraws"):
            del state["work"]["rollout"][key]
        del state["work"]["pools"], state["drawn_lengths"]
        if data.draw(st.booleans(), label="spelt out"):
            state["work"]["rollout"] |= {"zero_advantage": "keep", "oversample": 1.0}
    groups = first.pipeline.buffer.groups()
    learner_state = first.learners.state()

    second = new_trial(seed + 1)
    second.learners.load_state(learner_state)
    second.pipeline.load_state(state, groups)
    rows += second.run(config.rounds - rounds_before)

    assert trained_prompts(first, second) == [
        index for index in all_prompts(config) if not fails("train", index)
    ]
    for call in second.trained:
        assert all(call.round - r <= config.lag for batch in call.group_rounds for r in batch)
    last = rows[-1].metrics
    assert last["count/requested"] == len(all_prompts(config))
    assert last["count/requested"] == last["count/trained"] + last["count/dropped"]
    assert last["count/waiting"] == last["count/in_flight"] == 0
    assert not second.runtime.uncollected
    if config.lag == 0:
        uninterrupted = new_trial(seed + 2)
        expected = uninterrupted.run(config.rounds)
        assert [untimed(row) for row in rows] == [untimed(row) for row in expected]
        assert history(first, second) == history(uninterrupted)


class Later:
    """A request to stop. The trial finds it after `looks` checks, or before the gradient steps."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    @property
    def made(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def say(self, answer: Any) -> None:
        raise AssertionError("no gradient steps have begun")


def run_abandoned_round(w: VirtualTrial, request: Later) -> None:
    """Run a round that is abandoned because of `request`."""
    rounds, wait = StoppableRounds(request, w.runtime.now), w.runtime.wait

    def look_and_wait(calls: Any, timeout_s: float) -> Any:
        rounds.look()
        return wait(calls, timeout_s)

    def training_begins() -> None:
        request.looks = 0
        rounds.training_begins(evaluates=False)

    w.runtime.wait = look_and_wait
    number = w.pipeline.gate.learner_round + 1
    with pytest.raises(RoundAbandoned), rounds.round(number):
        w.pipeline.run_round(training_begins)
    w.runtime.wait = wait


@pytest.mark.slow
@bounded
@given(configs(), speeds, seeds, st.sampled_from([0.0, 0.3, 0.8]), st.data())
def test_a_run_goes_on_from_an_abandoned_round_as_from_the_round_before(
    config: GRPOConfig, scale: dict[str, float], seed: int, failing: float, data: st.DataObject
) -> None:
    fails = some_fail(config, seed, failing)
    finished = data.draw(st.integers(0, config.rounds - 1))

    def new_trial(timing: int) -> VirtualTrial:
        durations = long_tailed_durations(timing, scale)
        return virtual_trial(config, durations=durations, seed=timing, reward_fails=fails)

    first = new_trial(seed)
    rows = first.run(finished)
    state, groups = json.dumps(first.pipeline.state()), first.pipeline.buffer.groups()
    run_abandoned_round(first, Later(data.draw(st.integers(0, 12))))
    assert len(first.trained) == finished
    saved, saved_groups = first.pipeline.checkpoint()
    assert json.dumps(saved) == state
    assert all(a is b for a, b in zip(saved_groups, groups, strict=True))

    second = new_trial(seed + 1)
    second.learners.load_state(first.learners.state())
    second.pipeline.load_state(json.loads(json.dumps(saved)), saved_groups)
    rows += second.run(config.rounds - finished)
    assert trained_prompts(first, second) == [
        index for index in all_prompts(config) if not fails("train", index)
    ]
    last = rows[-1].metrics
    assert last["count/requested"] == last["count/trained"] + last["count/dropped"]
    if config.lag == 0:
        expected = new_trial(seed + 2).run(config.rounds)
        assert [untimed(row) for row in rows] == [untimed(row) for row in expected]


@pytest.mark.slow
@bounded
@given(configs(), configs(), speeds, seeds, st.data())
def test_state_of_other_settings_is_continued_with_new_prompts(
    config: GRPOConfig, other: GRPOConfig, scale: dict[str, float], seed: int, data: st.DataObject
) -> None:
    """Load a donor's checkpoint under other settings, as PBT does."""
    rounds_before = data.draw(st.integers(0, config.rounds))
    # The total number of rounds never shrinks. Otherwise, prompts in flight for later rounds would
    # stay in flight.
    rounds_after = config.rounds - rounds_before + data.draw(st.integers(1, 3))
    other = replace(other, rounds=rounds_before + rounds_after)
    first = virtual_trial(config, durations=long_tailed_durations(seed, scale), seed=seed)
    first.run(rounds_before)
    second = virtual_trial(other, durations=long_tailed_durations(seed + 1, scale), seed=seed + 1)
    second.requests.limit = 10**6
    hand_over(first, second)
    rows = [report.metrics for report in second.run(rounds_after)]

    trained = trained_prompts(first, second)
    assert len(set(trained)) == len(trained)
    assert len(trained_prompts(second)) == rounds_after * schedule.prompts_per_round(other)
    for call in second.trained:
        assert all(call.round - r <= other.lag for batch in call.group_rounds for r in batch)
    for row in rows:
        parts = ("trained", "dropped", "waiting", "in_flight")
        assert row["count/requested"] == sum(row[f"count/{part}"] for part in parts)
    last = rows[-1]
    assert last["count/trained"] == len(trained)
    assert last["count/waiting"] == last["count/in_flight"] == 0
    # The continued trial can be continued again.
    third = virtual_trial(replace(other, rounds=other.rounds + 1))
    third.requests.limit = 10**6
    third.learners.load_state(second.learners.state())
    third.pipeline.load_state(second.pipeline.state(), second.pipeline.buffer.groups())
    third.run(1)
    assert not set(trained) & set(trained_prompts(third))


# ---- A user's reward ---------------------------------------------------------------------------


def user_reward_config(**values: Any) -> GRPOConfig:
    """Return a config with six chunks of one prompt a round."""
    rollout = {"prompts": 6, "unit_prompts": 1}
    return config_of(rounds=2, task={"reward": SCORED_APART}, rollout=rollout, **values)


def test_a_chunk_is_scored_while_the_next_is_sampled() -> None:
    w = virtual_trial(
        user_reward_config(eval={"every": 9}), durations=constant_durations(rollout=8, reward=8)
    )
    first, second = w.run(2)
    # The round takes as long as seven chunks: while the first chunk is sampled, nothing is scored,
    # and while the last chunk is scored, nothing is sampled.
    assert second.metrics["time/rollout_s"] == second.metrics["time/reward_s"] == 6 * 8 / 64
    spans = [item.span for item in second.spans]
    sampling = [span for span in spans if span.stage == "rollout"]
    scoring = [span for span in spans if span.stage == "reward"]
    assert scoring[-1].end - sampling[0].start == 7 * 8 / 64
    assert all(
        later.start == span.start for later, span in zip(sampling[1:], scoring[:-1], strict=True)
    )
    assert trained_prompts(w) == all_prompts(w.config)
    assert first.metrics["time/other_s"] == 0


def test_sampling_waits_for_a_reward_that_is_slower() -> None:
    """Check that sampling runs at most one chunk ahead of scoring."""
    w = virtual_trial(
        user_reward_config(lag=1, eval={"every": 9}),
        durations=constant_durations(rollout=1, reward=64, optimize=1),
    )
    reports = w.run(2)
    spans = [item.span for report in reports for item in report.spans]
    moments = sorted(span.end for span in spans if span.stage == "reward")
    for sampled, span in enumerate(sorted(s.start for s in spans if s.stage == "rollout")):
        scored = sum(moment <= span for moment in moments)
        assert sampled - scored < 2


# ---- Weight updates within a batch -------------------------------------------------------------


@pytest.mark.parametrize("weight_update", ["interrupt_recompute", "in_flight"])
def test_responses_take_new_weights_in_and_are_as_old_as_their_oldest_token(
    weight_update: str,
) -> None:
    config = config_of(rounds=12, lag=2, weight_update=weight_update)
    durations = constant_durations(rollout=64, optimize=32)
    w, plain = (
        virtual_trial(c, durations=durations)
        for c in (config, replace(config, weight_update="between_batches"))
    )
    reports = w.run(12)
    versions = [set(g.token_versions.flatten().tolist()) for r in reports for g in r.groups]
    assert any(len(of_group) > 1 for of_group in versions)
    for report in reports:
        assert report.metrics["lag/max"] <= 2
        assert report.metrics["lag/max"] == max(
            report.round - 1 - int(group.token_rounds.min()) for group in report.groups
        )
        assert report.metrics["count/dropped_stale"] == 0
    # Every version that a generator loaded is reported once.
    told = [c.version for r in reports for c in r.versions if c.role == "generator"]
    assert told == sorted(set(told))
    assert {version for group in versions for version in group} <= set(told)
    # Without in-flight updates, no group has tokens of two versions.
    assert all(g.token_versions.unique().numel() == 1 for r in plain.run(12) for g in r.groups)


# ---- Replay ------------------------------------------------------------------------------------


@st.composite
def replaying(draw: st.DrawFn, lags: st.SearchStrategy[int] | None = None) -> GRPOConfig:
    """Return a config whose buffer may reuse groups."""
    config = draw(configs(lags))
    capacity = draw(st.integers(2, 4))
    sampling = draw(st.sampled_from(["recency", "fifo", "uniform", "mixed"]))
    if sampling == "recency":
        batches = capacity
    else:
        batches = draw(st.integers(2 if sampling == "fifo" else 1, capacity))
    older = config.lag + draw(st.integers(1, capacity))
    buffer = {"sample_batches": batches, "max_age": draw(st.none() | st.just(older))}
    if sampling == "mixed":
        fractions = [0.2, 0.5] if batches == 1 else [0.2, 0.5, 1.0]
        buffer["fresh_fraction"] = draw(st.sampled_from(fractions))
    if sampling == "mixed" and batches == 1 and config.rollout.prompts == 1:
        buffer["sample_batches"] = 2
    data = {**config.to_dict(), "rounds": draw(st.integers(1, 10)), "buffer": buffer}
    if config.k_mode == "minibatches":
        data["k"] = min(config.k, config.rollout.prompts)
    data |= {"buffer_capacity": capacity, "buffer_sampling": sampling}
    try:
        return GRPOConfig.from_dict(data)
    except ConfigError:
        assume(False)  # rejected: mixed sampling whose draws contain only fresh groups
        raise


@pytest.mark.slow
def test_settings_that_only_training_reads_keep_what_was_sampled() -> None:
    config = GRPOConfig.from_dict({"placement": "disaggregated", "lag": 1, "rounds": 4})
    other = replace(
        config,
        rollout=replace(config.rollout, overlong="filter"),
        task=replace(config.task, length_penalty=0.1, length_target=9),
    )
    first = virtual_trial(config)
    first.run(2)
    state = json.loads(json.dumps(first.pipeline.state()))
    for key in ("rollout.overlong", "task.length_penalty"):  # as in older checkpoints
        section, _, name = key.partition(".")
        del state["work"][section][name]
    second = virtual_trial(other)
    second.learners.load_state(first.learners.state())
    second.pipeline.load_state(state, first.pipeline.buffer.groups())
    second.run(2)
    assert trained_prompts(first, second) == all_prompts(config)


@pytest.mark.slow
@bounded
@given(replaying(), speeds, seeds, st.sampled_from([0.0, 0.3, 0.8]))
def test_reuse_keeps_both_bounds_and_its_accounts_for_any_timing(
    config: GRPOConfig, scale: dict[str, float], seed: int, failing: float
) -> None:
    fails = some_fail(config, seed, failing)
    durations = long_tailed_durations(seed, scale)
    w = virtual_trial(config, durations=durations, seed=seed, reward_fails=fails)
    reports = w.run(config.rounds)

    uses: Counter[int] = Counter()
    window = config.buffer_capacity * schedule.prompts_per_round(config)
    for call in w.trained:
        end = (call.round + 1) * schedule.prompts_per_round(config)
        for batch in zip(call.prompt_indices, call.group_rounds, call.group_uses, strict=True):
            indices, rounds, counted = batch
            assert (
                len(set(indices))
                == len(indices)
                <= (config.effective("buffer.sample_batches") * config.rollout.prompts)
            )
            assert list(indices) == sorted(indices)
            for index, round_, use in zip(indices, rounds, counted, strict=True):
                uses[index] += 1
                assert use == uses[index]
                age = call.round - round_
                assert age <= (config.lag if use == 1 else schedule.max_age(config))
                assert end - window <= index < end
        # No group is in two steps of the same round.
        assert len(set(all_prompt_indices(call))) == len(all_prompt_indices(call))
    for report in reports:
        row = {name: report.metrics[f"count/{name}"] for name in
               ("requested", "trained", "dropped", "waiting", "in_flight")}  # fmt: skip
        assert row.pop("requested") == sum(row.values())
        assert report.metrics.get("lag/max", 0) <= config.lag
        assert report.metrics.get("buffer/age_max", 0) <= schedule.max_age(config)
        assert report.metrics.get("version/gap_max", 0) <= schedule.max_age(config) * config.k
        # Only groups that a later round may reuse are kept.
        used = report.metrics["buffer/size"] - report.metrics["count/waiting"]
        assert used <= (config.buffer_capacity - 1) * schedule.prompts_per_round(config)
    assert reports[-1].metrics["count/trained"] == len(uses)
    assert reports[-1].metrics["count/in_flight"] == 0
    assert not w.runtime.uncollected


@pytest.mark.slow
@bounded
@given(replaying(st.just(0)), speeds, seeds, st.data())
def test_synchronous_replay_depends_on_no_timing_and_resumes_exactly(
    config: GRPOConfig, scale: dict[str, float], seed: int, data: st.DataObject
) -> None:
    def new_trial(config: GRPOConfig, timing: int) -> VirtualTrial:
        return virtual_trial(config, durations=long_tailed_durations(timing, scale), seed=timing)

    uninterrupted = new_trial(config, seed)
    expected = uninterrupted.run(config.rounds)
    generators = 1 if config.placement == "colocated" else 3
    others = new_trial(config_with_generators(config, generators), seed + 1)
    assert [untimed(r) for r in others.run(config.rounds)] == [untimed(r) for r in expected]
    assert history(others) == history(uninterrupted)

    rounds_before = data.draw(st.integers(0, config.rounds - 1))
    first, second = new_trial(config, seed + 2), new_trial(config, seed + 3)
    rows = first.run(rounds_before)
    hand_over(first, second)
    rows += second.run(config.rounds - rounds_before)
    assert [untimed(row) for row in rows] == [untimed(row) for row in expected]
    assert history(first, second) == history(uninterrupted)


@pytest.mark.parametrize("sampling", ["recency", "fifo", "uniform", "mixed"])
@pytest.mark.parametrize("k_mode", ["same_batch", "fresh_batches"])
def test_capacity_1_is_the_run_without_a_buffer(sampling: str, k_mode: str) -> None:
    config = config_of(k=2, k_mode=k_mode)
    plain = virtual_trial(config)
    unread = copy(config)
    object.__setattr__(unread, "buffer_sampling", sampling)  # the config would reject this value
    same = virtual_trial(unread)
    rows = [[untimed(report) for report in w.run(4)] for w in (plain, same)]
    assert rows[0] == rows[1]
    assert history(plain) == history(same)


def test_replay_of_fresh_batches_keeps_each_step_to_its_own_place() -> None:
    """Check that a round's second step trains only on rollouts sampled for second batches."""
    config = config_of(
        k=2,
        k_mode="fresh_batches",
        buffer_capacity=2,
    )
    w = virtual_trial(config)
    w.run(3)
    # Two prompts a batch, two batches a round.
    assert [call.prompt_indices for call in w.trained] == [
        ((0, 1), (2, 3)),
        ((0, 1, 4, 5), (2, 3, 6, 7)),
        ((4, 5, 8, 9), (6, 7, 10, 11)),
    ]


@pytest.mark.parametrize("capacity", [2, 4])
@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("sampling", ["auto", "fifo"])
def test_replay_trains_every_fresh_group_by_default(capacity: int, lag: int, sampling: str) -> None:
    """Each round trains on its fresh batch and on as many older groups.

    A draw has 2 · 5 = 10 groups, and ceil(0.5 · 10) = 5 of them are fresh: the whole fresh batch.
    """
    config = config_of(
        lag=lag,
        rounds=8,
        buffer_capacity=capacity,
        buffer_sampling=sampling,
        rollout={"prompts": 5},
    )
    w = virtual_trial(config, durations=long_tailed_durations(3, {"rollout": 8.0}))
    reports = w.run(8)
    for call in w.trained:
        (indices,), (uses,) = call.prompt_indices, call.group_uses
        fresh = [index for index, use in zip(indices, uses, strict=True) if use == 1]
        assert fresh == [*range(5 * call.round, 5 * call.round + 5)]
        assert len(indices) == (10 if call.round > 0 else 5)
    assert reports[-1].metrics["count/trained"] == reports[-1].metrics["count/requested"] == 40
    assert reports[-1].metrics["count/dropped"] == 0


def test_a_draw_of_one_batch_leaves_fresh_groups_out() -> None:
    """Half of the four drawn groups are older, so two of the four fresh groups become too old."""
    config = config_of(
        rounds=8, buffer_capacity=2, buffer={"sample_batches": 1}, rollout={"prompts": 4}
    )
    (*_, last) = virtual_trial(config).run(8)
    # The first round has no older groups, so it trains on all four.
    assert last.metrics["count/trained"] == 4 + 7 * 2
    assert last.metrics["count/dropped_stale"] == 7 * 2


@pytest.mark.parametrize("lag", [1, 2, 4])
def test_generators_work_while_the_learner_trains_when_lag_allows_it(lag: int) -> None:
    w = virtual_trial(
        config_of(lag=lag, rounds=8), durations=constant_durations(rollout=32, optimize=32)
    )
    w.run(8)
    # During the last updates nothing is left to sample.
    for call in w.trained[:-lag]:
        assert any(g.start < call.end and call.start < g.end for g in of_stream(w, "train"))


def test_generators_have_work_between_two_rounds_when_lag_allows_it() -> None:
    w = virtual_trial(
        config_of(lag=1, rounds=8), durations=constant_durations(rollout=32, optimize=32)
    )
    in_flight = [report.metrics["count/in_flight"] for report in w.run(8)]
    # A rollout batch has two groups. The last round dispatches nothing for a further round.
    assert min(in_flight[:-2]) >= 2
    assert in_flight[-1] == 0


def test_a_round_takes_as_long_as_its_slower_side_at_lag_1() -> None:
    w = virtual_trial(
        config_of(lag=1, rounds=10, eval={"every": 10}),
        durations=constant_durations(rollout=64, optimize=48),
    )
    ends = [report.end for report in w.run(10)]
    seconds = [after - before for before, after in pairwise(ends[2:-1])]
    # A round takes one second of sampling, plus the tick in which the generator loads weights.
    assert seconds == [65 / 64] * len(seconds)


def test_generator_waits_at_the_bound_for_a_slow_learner() -> None:
    w = virtual_trial(
        config_of(lag=2, rounds=8), durations=constant_durations(rollout=1, optimize=64)
    )
    reports = w.run(8)
    assert [report.metrics["lag/max"] for report in reports] == [0, 1, 2, 2, 2, 2, 2, 2]


def test_lag_metrics_are_those_of_the_groups_trained_on() -> None:
    w = virtual_trial(
        config_of(lag=1, rounds=3), durations=constant_durations(rollout=4, optimize=16)
    )
    reports = w.run(3)
    assert [report.metrics["lag/mean"] for report in reports] == [0.0, 1.0, 1.0]
    assert [report.metrics["version/gap_max"] for report in reports] == [0.0, 1.0, 1.0]
    assert [report.metrics["version/learner"] for report in reports] == [1.0, 2.0, 3.0]


def test_every_row_tells_the_rewards_of_the_groups_it_trained_on() -> None:
    # The learner is slow: at lag 2 nothing new arrives in the last two rounds.
    w = virtual_trial(
        config_of(lag=2, rounds=5), durations=constant_durations(rollout=1, optimize=64)
    )
    for report in w.run(5):
        # The fake actor's answer reward equals its reward, but in double precision.
        answer = report.metrics["reward/answer_mean"]
        assert answer == pytest.approx(report.metrics["reward/train_mean"], abs=1e-6)
        assert 0 < report.metrics["reward/format_mean"] < 1


def test_a_reward_that_does_not_judge_the_format_has_no_metric_of_the_format() -> None:
    (report,) = virtual_trial(config_of(rounds=1)).run(1)
    unjudged = [
        replace(group, format_rewards=torch.full_like(group.rewards, torch.nan))
        for group in report.groups
    ]
    row = update_metrics(report.updated, unjudged)
    assert row["reward/answer_mean"] == report.metrics["reward/answer_mean"]
    assert "reward/format_mean" not in row
    # A mix of tasks may judge the format of some groups.
    mixed = update_metrics(report.updated, [report.groups[0], *unjudged[1:]])
    assert mixed["reward/format_mean"] == report.groups[0].format_mean


@pytest.mark.slow
@bounded
@given(
    configs(lags=st.just(0)).filter(
        lambda config: config.resources.num_generators == 1 and config.task.reward != SCORED_APART
    ),
    speeds,
    seeds,
)
def test_seconds_of_a_synchronous_round_add_up(
    config: GRPOConfig, scale: dict[str, float], seed: int
) -> None:
    w = virtual_trial(
        config, durations=long_tailed_durations(seed, scale), seed=seed, latency=1 / 64
    )
    for report in w.run(config.rounds):
        row = report.metrics
        stages = ("rollout", "reward", "optimize", "reference", "sync", "eval", "other")
        assert sum(row[f"time/{stage}_s"] for stage in stages) == row["time/step_s"]
        assert row["time/step_s"] == report.end - report.start
        # Each call adds its latency to this time, unless another call runs meanwhile. All other
        # time is accounted for.
        assert 0 < row["time/other_s"] <= (len(report.spans) + 1) / 64


def test_stages_are_timed_by_the_clock_of_the_actor_that_does_them() -> None:
    w = virtual_trial(
        config_of(rounds=1, eval={"prompts": 1}),
        durations=constant_durations(rollout=8, optimize=6, sync=2, eval=4),
    )
    (report,) = w.run(1)
    seconds = {name: value * 64 for name, value in report.metrics.items() if "time/" in name}
    assert seconds["time/rollout_s"] == seconds["time/reward_s"] == 4
    assert seconds["time/optimize_s"] == seconds["time/reference_s"] == 3
    assert seconds["time/sync_s"] == 2 + 2  # publish, then load
    assert seconds["time/eval_s"] == 4 + 4  # before the first round and after the last
    assert seconds["time/other_s"] == 0
    # The generator idles while the learner updates and publishes. The learner idles in the first
    # evaluation and the rollout.
    assert seconds["time/generator_idle_s"] == 6 + 2
    assert report.metrics["sync/bytes"] == 1000


def test_each_sync_is_told_with_its_version_in_every_generator() -> None:
    w = virtual_trial(
        config_of(rounds=3, resources={"num_generators": 2}),
        durations=constant_durations(rollout=8, optimize=6, sync=2, eval=4),
    )
    reports = w.run(3)
    told = [change for report in reports for change in report.versions]
    assert {change.sync for change in told if change.role == "learner"} == {None}
    syncs = [change for change in told if change.role == "generator"]
    assert Counter((change.actor, change.weights_round) for change in syncs) == {
        (f"generator-{i}", round_): 1 for i in range(2) for round_ in range(4)
    }
    once = Sync(transport="virtual", bytes=1000, publish_s=2 / 64, transfer_s=2 / 64, load_s=0.0)
    assert {change.sync for change in syncs} == {once}
    assert {report.metrics["sync/first_s"] for report in reports} == {4 / 64}


@pytest.mark.parametrize(
    ("actor", "stage"),
    [("generator-1", "rollout"), ("generator-0", "eval"), ("learner", "optimize"),
     ("learner", "sync"), ("generator-1", "sync")],
)  # fmt: skip
def test_actor_that_never_answers_is_named_with_its_stage(actor: str, stage: str) -> None:
    config = config_of(
        rounds=9,
        rollout={"unit_prompts": 1},
        eval={"every": 50},
        # A second generator would take over the held-out prompts.
        resources={"deadline_s": 30.0, "num_generators": 1 if stage == "eval" else 2},
    )
    # The actor's replacements never answer either.
    w = virtual_trial(config, hangs=lambda name, at, n: (name, at) == (actor, stage) and n >= 2)
    with pytest.raises(ActorFailed) as failure:
        w.run(config.rounds)
    assert "resources.deadline_s=30 s" in str(failure.value)
    assert f"{actor} ({stage})" in str(failure.value)


def test_failing_actor_is_named_with_its_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    w = virtual_trial(config_of())
    learner = w.learners._actors[0]._role

    def update(*args: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(learner, "update", update)
    w.pipeline.send_first_weights()
    with pytest.raises(ActorFailed, match=r"optimize: learner failed with .*out of memory"):
        w.pipeline.run_round()


def test_too_many_failed_rewards_end_the_trial() -> None:
    config = config_of(rounds=8, rollout={"prompts": 4}, task={"max_error_rate": 0.2})
    w = virtual_trial(
        config, reward_fails=lambda stream, index: stream == "train" and index % 2 == 1
    )
    with pytest.raises(ActorFailed, match=r"task\.max_error_rate=0\.2.*KeyError: 'apple'"):
        w.run(config.rounds)


def test_a_failure_among_the_first_rewards_is_no_rate() -> None:
    # A fifth of the 64 responses to the first 32 prompts is 12.8. So six prompts of two responses
    # may fail, even the first six, and seven may not.
    config = config_of(
        rounds=2, rollout={"prompts": 8, "unit_prompts": 1}, task={"max_error_rate": 0.2}
    )
    w = virtual_trial(config, reward_fails=lambda stream, index: stream == "train" and index < 6)
    assert w.run(2)[-1].metrics["count/reward_errors"] == 12
    w = virtual_trial(config, reward_fails=lambda stream, index: stream == "train" and index < 7)
    with pytest.raises(
        ActorFailed, match=r"failed on 14 of \d+ responses \(task.max_error_rate=0\.2"
    ):
        w.run(2)


def test_few_failed_rewards_drop_their_groups_and_are_counted() -> None:
    config = config_of(rounds=2, rollout={"prompts": 4}, task={"max_error_rate": 0.5})
    w = virtual_trial(config, reward_fails=lambda stream, index: stream == "train" and index == 1)
    first, second = w.run(2)
    assert first.notes == [
        "the reward function failed on 2 responses, so 1 group cannot be trained on; for example "
        "on prompt 1: KeyError: 'apple'"
    ]
    assert second.notes == []
    last = second.metrics
    assert last["count/dropped_reward"] == last["count/dropped"] == 1
    assert last["count/reward_errors"] == config.rollout.group_size
    assert trained_prompts(w) == [0, 2, 3, 4, 5, 6, 7]


def test_strict_task_ends_at_the_first_failed_reward() -> None:
    config = config_of(task={"strict": True, "max_error_rate": 1.0})
    w = virtual_trial(config, reward_fails=lambda stream, index: stream == "train" and index == 3)
    w.pipeline.send_first_weights()
    w.pipeline.run_round()
    with pytest.raises(ActorFailed, match="for example on prompt 3"):
        w.pipeline.run_round()


@pytest.mark.parametrize("lag", [0, 1])
def test_round_without_a_single_group_is_skipped_and_counted(lag: int) -> None:
    """Run two prompts a round; both prompts of the second round fail."""
    config = config_of(rounds=4, lag=lag, task={"max_error_rate": 0.2})
    w = virtual_trial(
        config, reward_fails=lambda stream, index: stream == "train" and index in (2, 3)
    )
    reports = w.run(4)
    assert [call.prompt_indices for call in w.trained] == [((0, 1),), (), ((4, 5),), ((6, 7),)]
    rows = [report.metrics for report in reports]
    assert [row["version/learner"] for row in rows] == [1, 1, 2, 3]
    assert [row["count/skipped_rounds"] for row in rows] == [0, 1, 1, 1]
    assert [row["count/trained"] for row in rows] == [2, 2, 4, 6]
    assert [row["count/dropped_reward"] for row in rows][-1] == 2
    assert [row["eval/round"] for row in rows] == [0, 2, 2, 4]
    # The only absent metrics are those for which there was nothing to measure.
    absent = rows[0].keys() - rows[1].keys()
    assert {name.split("/")[0] for name in absent} == {
        *("reward", "response", "lag", "loss", "policy", "optim", "group", "buffer", "kl"),
        *("version", "off_policy"),
    }
    assert not {"reward/eval_mean", "version/learner", "buffer/size"} & absent
    assert rows[1].keys() <= rows[2].keys() == rows[0].keys()
    (note,) = [note for note in reports[1].notes if "took no gradient step" in note]
    (failed,) = [each for report in reports for each in report.notes if each != note]
    assert failed.startswith("the reward function failed on 4 responses, so 2 groups cannot be")


def test_empty_batch_costs_its_own_gradient_step_alone() -> None:
    """Run three batches of two prompts a round; the first batch of the second round fails."""
    config = config_of(rounds=2, k=3, k_mode="fresh_batches")
    w = virtual_trial(
        config, reward_fails=lambda stream, index: stream == "train" and index in (6, 7)
    )
    last = w.run(2)[-1]
    assert w.trained[-1].prompt_indices == ((8, 9), (10, 11))
    assert last.metrics["version/learner"] == 5
    assert last.metrics["count/skipped_rounds"] == 0
    missing, failed = last.notes
    assert missing.startswith("1 of 3 rollout batches had no group left")
    assert failed.startswith("the reward function failed on 4 responses, so 2 groups cannot be")


@pytest.mark.slow
def test_one_bad_prompt_among_21_ends_no_trial_of_one_prompt_a_round() -> None:
    for bad in range(21):
        config = config_of(rounds=63, rollout={"prompts": 1}, eval={"every": 63})
        w = virtual_trial(config, reward_fails=lambda s, c, bad=bad: s == "train" and c % 21 == bad)
        assert w.run(63)[-1].metrics["count/skipped_rounds"] == 3


def scored(*groups: RolloutGroup, unverified: int) -> Scored:
    return Scored(
        groups=list(groups),
        failed=[],
        reward_errors=0,
        unverified=unverified,
        loaded=[],
        spans=[],
    )


def test_answers_that_could_not_be_verified_are_counted_and_end_no_trial() -> None:
    config = config_of(task={"strict": True})
    collector = Collector(config, StalenessGate(lag=0, max_age=0), Recorder(), ByTask(config))
    for _ in range(2):
        chunk = collector.take()
        groups = [one_token_group(index) for index in chunk.prompt_indices]
        collector.accept(chunk, scored(*groups, unverified=2))
    assert collector.metrics()["count/unverified"] == 4
    assert collector.metrics()["count/reward_errors"] == 0


def test_held_out_answers_that_could_not_be_verified_are_told() -> None:
    config = config_of()  # three prompts of two responses
    groups = [one_token_group(index, rewards=(1.0, 0.0)) for index in range(3)]
    answers = [scored(groups[0], unverified=1), scored(*groups[1:], unverified=2)]
    evaluation, _, notes = held_out_rewards(config, 0, None, answers, ByTask(config))
    assert evaluation.mean == 0.5
    assert notes == ["3 of 6 held-out responses could not be verified and count as wrong"]


def test_an_evaluation_keeps_the_parts_of_the_first_evaluation() -> None:
    config = config_of()  # three prompts of two responses
    last = None
    for round_, short in enumerate((0.25, 0.5, 0.75)):
        groups = [
            replace(one_token_group(i, rewards=(1.0, 0.0)), parts={"short": [short, short]})
            for i in range(3)
        ]
        answers = [scored(*groups, unverified=0)]
        last, _, _ = held_out_rewards(config, round_, last, answers, ByTask(config))
    assert last is not None
    row = evaluation_metrics(last)
    assert (row["eval_part/short_first"], row["eval_part/short_mean"]) == (0.25, 0.75)


def some_held_out_fail(*prompt_indices: int) -> Callable[[str, int], bool]:
    return lambda stream, index: stream == "eval" and index in prompt_indices


def test_held_out_prompts_without_a_score_are_counted_and_told() -> None:
    config = config_of(rounds=3, eval={"prompts": 6}, task={"max_error_rate": 0.5})
    w = virtual_trial(config, reward_fails=some_held_out_fail(1, 4))
    reports = w.run(3)
    assert [report.metrics["eval/unscored"] for report in reports] == [2, 2, 2]
    # One note per evaluation: before the first round, after the second and after the third.
    assert [len(report.notes) for report in reports] == [1, 1, 1]
    assert reports[0].notes[0].startswith("2 of 6 held-out prompts could not be scored")
    assert "(prompt 1: KeyError: 'apple')" in reports[0].notes[0]
    # Held-out failures do not count in training.
    assert reports[-1].metrics["count/reward_errors"] == 0


def test_number_of_unscored_prompts_survives_a_checkpoint() -> None:
    config = config_of(rounds=3, eval={"every": 9, "prompts": 6}, task={"max_error_rate": 0.5})
    first = virtual_trial(config, reward_fails=some_held_out_fail(3))
    first.run(1)
    second = virtual_trial(config, reward_fails=some_held_out_fail(3))
    second.learners.load_state(first.learners.state())
    second.pipeline.load_state(first.pipeline.state(), first.pipeline.buffer.groups())
    assert second.run(1)[-1].metrics["eval/unscored"] == 1


def test_every_prompt_scored_is_no_note() -> None:
    report = virtual_trial(config_of(rounds=1)).run(1)[0]
    assert report.metrics["eval/unscored"] == 0
    assert not report.notes


def test_evaluation_above_the_error_rate_ends_the_trial() -> None:
    # Two prompts with 2 responses each fail. These 4 responses are more than a twentieth of the 64
    # responses to 32 prompts.
    config = config_of(eval={"prompts": 6}, task={"max_error_rate": 0.05})
    w = virtual_trial(config, reward_fails=some_held_out_fail(2, 5))
    with pytest.raises(
        ActorFailed,
        match=r"eval: .* failed on 4 of 12 held-out responses \(task.max_error_rate=0.05\); .*"
        "prompt 2: KeyError: 'apple'",
    ):
        w.run(1)
    w = virtual_trial(replace(config, task=replace(config.task, max_error_rate=0.0625)),
              reward_fails=some_held_out_fail(2, 5))  # fmt: skip
    w.run(1)


@pytest.mark.parametrize(
    ("task", "who"),
    [({"reward": "virtual:reward"}, "the reward function"), ({"name": "guess"}, "the environment")],
)
@pytest.mark.parametrize("stream", ["eval", "train"])
def test_a_failed_reward_is_said_of_who_gives_it(task, who, stream) -> None:
    config = GRPOConfig.from_dict({"rounds": 1, "task": {**task, "strict": True}})
    w = virtual_trial(config, reward_fails=lambda where, index: where == stream)
    with pytest.raises(ActorFailed, match=rf"(eval|reward): {who} failed on \d+ of"):
        w.run(1)


def test_a_failure_in_a_small_evaluation_is_no_rate() -> None:
    """Two responses are a sixth of 12, but less than a tenth of the 64 responses to 32 prompts."""
    config = config_of(eval={"prompts": 6}, task={"max_error_rate": 0.1})
    report = virtual_trial(config, reward_fails=some_held_out_fail(2)).run(1)[0]
    assert report.metrics["eval/unscored"] == 1


def test_strict_task_ends_at_the_first_failed_held_out_reward() -> None:
    config = config_of(task={"strict": True, "max_error_rate": 1.0})
    with pytest.raises(ActorFailed, match=r"eval: .*task\.strict allows none.* prompt 1"):
        virtual_trial(config, reward_fails=some_held_out_fail(1)).run(1)


def test_evaluation_without_a_single_reward_is_an_error() -> None:
    w = virtual_trial(
        config_of(task={"max_error_rate": 1.0}),
        reward_fails=lambda stream, index: stream == "eval",
    )
    w.pipeline.send_first_weights()
    with pytest.raises(ActorFailed, match=r"6 of 6 held-out responses.*nothing could be scored"):
        w.pipeline.run_round()


def test_first_evaluation_stays_in_every_row() -> None:
    w = virtual_trial(config_of(rounds=5, eval={"every": 2}))
    rows = [report.metrics for report in w.run(5)]
    assert [row["eval/round"] for row in rows] == [0, 2, 2, 4, 5]
    assert len({row["reward/eval_first"] for row in rows}) == 1
    assert len({row["reward/eval_mean"] for row in rows}) == 4


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_evaluation_between_two_rounds_disturbs_none(lag: int) -> None:
    config = config_of(rounds=5, lag=lag, eval={"every": 2})
    w = virtual_trial(config)
    w.pipeline.send_first_weights()
    measured, rows = [], []
    for _ in range(config.rounds):
        measured.append(w.pipeline.evaluate().round)
        rows.append(w.pipeline.run_round().metrics)
    measured.append(w.pipeline.evaluate().round)
    # Each round is evaluated once, whether or not an evaluation is due.
    assert measured == [0, 1, 2, 3, 4, 5]
    seen = [
        (call.weights_round, index)
        for call in of_stream(w, "eval")
        for index in call.prompt_indices
    ]
    assert sorted(seen) == [(round_, index) for round_ in measured for index in range(3)]
    assert trained_prompts(w) == all_prompts(config)
    assert all(row["lag/max"] <= lag for row in rows)
    assert not w.runtime.uncollected
    if lag == 0:
        undisturbed = [report.metrics for report in virtual_trial(config).run(config.rounds)]
        # `evaluate` has already run the evaluation that the first round would run.
        undisturbed[0]["time/step_s"] -= undisturbed[0]["time/eval_s"]
        undisturbed[0]["time/eval_s"] = 0.0
        shares = shares_of_work(undisturbed[0]).items()
        undisturbed[0] |= {f"time/{stage}_fraction": share for stage, share in shares}
        others = ("reward/eval_", "eval/", "time/generator_idle", "time/learner_idle")
        for row, expected in zip(rows, undisturbed, strict=True):
            assert {k: v for k, v in row.items() if not k.startswith(others)} == {
                k: v for k, v in expected.items() if not k.startswith(others)
            }


# ---- Round details besides the metrics ---------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_trial_ends_with_evaluation_and_closed_accounts_above_kl_stop(lag: int) -> None:
    # The fake learner drifts by one nat per round.
    config = config_of(rounds=20, lag=lag, eval={"every": 50}, callbacks={"kl_stop": 4.5})
    w = virtual_trial(config, durations=long_tailed_durations(lag, {"rollout": 9, "optimize": 9}))
    w.pipeline.send_first_weights()
    reports = [w.pipeline.run_round()]
    while not reports[-1].last:
        reports.append(w.pipeline.run_round())
    last = reports[-1]
    assert last.round == len(reports) == 5
    assert last.metrics["kl/reference_nats"] == 5.0
    assert last.metrics["eval/round"] == 5.0
    assert [held_out.round for held_out in last.evaluations] == [5]
    assert not w.runtime.uncollected
    assert last.metrics["count/in_flight"] == 0
    assert last.metrics["count/requested"] == (
        last.metrics["count/trained"] + last.metrics["count/waiting"]
    )
    # After a restore from its last checkpoint, the trial is still over.
    again = virtual_trial(config)
    again.learners.load_state(w.learners.state())
    again.pipeline.load_state(w.pipeline.state(), w.pipeline.buffer.groups())
    assert w.pipeline.ended
    assert again.pipeline.ended


@pytest.mark.parametrize("generators", [1, 3])
def test_version_changes_are_told_by_the_actors_that_made_them(generators: int) -> None:
    config = config_of(rounds=6, lag=1, k=2, resources={"num_generators": generators})
    w = virtual_trial(
        config, durations=long_tailed_durations(3, {"rollout": 9, "optimize": 9}), seed=3
    )
    changes = [change for report in w.run(6) for change in report.versions]
    by_actor: dict[str, list[tuple[int, int]]] = {}
    for change in changes:
        by_actor.setdefault(change.actor, []).append((change.version, change.weights_round))
    trained = [(2 * round_, round_) for round_ in range(1, 7)]
    assert by_actor.pop("learner") == trained
    # Each generator loaded the first weights and the weights of every round, in order.
    assert list(by_actor.values()) == [[(0, 0), *trained]] * generators
    # No generator has weights before the learner has made them.
    made = {c.version: c.at for c in changes if c.role == "learner"}
    assert all(c.at >= made[c.version] for c in changes if c.role != "learner" and c.version)


def test_held_out_responses_come_in_prompt_order_whoever_sampled_them() -> None:
    config = config_of(
        rounds=4,
        eval={"every": 2, "prompts": 9},
        rollout={"prompts": 3, "unit_prompts": 1},
        resources={"num_generators": 3},
    )
    w = virtual_trial(config, durations=long_tailed_durations(1, {"eval": 20}), seed=1)
    reports = w.run(4)
    assert [[h.round for h in report.evaluations] for report in reports] == [[0], [2], [], [4]]
    for report in reports:
        for held_out in report.evaluations:
            assert [group.prompt_index for group in held_out.groups] == list(range(9))


# ---- Lost generators ---------------------------------------------------------------------------


def some_die(config: GRPOConfig, seed: int, share: float) -> Callable[[str, str, int], bool]:
    """Return a function that decides whether a generator dies in a call.

    A generator dies at most three times in a row, once in each stage.
    """
    # With a user's reward there are four stages, so one of them is spared.
    spared = ("rollout", "reward")[seed % 2] if config.task.reward == SCORED_APART else ""

    def dies(actor: str, stage: str, n: int) -> bool:
        # The first load is at the start, when lost generators are not replaced yet.
        if actor == "learner" or (stage, n) == ("sync", 1) or stage == spared:
            return False
        return n % 3 == 0 and random.Random(f"{seed}/{actor}/{stage}/{n}").random() < share

    return dies


@pytest.mark.slow
@bounded
@given(configs(), speeds, seeds, st.sampled_from([0.1, 0.5]), st.sampled_from([0.0, 1 / 64]))
def test_lost_generators_cost_no_prompt_and_break_no_bound(
    config: GRPOConfig, scale: dict[str, float], seed: int, share: float, latency: float
) -> None:
    config = config_with_generators(config, config.resources.num_generators)
    dies = some_die(config, seed, share)
    durations = long_tailed_durations(seed, scale)
    w = virtual_trial(config, durations=durations, seed=seed, latency=latency, dies=dies)
    reports = []
    w.pipeline.send_first_weights()
    for _ in range(config.rounds):
        try:
            reports.append(w.pipeline.run_round())
        except ActorFailed as error:
            # The drawn deaths may contain four losses in a row, which end a trial.
            assume("without finishing any work" not in str(error))
            raise
        counts = {k[6:]: v for k, v in reports[-1].metrics.items() if k.startswith("count/")}
        assert counts["requested"] == (
            counts["trained"] + counts["dropped"] + counts["waiting"] + counts["in_flight"]
        )
        assert reports[-1].metrics["lag/max"] <= config.lag
    assert trained_prompts(w) == all_prompts(config)
    for call in w.trained:
        assert all(call.round - r <= config.lag for batch in call.group_rounds for r in batch)
    assert not w.runtime.uncollected
    assert not used_after_release(w)
    for call in of_stream(w, "eval"):
        assert call.weights_round == sum(t.end <= call.start for t in w.trained)
    assert counts["waiting"] == counts["in_flight"] == counts["dropped"] == 0
    asked = [index for stream, index in w.requests.asked if stream == "train"]
    assert len(asked) == len(all_prompts(config)) + counts["redispatched"]
    assert bool(sum(len(report.notes) for report in reports)) >= bool(counts["redispatched"])
    if config.lag == 0:
        undisturbed = virtual_trial(config)
        rows = [untimed(report) for report in undisturbed.run(config.rounds)]
        ours = [untimed(report) for report in reports]
        for row in (*rows, *ours):
            row.pop("count/redispatched")
        assert ours == rows
        assert history(w) == history(undisturbed)


def test_generator_that_hangs_is_replaced_after_the_deadline() -> None:
    config = config_of(rounds=3, resources={"deadline_s": 30.0})
    w = virtual_trial(config, hangs=lambda name, stage, n: (stage, n) == ("rollout", 2))
    reports = w.run(3)
    (note,) = [note for report in reports for note in report.notes]
    assert "generator-0 was replaced (no answer within resources.deadline_s=30 s" in note
    assert note.endswith("; sampling 2 prompts again")
    assert reports[-1].metrics["count/redispatched"] == 2
    assert w.runtime.now() > 30


@pytest.mark.slow
@pytest.mark.parametrize("mute", [False, True])
@pytest.mark.parametrize("lag", [0, 1, 4])
def test_hang_is_noticed_within_twice_the_deadline_whatever_others_answer(
    lag: int, mute: bool
) -> None:
    """A stuck process answers progress questions, and a stopped (`mute`) process does not."""
    config = config_of(
        rounds=16,
        lag=lag,
        rollout={"prompts": 4, "unit_prompts": 1},
        eval={"every": 50},
        resources={"deadline_s": 1.0, "num_generators": 2},
    )
    # Chunks take half a second, so the other generator and the learner answer all the time.
    w = virtual_trial(
        config,
        durations=constant_durations(rollout=32, optimize=32),
        hangs=lambda name, stage, n: (name, stage, n) == ("generator-1", "rollout", 3),
        mute=mute,
    )
    w.run(config.rounds)
    ((hung, since),) = w.runtime.hangs
    ((killed, at),) = w.runtime.kills
    assert hung == killed == "generator-1"
    assert since + 0.5 <= at <= since + 2.0


@pytest.mark.slow
@bounded
@given(configs(), speeds, seeds, st.booleans(), st.integers(1, 9))
def test_whatever_hangs_is_replaced_in_time_and_nothing_that_goes_on(
    config: GRPOConfig, scale: dict[str, float], seed: int, mute: bool, n: int
) -> None:
    config = config_with_generators(config, config.resources.num_generators)
    # Calls take up to several minutes, and make progress every quarter of a second.
    config = replace(
        config,
        resources=replace(config.resources, deadline_s=1.0),
        task=replace(config.task, reward_deadline_s=0.5),
    )
    # Nobody waits for a generator while the learner publishes.
    durations = long_tailed_durations(seed, {**scale, "sync": 0.0})
    hung = f"generator-{seed % config.resources.num_generators}"
    beside = config.task.reward == SCORED_APART
    stages = ["rollout", "eval", *(["reward"] if beside else [])]
    stage = random.Random(seed).choice(stages)
    w = virtual_trial(
        config,
        durations=durations,
        seed=seed,
        hangs=lambda *call: call == (hung, stage, n),
        step_s=0.25,
        mute=mute,
    )
    w.run(config.rounds)
    assert [name for name, _ in w.runtime.kills] == [name for name, _ in w.runtime.hangs]
    for (_, since), (_, killed) in zip(w.runtime.hangs, w.runtime.kills, strict=True):
        assert since + 0.5 <= killed <= since + 2.0
    assert trained_prompts(w) == all_prompts(config)


def test_learner_that_hangs_is_named_though_generators_answer() -> None:
    config = config_of(lag=4, rounds=16, resources={"deadline_s": 1.0})
    w = virtual_trial(config, hangs=lambda name, stage, n: (stage, n) == ("optimize", 2))
    with pytest.raises(ActorFailed, match=r"resources\.deadline_s=1 s from learner \(optimize\)"):
        w.run(config.rounds)
    ((_, since),) = w.runtime.hangs
    assert w.runtime.now() <= since + 2.0


def test_replacement_has_the_newest_weights_before_it_samples() -> None:
    config = config_of(rounds=4)
    w = virtual_trial(config, dies=lambda name, stage, n: (stage, n) == ("rollout", 3))
    w.run(4)
    rounds = [call.weights_round for call in of_stream(w, "train")]
    assert rounds == [0, 1, 2, 3]


def test_generator_that_dies_again_and_again_ends_the_trial() -> None:
    w = virtual_trial(config_of(), dies=lambda name, stage, n: stage == "rollout")
    with pytest.raises(ActorFailed, match=r"generator-0 was replaced 3 times without finishing"):
        w.run(1)


@pytest.mark.parametrize("placement", ["colocated", "disaggregated"])
def test_lost_learner_is_the_end(placement: str) -> None:
    w = virtual_trial(
        config_of(placement=placement), dies=lambda name, stage, n: stage == "optimize"
    )
    with pytest.raises(ActorFailed, match=r"optimize: (learner|worker) died"):
        w.run(1)
