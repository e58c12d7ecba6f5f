"""Real generators and a real learner in virtual time, with any settings and speeds, without Ray."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from policies import write_quick_policy
from virtual_time import long_tailed_durations

from grpo_trainable.config import ConfigError, GRPOConfig, schedule
from grpo_trainable.generator.generator import Generator
from grpo_trainable.learner.learner import Learner
from grpo_trainable.models.directory import policy_tokenizer
from grpo_trainable.models.parameters import copy_parameters
from grpo_trainable.models.scoring import response_log_probs
from grpo_trainable.models.store import build_policy
from grpo_trainable.pipeline import Pipeline
from grpo_trainable.pipeline.learner_group import LearnerGroup
from grpo_trainable.protocol.messages import Deposited, Scored
from grpo_trainable.protocol.rollout import LiveWeights, Request, RolloutGroup, collate
from grpo_trainable.simulation.runtime import VirtualActor, VirtualRuntime
from grpo_trainable.tasks.prompts import Prompts, build_task
from grpo_trainable.transports.shm import SharedWeights, ShmReceiver, ShmSender

MAX_NEW_TOKENS = 6
LAW = {"temperature": 0.8, "min_new_tokens": 2}


@pytest.fixture(scope="module")
def policy_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_quick_policy(tmp_path_factory.mktemp("policy"))


class Kept(ShmSender):
    """A sender of the transport `shm` that also keeps a copy of every snapshot."""

    def __init__(self) -> None:
        super().__init__()
        self.snapshots: dict[int, dict[str, torch.Tensor]] = {}

    def publish(self, weights: LiveWeights, frozen: Collection[str] = ()) -> SharedWeights:
        self.snapshots[weights.version] = {n: t.clone() for n, t in weights.tensors.items()}
        return super().publish(weights)


class Timed:
    """Lets `VirtualActor` call a real role. The start and the end time of a call are ignored."""

    takes_deposits = False

    def __init__(self, role: Any) -> None:
        self._role = role

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._role, name)
        return lambda start, end, *args: method(*args)


class InMidBatch(Timed):
    """A generator whose tokens are spread evenly over the virtual time of its call.

    Weights that are deposited while it samples take effect at the next token.
    """

    takes_deposits = True

    def __init__(self, role: Generator) -> None:
        super().__init__(role)
        self._under_way: list[tuple[float, SharedWeights]] = []  # (time of arrival, handle)

    def deposit(self, start: float, end: float, handle: SharedWeights) -> Deposited:
        self._under_way.append((end, handle))
        return Deposited(
            version=handle.packed.version, round=handle.packed.round, bytes=0, spans=[]
        )

    def generate(self, start: float, end: float, requests: Sequence[Request]) -> Scored:
        tokens = requests[0].limits.max_new_tokens
        times = iter(start + t / tokens * (end - start) for t in range(tokens))

        def between_tokens() -> None:
            moment = next(times)
            due = [item for item in self._under_way if item[0] <= moment]
            self._under_way = [item for item in self._under_way if item not in due]
            if due:
                self._role.deposit(due[-1][1])
            Generator.between_tokens(self._role)

        self._role.between_tokens = between_tokens
        return self._role.generate(requests)


class Recorded:
    """A learner that keeps a copy of the groups that each round trained on."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self.rounds: list[list[list[RolloutGroup]]] = []
        self.first_steps: list[float] = []  # largest ratio in each round's first gradient step

    def update(self, batches: list[list[RolloutGroup]]) -> Any:
        self.rounds.append(copy.deepcopy(batches))
        updated = self._learner.update(batches)
        self.first_steps.append(updated.steps[0].ratio_max)
        return updated

    def __getattr__(self, name: str) -> Any:
        return getattr(self._learner, name)


UPDATES = ("between_batches", "interrupt_recompute", "in_flight")


