"""Real generators and a real learner in virtual time: any settings, any speeds, no Ray.

Actors do their work where the schedule says that they have it done, so a unit can start with newer
weights than it was admitted with, never with older ones.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from benchmarks.virtual_time import VirtualActor, VirtualRuntime, long_tailed_durations
from grpo_trainable.actors.generator import Generator
from grpo_trainable.actors.learner import Learner
from grpo_trainable.config import ConfigError, GRPOConfig
from grpo_trainable.learner_group import LearnerGroup
from grpo_trainable.models.scoring import response_log_probs
from grpo_trainable.models.store import read_tokenizer, save_policy
from grpo_trainable.models.transformer import ModelConfig, TransformerLM
from grpo_trainable.pipeline import Pipeline
from grpo_trainable.prompts import Prompts, build_task
from grpo_trainable.rollout import PolicyWeights, RolloutGroup, collate

LAW = {"temperature": 0.8, "min_new_tokens": 2}
TOKENIZER = read_tokenizer(None)


@pytest.fixture(scope="module")
def policy_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    shape = ModelConfig(
        vocab_size=TOKENIZER.vocab_size,
        context_length=48,
        d_model=32,
        num_layers=1,
        num_heads=2,
        d_ff=64,
    )
    directory = tmp_path_factory.mktemp("policy")
    save_policy(directory, TransformerLM(shape, seed=3), TOKENIZER, torch.float32)
    return str(directory)


class Snapshots:
    """A transport that keeps everything that was ever published."""

    def __init__(self) -> None:
        self.by_version: dict[int, PolicyWeights] = {}

    def publish(self, weights: PolicyWeights) -> int:
        self.by_version[weights.version] = weights
        return weights.version

    def fetch(self, handle: int) -> PolicyWeights:
        return self.by_version[handle]


class Timed:
    """A real role, whose methods `VirtualActor` calls with a start and an end."""

    def __init__(self, role: Any, *, takes_deposits: bool = False) -> None:
        self.takes_deposits = takes_deposits
        self._role = role

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._role, name)
        return lambda start, end, *args: method(*args)


class Recorded:
    """A learner, and what each of its rounds trained on, as it was then."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self.rounds: list[list[list[RolloutGroup]]] = []
        self.first_steps: list[float] = []  # largest ratio of each round's first gradient step

    def update(self, batches: list[list[RolloutGroup]]) -> Any:
        self.rounds.append(copy.deepcopy(batches))
        updated = self._learner.update(batches)
        self.first_steps.append(updated.steps[0].ratio_max)
        return updated

    def __getattr__(self, name: str) -> Any:
        return getattr(self._learner, name)


@st.composite
def any_settings(draw: st.DrawFn) -> dict[str, Any]:
    lag = draw(st.integers(0, 3))
    capacity = draw(st.integers(1, 3))
    prompts = draw(st.integers(2, 4))
    return {
        "placement": "disaggregated",
        "rounds": draw(st.integers(2, 5)),
        "lag": lag,
        "k": draw(st.integers(1, 2)),
        "k_mode": draw(st.sampled_from(["same_batch", "minibatches", "fresh_batches"])),
        "weight_update": draw(
            st.sampled_from(["between_batches", "interrupt_recompute", "in_flight"])
        ),
        "buffer_capacity": capacity,
        "buffer_sampling": draw(st.sampled_from(["recency", "fifo", "uniform", "mixed"])),
        "buffer": {
            "sample_batches": draw(st.integers(1, capacity)),
            "max_age": draw(st.none() | st.integers(lag, lag + capacity)),
        },
        "rollout": {
            "prompts": prompts,
            "unit_prompts": draw(st.integers(1, prompts)),
            "group_size": 2,
            "max_new_tokens": 4,
            **LAW,
        },
        "loss": {"importance_cap": draw(st.none() | st.just(2.0)), "kl_monitor": False},
        "optim": {"lr": 1e-2},
        "eval": {"every": 3, "prompts": 2, "samples": 1, "temperature": 0.8},
        "resources": {"num_generators": draw(st.integers(1, 3)), "deadline_s": 1e6},
        "seed": draw(st.integers(0, 99)),
    }


speeds = st.fixed_dictionaries(
    {stage: st.sampled_from([1.0, 10.0, 100.0]) for stage in ("rollout", "optimize", "sync")}
)


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(any_settings(), speeds, st.integers(0, 99))
def test_any_settings_keep_both_bounds_and_their_accounts(
    policy_path: str, data: dict[str, Any], scale: dict[str, float], timing: int
) -> None:
    try:
        config = GRPOConfig.from_dict({**data, "model": {"path": policy_path}})
    except ConfigError:
        assume(False)  # a buffer that would never use a group again, for one
        raise
    snapshots = Snapshots()
    runtime = VirtualRuntime(seed=timing)
    durations = long_tailed_durations(timing, scale)

    def generator(name: str) -> VirtualActor:
        role = Timed(Generator(config, snapshots), takes_deposits=config.in_mid_batch)
        return VirtualActor(runtime, name, role, durations)

    learner = Recorded(Learner(config, snapshots))
    pipeline = Pipeline(
        config,
        Prompts(config, build_task(config), TOKENIZER),
        [generator(f"generator-{i}") for i in range(config.resources.num_generators)],
        LearnerGroup([VirtualActor(runtime, "learner", Timed(learner), durations)], runtime, 1e6),
        runtime,
        runtime.now,
    )
    pipeline.start()
    uses: Counter[int] = Counter()
    for round_ in range(config.rounds):
        row = pipeline.run_round().metrics
        accounts = [row[f"count/{n}"] for n in ("trained", "dropped", "waiting", "in_flight")]
        assert row["count/requested"] == sum(accounts)
        for group in (group for batch in learner.rounds[round_] for group in batch):
            uses[group.cursor] += 1
            assert group.uses == uses[group.cursor]
            bound = config.lag if group.uses == 1 else config.max_age
            assert round_ - int(group.token_rounds[group.response_mask].min()) <= bound
    assert len(learner.rounds) == config.rounds
    assert row["count/in_flight"] == 0
    assert row["count/trained"] == len(uses)
    assert not runtime.uncollected
    if config.lag == 0 and config.buffer_capacity == 1:
        # Sampled by the very weights that are trained: to rounding the ratio is 1.
        assert learner.first_steps == pytest.approx([1.0] * config.rounds, abs=1e-5)
    assert_versions_are_true(policy_path, snapshots, learner.rounds)


def assert_versions_are_true(
    policy_path: str, snapshots: Snapshots, rounds: list[list[list[RolloutGroup]]]
) -> None:
    """Recorded log-probs are those of the weights that each group names."""
    from grpo_trainable.models.store import build_policy

    model, _ = build_policy("tiny", policy_path, 0)
    for group in (group for batches in rounds for batch in batches for group in batch):
        versions = group.token_versions[group.response_mask].unique().tolist()
        assert len(versions) == 1  # in virtual time weights arrive before a unit's first token
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in snapshots.by_version[versions[0]].tensors:
                    parameter.copy_(snapshots.by_version[versions[0]].tensors[name])
            batch = collate([group], [torch.zeros(len(group.rewards))], TOKENIZER.pad_id)
            log_probs, _ = response_log_probs(
                model,
                batch.input_ids,
                batch.target_ids,
                batch.response_mask,
                eos_id=TOKENIZER.eos_id,
                **LAW,
            )
        torch.testing.assert_close(log_probs, batch.behaviour_log_probs, rtol=0, atol=1e-4)
