"""With `lag_mode=exact`, groups wait until they are exactly `lag` rounds old, on any placement."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from policies import write_quick_policy
from test_pipeline import (
    Later,
    all_prompts,
    assert_counts_close,
    assert_evaluated,
    bounded,
    config_of,
    configs,
    hand_over,
    history,
    overlaps,
    run_abandoned_round,
    seeds,
    speeds,
    trained_prompts,
    untimed,
)
from test_resample import chunks_sampled
from virtual_time import long_tailed_durations, of_stream, used_after_release

from grpo_trainable.config import GRPOConfig, schedule
from grpo_trainable.generator.generator import Generator
from grpo_trainable.learner.learner import Learner
from grpo_trainable.models.directory import policy_tokenizer
from grpo_trainable.pipeline import Pipeline
from grpo_trainable.pipeline.learner_group import LearnerGroup
from grpo_trainable.protocol.checksums import checksum
from grpo_trainable.protocol.messages import Scored
from grpo_trainable.protocol.rollout import Request
from grpo_trainable.simulation.runtime import VirtualActor, VirtualRuntime
from grpo_trainable.simulation.trial import VirtualTrial, virtual_trial
from grpo_trainable.tasks.prompts import Prompts, build_task
from grpo_trainable.transports.in_process import InProcess

LAGS = (0, 1, 2, 4, 8)
RESAMPLE = {"zero_advantage": "resample", "oversample": 8.0, "redraws": 8}


@st.composite
def exact(draw: st.DrawFn) -> GRPOConfig:
    """Return any config with an exact lag, on any placement, with or without resampling."""
    data = draw(configs(lags=st.just(0))).to_dict()
    data |= {"lag": draw(st.sampled_from(LAGS)), "lag_mode": "exact"}
    data["rollout"] |= draw(st.sampled_from([{}, RESAMPLE]))
    return GRPOConfig.from_dict(data)


def with_values(config: GRPOConfig, **values: Any) -> GRPOConfig:
    return GRPOConfig.from_dict({**config.to_dict(), **values})


def lags_of(*trials: VirtualTrial) -> list[set[int]]:
    """Return, for each round, the lags of the groups that the round trained on."""
    return [
        {call.round - round_ for batch in call.group_rounds for round_ in batch}
        for w in trials
        for call in w.trained
    ]


@pytest.mark.parametrize("placement", ["colocated", "disaggregated"])
def test_groups_wait_for_their_round(placement: str) -> None:
    w = virtual_trial(config_of(placement=placement, rounds=5, lag=2, lag_mode="exact"))
    reports = w.run(5)

    # There are two prompts per round. The initial weights sample for rounds 0 to 2, and the weights
    # of rounds 1 and 2 sample for rounds 3 and 4. Later weights sample nothing, because no round
    # would train on their rollouts.
    sampled: dict[int, list[int]] = {}
    for call in of_stream(w, "train"):
        sampled.setdefault(call.weights_round, []).extend(call.prompt_indices)
    assert sampled == {0: [0, 1, 2, 3, 4, 5], 1: [6, 7], 2: [8, 9]}
    assert [call.prompt_indices for call in w.trained] == [
        *(((0, 1),), ((2, 3),), ((4, 5),), ((6, 7),), ((8, 9),))
    ]
    assert lags_of(w) == [{0}, {1}, {2}, {2}, {2}]
    rows = [report.metrics for report in reports]
    assert [row["lag/max"] for row in rows] == [row["lag/mean"] for row in rows] == [0, 1, 2, 2, 2]
    assert [row["version/gap_max"] for row in rows] == [0, 1, 2, 2, 2]
    assert [row["count/requested"] for row in rows] == [6, 8, 10, 10, 10]
    assert [row["count/waiting"] for row in rows] == [4, 4, 4, 2, 0]
    assert [row["count/trained"] for row in rows] == [2, 4, 6, 8, 10]
    assert not overlaps(w)


@pytest.mark.slow
@bounded
@given(exact(), speeds, seeds, st.sampled_from([0.0, 0.3, 0.7]), st.data())
def test_after_the_first_rounds_every_group_has_exactly_the_lag(
    config: GRPOConfig, scale: dict[str, float], seed: int, share: float, data: st.DataObject
) -> None:
    def equal(index: int, weights_round: int) -> bool:
        return random.Random(f"{seed} {index} {weights_round}").random() < share

    def new_trial(timing: int) -> VirtualTrial:
        durations = long_tailed_durations(timing, scale)
        return virtual_trial(config, durations=durations, seed=timing, equal_rewards=equal)

    w = new_trial(seed)
    w.pipeline.send_first_weights()
    reports = []
    for _ in range(config.rounds):
        reports.append(w.pipeline.run_round())
        assert_counts_close(reports[-1], w)
        assert not w.runtime.uncollected, "something is in flight between two rounds"
    expected = [{min(config.lag, round_)} for round_ in range(config.rounds)]
    assert all(
        found <= wanted and bool(found) == bool(call.prompt_indices)
        for found, wanted, call in zip(lags_of(w), expected, w.trained, strict=True)
    )
    assert not overlaps(w)
    assert not used_after_release(w)
    assert_evaluated(w)
    last = reports[-1].metrics
    assert last["count/waiting"] == last["count/in_flight"] == last["count/dropped_stale"] == 0
    if config.rollout.zero_advantage == "keep":
        assert trained_prompts(w) == all_prompts(config)

    # Neither the actors' speeds nor a stop changes what the trial trains on.
    rows = [untimed(report) for report in reports]
    finished = data.draw(st.integers(0, config.rounds - 1))
    first, second = new_trial(seed + 1), new_trial(seed + 2)
    again = [untimed(report) for report in first.run(finished)]
    if data.draw(st.booleans(), label="in the middle of a round"):
        run_abandoned_round(first, Later(data.draw(st.integers(0, 12))))
    state, groups = first.pipeline.checkpoint()
    second.learners.load_state(first.learners.state())
    second.pipeline.load_state(json.loads(json.dumps(state)), groups)
    again += [untimed(report) for report in second.run(config.rounds - finished)]
    assert again == rows
    assert history(first, second) == history(w)


@pytest.mark.slow
@bounded
@given(configs(lags=st.just(0)), speeds, seeds, st.sampled_from([{}, RESAMPLE]))
def test_lag_0_is_the_synchronous_run(
    config: GRPOConfig, scale: dict[str, float], seed: int, rollout: dict[str, Any]
) -> None:
    data = config.to_dict()
    data["rollout"] |= rollout

    def trial(lag_mode: str) -> VirtualTrial:
        return virtual_trial(
            GRPOConfig.from_dict({**data, "lag_mode": lag_mode}),
            durations=long_tailed_durations(seed, scale),
            seed=seed,
            equal_rewards=lambda index, weights_round: index % 3 == 0,
        )

    synchronous, exact = trial("bounded"), trial("exact")
    rows = [report.metrics for report in synchronous.run(config.rounds)]
    assert [report.metrics for report in exact.run(config.rounds)] == rows
    assert exact.trained == synchronous.trained
    assert exact.generated == synchronous.generated


def test_a_prompt_belongs_to_the_same_round_at_every_lag() -> None:
    trials = [virtual_trial(config_of(rounds=6, lag=lag, lag_mode="exact")) for lag in LAGS]
    for w in trials:
        w.run(6)
    assert len({tuple(call.prompt_indices for call in w.trained) for w in trials}) == 1
    assert len({tuple(chunks_sampled(w)) for w in trials}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("stopped_after", range(7))
def test_resume_at_lag_4_is_exact(stopped_after: int) -> None:
    config = config_of(placement="colocated", rounds=7, lag=4, lag_mode="exact", rollout=RESAMPLE)

    def new_trial(seed: int) -> VirtualTrial:
        return virtual_trial(
            config, seed=seed, equal_rewards=lambda index, round_: (index + round_) % 3 == 0
        )

    uninterrupted, first, second = new_trial(0), new_trial(1), new_trial(2)
    rows = [untimed(report) for report in uninterrupted.run(7)]
    again = [untimed(report) for report in first.run(stopped_after)]
    waiting = {group.oldest_round for group in first.pipeline.buffer.groups()}
    hand_over(first, second)
    again += [untimed(report) for report in second.run(7 - stopped_after)]
    assert again == rows
    assert history(first, second) == history(uninterrupted)
    # The checkpoint contains the groups of the next four rounds. Before round 0, it has none.
    rounds = range(stopped_after, min(7, stopped_after + 4)) if stopped_after else ()
    assert waiting == {max(0, round_ - 4) for round_ in rounds}


@pytest.mark.parametrize("lag", LAGS)
def test_lost_generators_change_no_lag(lag: int) -> None:
    config = config_of(
        rounds=5,
        lag=lag,
        lag_mode="exact",
        rollout={"prompts": 4, "unit_prompts": 1},
        resources={"num_generators": 2},
    )
    w = virtual_trial(config, dies=lambda actor, stage, n: stage == "rollout" and n in (2, 5))
    reports = w.run(5)
    assert reports[-1].metrics["count/redispatched"] > 0
    assert lags_of(w) == [{min(lag, round_)} for round_ in range(5)]
    assert trained_prompts(w) == all_prompts(config)


def test_after_a_change_of_the_lag_groups_become_older_round_by_round() -> None:
    """The waiting groups have the wrong lag, so they are dropped and counted, as with PBT."""
    first = virtual_trial(config_of(rounds=8, lag=1, lag_mode="exact"))
    second = virtual_trial(config_of(rounds=8, lag=3, lag_mode="exact"))
    second.requests.limit = 100
    first.run(3)
    hand_over(first, second)
    reports = second.run(5)
    assert lags_of(first, second) == [{0}, {1}, {1}, {0}, {1}, {2}, {3}, {3}]
    assert reports[-1].metrics["count/dropped_lost"] == schedule.prompts_per_round(second.config)


# ---- A real learner and a real generator, in this process ----------------------------------------


class Timed:
    """A learner and a generator whose methods `VirtualActor` calls with a start and an end time."""

    takes_deposits = False

    def __init__(self, learner: Learner, generator: Generator) -> None:
        self._learner, self._generator = learner, generator

    def generate(self, start: float, end: float, requests: Sequence[Request]) -> Scored:
        """Sample responses, and invent rewards, because a random policy would earn none."""
        scored = self._generator.generate(requests)
        assert isinstance(scored, Scored)
        rewards = torch.linspace(0, 1, requests[0].group_size)
        groups = [replace(g, rewards=rewards.roll(g.prompt_index)) for g in scored.groups]
        return replace(scored, groups=groups)

    def __getattr__(self, name: str) -> Any:
        role = self._learner if hasattr(self._learner, name) else self._generator
        method = getattr(role, name)
        return lambda start, end, *args: method(*args)


class RealTrial:
    """A colocated trial that samples and trains a small model, with invented durations."""

    def __init__(self, policy_path: str, timing: int, **values: Any) -> None:
        config = GRPOConfig.from_dict(
            {
                "rounds": 7,
                "model": {"path": policy_path},
                "rollout": {
                    "prompts": 2,
                    "unit_prompts": 1,
                    "group_size": 4,
                    "min_new_tokens": 2,
                    "max_new_tokens": 6,
                },
                "loss": {"kl_monitor": False},
                "optim": {"lr": 1e-2},
                "eval": {"every": 3, "prompts": 2, "samples": 1},
                "resources": {"deadline_s": 1e6},
                **values,
            }
        )
        transport, runtime = InProcess(), VirtualRuntime(seed=timing)
        role = Timed(Learner(config, transport), Generator(config, transport))
        durations = long_tailed_durations(timing, {"rollout": 10.0})
        worker = VirtualActor(runtime, "worker", role, durations)
        self.learners = LearnerGroup([worker], runtime, 1e6)
        prompts = Prompts(config, build_task(config), policy_tokenizer(config.model))
        self.pipeline = Pipeline(config, prompts, [worker], self.learners, runtime, runtime.now)

    def run(self, rounds: int) -> list[tuple[Any, ...]]:
        """Train to round `rounds`. Return each round's lags and row, and the weights after it."""
        self.pipeline.send_first_weights()
        found = []
        for round_ in range(self.pipeline.gate.learner_round, rounds):
            report = self.pipeline.run_round()
            lags = {round_ - group.oldest_round for group in report.groups}
            weights = checksum(self.learners.state().policy)
            found.append((lags, untimed(report), weights))
        return found