@st.composite
def any_settings(draw: st.DrawFn) -> dict[str, Any]:
    lag = draw(st.integers(0, 3))
    capacity = draw(st.integers(1, 3))
    prompts = draw(st.integers(2, 4))
    replay = (
        {}
        if capacity == 1
        else {
            "buffer_capacity": capacity,
            "buffer_sampling": draw(st.sampled_from(["recency", "fifo", "uniform", "mixed"])),
            "buffer": {
                "sample_batches": draw(st.integers(1, capacity)),
                "max_age": draw(st.none() | st.integers(lag, lag + capacity)),
            },
        }
    )
    return {
        "placement": "disaggregated",
        "rounds": draw(st.integers(2, 5)),
        "lag": lag,
        "k": draw(st.integers(1, 2)),
        "k_mode": draw(st.sampled_from(["same_batch", "minibatches", "fresh_batches"])),
        "weight_update": draw(st.sampled_from(UPDATES)) if lag > 0 else UPDATES[0],
        **replay,
        "rollout": {
            "prompts": prompts,
            "unit_prompts": draw(st.integers(1, prompts)),
            "group_size": 2,
            "max_new_tokens": MAX_NEW_TOKENS,
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


def run(config: GRPOConfig, scale: dict[str, float], timing: int) -> tuple[Recorded, Kept]:
    """Run a whole trial, check it round by round, and return its learner and its sender."""
    kept = Kept()
    runtime = VirtualRuntime(seed=timing)
    durations = long_tailed_durations(timing, scale)
    generators: list[Generator] = []

    def generator(name: str) -> VirtualActor:
        real = Generator(config, ShmReceiver())
        generators.append(real)
        role = InMidBatch(real) if config.in_mid_batch else Timed(real)
        return VirtualActor(runtime, name, role, durations)

    learner = Recorded(Learner(config, kept))
    pipeline = Pipeline(
        config,
        Prompts(config, build_task(config), policy_tokenizer(config.model)),
        [generator(f"generator-{i}") for i in range(config.resources.num_generators)],
        LearnerGroup([VirtualActor(runtime, "learner", Timed(learner), durations)], runtime, 1e6),
        runtime,
        runtime.now,
    )
    pipeline.send_first_weights()
    uses: Counter[int] = Counter()
    row: dict[str, float] = {}
    for round_ in range(config.rounds):
        row = pipeline.run_round().metrics
        accounts = [row[f"count/{n}"] for n in ("trained", "dropped", "waiting", "in_flight")]
        assert row["count/requested"] == sum(accounts)
        for group in (group for batch in learner.rounds[round_] for group in batch):
            uses[group.prompt_index] += 1
            assert group.uses == uses[group.prompt_index]
            bound = config.lag if group.uses == 1 else schedule.max_age(config)
            assert round_ - int(group.token_rounds[group.response_mask].min()) <= bound
    assert len(learner.rounds) == config.rounds
    assert row["count/in_flight"] == 0
    assert row["count/trained"] == len(uses)
    assert not runtime.uncollected
    # A generator may use weights that are `lag` rounds old, and its last report of which weights it
    # uses may be `lag` rounds old, too.
    assert len(kept.slots) <= 2 + 2 * config.lag
    for real in generators:
        real.close()
    kept.close()
    return learner, kept


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
        assume(False)  # invalid, such as a buffer that would never use a group again
        raise
    learner, kept = run(config, scale, timing)
    if config.lag == 0 and config.buffer_capacity == 1:
        # Each round begins with the weights that sampled it, so its first ratios are 1 up to
        # rounding.
        assert learner.first_steps == pytest.approx([1.0] * config.rounds, abs=1e-5)
    check_log_probs(config, kept, learner.rounds)


@pytest.mark.parametrize("weight_update", ["interrupt_recompute", "in_flight"])
def test_tokens_of_several_versions_are_each_of_their_own(
    policy_path: str, weight_update: str
) -> None:
    config = GRPOConfig.from_dict(
        {
            "placement": "disaggregated",
            "rounds": 6,
            "lag": 3,
            "weight_update": weight_update,
            "model": {"path": policy_path},
            "rollout": {
                "prompts": 3,
                "unit_prompts": 1,
                "group_size": 2,
                "max_new_tokens": MAX_NEW_TOKENS,
                **LAW,
            },
            "loss": {"kl_monitor": False},
            "optim": {"lr": 1e-2},
            "eval": {"every": 6, "prompts": 1, "samples": 1},
            "resources": {"num_generators": 2, "deadline_s": 1e6},
        }
    )
    # Chunks are long and rounds are short, so weights arrive in the middle of most chunks.
    learner, kept = run(config, {"rollout": 60.0, "optimize": 20.0, "sync": 1.0}, timing=1)
    assert check_log_probs(config, kept, learner.rounds) > 2


def check_log_probs(config: GRPOConfig, kept: Kept, rounds: list[list[list[RolloutGroup]]]) -> int:
    """Check the recorded log-probs against the weights whose version each token names.

    With `in_flight`, the cache is kept after the weights that filled it are replaced. So only the
    tokens of a group's first version can be checked. Return the number of groups with tokens of
    several versions.
    """
    model, tokenizer = build_policy(config.model, 0)
    mixed = 0
    for group in (group for batches in rounds for batch in batches for group in batch):
        batch = collate([group], [torch.zeros(len(group.rewards))], tokenizer.pad_id)
        first = len(group.prompt_ids) - 1
        width = group.response_ids.shape[1]
        versions = sorted(group.token_versions[group.response_mask].unique().tolist())
        mixed += len(versions) > 1
        if config.weight_update == "in_flight":
            versions = versions[:1]
        for version in versions:
            copy_parameters(model.weights(), kept.snapshots[version], source="snapshot")
            with torch.no_grad():
                log_probs, _ = response_log_probs(
                    model,
                    batch.input_ids,
                    batch.target_ids,
                    batch.response_mask,
                    end_ids=tokenizer.end_ids,
                    temperature=config.rollout.temperature,
                    min_new_tokens=config.rollout.min_new_tokens,
                )
            own = group.response_mask & (group.token_versions == version)
            torch.testing.assert_close(
                log_probs[:, first : first + width][own],
                group.behaviour_log_probs[own],
                rtol=0,
                atol=1e-4,
            )
    return mixed