@pytest.fixture(scope="module")
def policy_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_quick_policy(tmp_path_factory.mktemp("policy"))


@pytest.mark.slow
def test_real_runs_at_lag_4_are_identical_and_resume_exactly(policy_path: str) -> None:
    exact = {"lag": 4, "lag_mode": "exact"}
    rounds = RealTrial(policy_path, 0, **exact).run(7)
    assert [lags for lags, _, _ in rounds] == [{0}, {1}, {2}, {3}, {4}, {4}, {4}]
    assert len({weights for _, _, weights in rounds}) == 7, "every round trains"
    assert RealTrial(policy_path, 1, **exact).run(7) == rounds

    first, second = RealTrial(policy_path, 2, **exact), RealTrial(policy_path, 3, **exact)
    again = first.run(5)
    second.learners.load_state(first.learners.state())
    state = json.loads(json.dumps(first.pipeline.state()))
    second.pipeline.load_state(state, first.pipeline.buffer.groups())
    assert again + second.run(7) == rounds


@pytest.mark.slow
def test_a_real_run_at_exact_lag_0_is_the_synchronous_run(policy_path: str) -> None:
    synchronous = RealTrial(policy_path, 0).run(7)
    assert RealTrial(policy_path, 0, lag_mode="exact").run(7) == synchronous
    assert {0} == set.union(*(lags for lags, _, _ in synchronous))
