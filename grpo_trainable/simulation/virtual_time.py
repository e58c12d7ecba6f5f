"""Our pipeline in virtual time: actors whose work takes a given while and costs nothing.

Pipeline, gate, buffer and learner group are the product's own; actors, calls and the clock are not.
The unit tests drive the pipeline with it through timings that no machine would show twice, and
`benchmarks/schedule_sim.py` past the machines that we have.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from grpo_trainable.calls import ActorFailed, ActorLost
from grpo_trainable.config import GRPOConfig
from grpo_trainable.learner_group import LearnerGroup
from grpo_trainable.messages import (
    Deposited,
    Drift,
    GradientStep,
    LearnerState,
    Loaded,
    Published,
    ResponseFigures,
    Sampled,
    Scored,
    Updated,
)
from grpo_trainable.metrics import stage_seconds
from grpo_trainable.pipeline import Pipeline, RoundReport
from grpo_trainable.rollout import Request, RolloutGroup, SamplingLimits
from grpo_trainable.stages import IDLE
from grpo_trainable.timers import Span

MAX_WAITS = 20_000  # after which a pipeline is taken to wait for ever
# A `task.reward` that is scored by calls of its own, as a user's is; any other within `generate`.
SCORED_BESIDE = "virtual:scored_beside"
TICK = 1 / 64  # of durations in tests: sums of them are exact in floating point

Durations = Callable[[str, str], float]  # (actor, stage) -> seconds


def constant_durations(**ticks: int) -> Durations:
    """The ticks given for a stage, one for any other."""
    return lambda actor, stage: ticks.get(stage, 1) * TICK


def long_tailed_durations(seed: int, scale: dict[str, float]) -> Durations:
    """Log-normal around the stage's scale in ticks: now and then ten times as long."""
    rng = random.Random(seed)
    return lambda actor, stage: (
        (1 + int(scale.get(stage, 1.0) * rng.lognormvariate(0.0, 1.2))) * TICK
    )


_END = operator.attrgetter("end")


@dataclass(eq=False)
class VirtualCall:
    actor: VirtualActor
    stage: str
    start: float
    end: float
    value: Any = None
    error: str | None = None
    lost: bool = False  # its actor is dead
    later: Callable[[], Any] | None = None  # its value, once it is over


class VirtualRuntime:
    """Waiting moves the clock to the next answer. What is ready then comes in any order, and now
    and then only in part."""

    def __init__(self, *, seed: int = 0, latency: float = 0.0, max_waits: int = MAX_WAITS) -> None:
        self.time = 0.0
        self.latency = latency  # from a call's submission to its earliest start
        self.uncollected: set[VirtualCall] = set()
        self.kills: list[tuple[str, float]] = []  # (actor, when)
        self.hangs: list[tuple[str, float]] = []  # (actor, when it came to a standstill)
        self._ends: list[tuple[float, int, VirtualCall]] = []
        self._numbers = itertools.count()
        self._rng = random.Random(seed)
        self._waits_left = max_waits

    def now(self) -> float:
        return self.time

    def wait(self, calls: Sequence[VirtualCall], timeout_s: float) -> list[VirtualCall]:
        self._waits_left -= 1
        assert self._waits_left > 0, "waits for ever"
        assert calls, "waits for nothing"
        everything = len(calls) == len(self.uncollected)
        first = self._next_end() if everything else min(map(_END, calls))
        if first > self.time + timeout_s:
            self.time += timeout_s
            return []
        self.time = max(self.time, first)
        ready = [call for call in calls if call.end <= self.time]
        return self._rng.sample(ready, self._rng.randint(1, len(ready)))

    def submitted(self, call: VirtualCall) -> None:
        self.uncollected.add(call)
        heapq.heappush(self._ends, (call.end, next(self._numbers), call))

    def _next_end(self) -> float:
        """The earliest of all: a thousand generators have two thousand calls under way."""
        while self._ends[0][2] not in self.uncollected:
            heapq.heappop(self._ends)
        return self._ends[0][0]

    def result(self, call: VirtualCall) -> Any:
        assert call.end <= self.time, "collected before it was done"
        self.uncollected.remove(call)
        if call.lost:
            raise ActorLost(f"{call.stage}: {call.actor.name} died (killed)")
        if call.error is not None:
            raise ActorFailed(f"{call.stage}: {call.actor.name} failed with {call.error}")
        return call.value if call.later is None else call.later()


class VirtualActor:
    """Works through its calls in the order they were submitted, one at a time.

    `role` has a method for each of ours, with start and end before the arguments. `hangs(stage,
    n)` says whether the n-th call of a stage is never answered: it goes on until its end, and there
    it hangs. `dies(stage, n)` says whether the actor dies in it, once it has started. `submitted`
    counts calls by stage, replaced actors included.

    Every `step_s` of a call is a step of progress. An actor that hangs tells it all the same,
    unless it is `mute`.
    """

    def __init__(
        self,
        runtime: VirtualRuntime,
        name: str,
        role: Any,
        durations: Durations,
        hangs: Callable[[str, int], bool] = lambda stage, n: False,
        dies: Callable[[str, int], bool] = lambda stage, n: False,
        submitted: dict[str, int] | None = None,
        step_s: float = TICK,
        mute: bool = False,
    ) -> None:
        self.name = name
        self.killed = False
        self._runtime = runtime
        self._role = role
        self._durations = durations
        self._hangs, self._dies = hangs, dies
        self._submitted = {} if submitted is None else submitted
        self._dead = False
        self._free_at = 0.0
        self._beside_free_at = {"deposit": 0.0, "score": 0.0}  # of their threads
        self._step_s, self._mute = step_s, mute
        self._worked: list[tuple[float, float]] = []  # in each call, from when until when
        self._hangs_from = math.inf

    def submit(self, stage: str, method: str, *args: Any) -> VirtualCall:
        if method == "progress":
            return self._ask_progress()
        n = self._submitted[stage] = self._submitted.get(stage, 0) + 1
        beside = method in self._beside_free_at
        free_at = self._beside_free_at[method] if beside else self._free_at
        start = max(self._runtime.time + self._runtime.latency, free_at)
        end = start + self._durations(self.name, stage)
        self._worked.append((start, end))
        if self._hangs(stage, n):
            self._hangs_from = min(end, self._hangs_from)
            self._runtime.hangs.append((self.name, end))
            end = math.inf
        if beside:
            self._beside_free_at[method] = end
        else:
            self._free_at = end
        call = VirtualCall(self, stage, start, end)
        if self._dead or self._dies(stage, n):
            self._dead = call.lost = True
        elif method == "generate" and getattr(self._role, "takes_deposits", False):
            # What is deposited before it ends counts.
            call.later = functools.partial(getattr(self._role, method), start, end, *args)
        elif end < math.inf:
            # An answer depends on the actor's own calls alone, so it may be known already.
            try:
                call.value = getattr(self._role, method)(start, end, *args)
            except RuntimeError as error:
                call.error = f"{type(error).__name__}: {error}"
        self._runtime.submitted(call)
        return call

    def _ask_progress(self) -> VirtualCall:
        start = self._runtime.time
        end = start + self._runtime.latency
        if self._mute and end >= self._hangs_from:
            end = math.inf
        call = VirtualCall(self, "progress", start, end, lost=self._dead)
        call.value = sum(
            int((min(until, end) - since) / self._step_s)
            for since, until in self._worked
            if since < end < math.inf
        )
        self._runtime.submitted(call)
        return call

    def kill(self) -> None:
        self.killed = True
        self._runtime.kills.append((self.name, self._runtime.time))
        # Nobody collects what a killed actor had to do.
        gone = {call for call in self._runtime.uncollected if call.actor is self}
        self._runtime.uncollected -= gone


class VirtualRequests:
    """Requests of one-token prompts. Keeps what was asked for."""

    def __init__(self, config: GRPOConfig) -> None:
        self.config = config
        self.limit = config.rounds * config.prompts_per_round  # every prompt index is below it
        self.asked: list[tuple[str, int]] = []

    def request(self, stream: str, prompt_index: int) -> Request:
        config = self.config
        limit = self.limit if stream == "train" else config.eval.prompts
        assert 0 <= prompt_index < limit, (stream, prompt_index)
        self.asked.append((stream, prompt_index))
        size = config.rollout.group_size if stream == "train" else config.eval.samples
        limits = SamplingLimits(min_new_tokens=1, max_new_tokens=1, temperature=1.0)
        return Request(
            stream=stream,
            prompt_index=prompt_index,
            prompt_ids=(1,),
            group_size=size,
            limits=limits,
        )


def one_token_group(
    prompt_index: int,
    *,
    rewards: Sequence[float] = (0.0, 1.0),
    version: int = 0,
    round_: int = 0,
    uses: int = 0,
) -> RolloutGroup:
    """A group of one-token responses."""
    return group_of(prompt_index, rewards=rewards, weights=[(version, round_)], uses=uses)


def group_of(
    prompt_index: int,
    *,
    rewards: Sequence[float],
    weights: Sequence[tuple[int, int]],
    uses: int = 0,
) -> RolloutGroup:
    """A group whose responses have a token by each of `weights`: (version, round)."""
    shape = (len(rewards), len(weights))
    versions, rounds = torch.tensor(weights, dtype=torch.int32).T
    return RolloutGroup(
        prompt_index=prompt_index,
        prompt_ids=torch.tensor([1]),
        response_ids=torch.zeros(shape, dtype=torch.int64),
        response_mask=torch.ones(shape, dtype=torch.bool),
        behaviour_log_probs=torch.zeros(shape),
        rewards=torch.tensor(rewards, dtype=torch.float32),
        finished=torch.ones(len(rewards), dtype=torch.bool),
        token_versions=versions.expand(shape).clone(),
        token_rounds=rounds.expand(shape).clone(),
        uses=uses,
    )


@dataclass(frozen=True)
class GeneratorCall:
    actor: str
    stream: str  # train, eval; load: it fetched weights
    prompt_indices: tuple[int, ...]
    weights_round: int
    start: float
    end: float


class VirtualGenerator:
    """Rewards are a function of (prompt_index, weights): what the real one promises."""

    def __init__(
        self,
        name: str,
        record: list[GeneratorCall],
        reward_fails: Callable[[str, int], bool] = lambda stream, prompt_index: False,
        *,
        takes_deposits: bool = False,
        scores_beside: bool = False,
    ) -> None:
        """With deposits, a response has three tokens, each by the weights that are there then.
        `scores_beside`: by a user's reward, in calls of their own."""
        self.takes_deposits = takes_deposits
        self._scores_beside = scores_beside
        self._scored: dict[int, Scored] = {}  # not yet asked for, by the id of what was sampled
        self._name = name
        self._record = record
        self._reward_fails = reward_fails
        self._weights: list[tuple[float, int, int]] = []  # (since when, version, round)
        self._reported = -1  # the version
        self._idle_since: float | None = None

    def load(self, start: float, end: float, handle: tuple[int, int]) -> Loaded:
        self._record.append(GeneratorCall(self._name, "load", (), handle[1], start, end))
        self._weights.append((end, *handle))
        self._reported = handle[0]
        return Loaded(
            version=handle[0],
            round=handle[1],
            transport="virtual",
            bytes=1000,
            transfer_s=end - start,
            load_s=0.0,
            at=end,
            spans=[*self._idle(start, end), Span("sync", start, end)],
        )

    def deposit(self, start: float, end: float, handle: tuple[int, int]) -> Deposited:
        assert self.takes_deposits
        self._record.append(GeneratorCall(self._name, "load", (), handle[1], start, end))
        self._weights.append((end, *handle))
        return Deposited(version=handle[0], round=handle[1], bytes=1000, spans=[])

    def _at(self, moment: float) -> tuple[int, int]:
        """(version, round)"""
        there = [weights for since, *weights in self._weights if since <= moment]
        assert there, "samples before it has weights"
        version, round_ = max(there)
        return version, round_

    def generate(self, start: float, end: float, requests: Sequence[Request]) -> Scored | Sampled:
        scored = self._generate(start, end, requests)
        if not self._scores_beside:
            return scored
        stream = requests[0].stream
        spans = [Span("eval" if stream == "eval" else "rollout", start, end)]
        sampled = Sampled(stream=stream, groups=[], loaded=scored.loaded, spans=spans)
        self._scored[id(sampled)] = scored
        return sampled

    def score(self, start: float, end: float, sampled: Sampled) -> Scored:
        spans = [Span("eval" if sampled.stream == "eval" else "reward", start, end, beside=True)]
        return replace(self._scored.pop(id(sampled)), loaded=[], spans=spans)

    def _generate(self, start: float, end: float, requests: Sequence[Request]) -> Scored:
        moments = (start, (start + end) / 2, end) if self.takes_deposits else (start,)
        weights = [self._at(moment) for moment in moments]
        round_ = weights[0][1]
        stream = requests[0].stream
        assert stream == "train" or len(set(weights)) == 1, "an evaluation of several versions"
        prompt_indices = tuple(request.prompt_index for request in requests)
        self._record.append(GeneratorCall(self._name, stream, prompt_indices, round_, start, end))
        loaded = []
        for version, taken in dict.fromkeys(weights):
            if version > self._reported:
                self._reported = version
                loaded.append(
                    Loaded(
                        version=version,
                        round=taken,
                        transport="virtual",
                        bytes=1000,
                        transfer_s=0.0,
                        load_s=0.0,
                        at=end,
                        spans=[],
                    )
                )
        groups, format_rewards, answer_rewards, unscored = [], [], [], []
        for request in requests:
            if self._reward_fails(stream, request.prompt_index):
                unscored.append((request.prompt_index, "KeyError: 'apple'"))
                continue
            rng = random.Random(f"{stream}/{request.prompt_index}/{round_}")
            # Held-out rewards of many magnitudes: their float sum depends on its order.
            scale = 1.0 if stream == "train" else 10.0 ** rng.randint(-9, 9)
            rewards = [scale * rng.random() for _ in range(request.group_size)]
            groups.append(group_of(request.prompt_index, rewards=rewards, weights=weights))
            format_rewards.append(rng.random())
            answer_rewards.append(sum(rewards) / len(rewards))
        rollout, reward = ("eval", "eval") if stream == "eval" else ("rollout", "reward")
        middle = start + (end - start) / 2
        return Scored(
            groups=groups,
            format_rewards=format_rewards,
            answer_rewards=answer_rewards,
            unscored=unscored,
            reward_errors=len(unscored) * requests[0].group_size,
            loaded=loaded,
            spans=[
                *self._idle(start, end),
                Span(rollout, start, middle),
                Span(reward, middle, end),
            ],
        )

    def _idle(self, start: float, end: float) -> list[Span]:
        since, self._idle_since = self._idle_since, end
        return [] if since is None else [Span(IDLE, since, start)]

    def close(self, start: float, end: float) -> None:
        pass


@dataclass(frozen=True)
class TrainingCall:
    """One `update`, by the learner's own record."""

    round: int  # rounds trained before it
    start: float
    end: float
    prompt_indices: tuple[tuple[int, ...], ...]  # of each rollout batch
    group_rounds: tuple[tuple[int, ...], ...]
    group_uses: tuple[tuple[int, ...], ...]
    rewards: tuple[float, ...]

    @property
    def all_prompt_indices(self) -> list[int]:
        return [index for batch in self.prompt_indices for index in batch]


class VirtualLearner:
    def __init__(
        self, config: GRPOConfig, record: list[TrainingCall], releases: list[tuple[float, int]]
    ) -> None:
        self._config = config
        self._record = record
        self._releases = releases
        self._version = 0
        self._round = 0

    def update(
        self, start: float, end: float, rollout_batches: Sequence[Sequence[RolloutGroup]]
    ) -> Updated:
        groups = [group for batch in rollout_batches for group in batch]
        self._record.append(
            TrainingCall(
                round=self._round,
                start=start,
                end=end,
                prompt_indices=tuple(
                    tuple(g.prompt_index for g in batch) for batch in rollout_batches
                ),
                group_rounds=tuple(tuple(g.oldest_round for g in b) for b in rollout_batches),
                group_uses=tuple(tuple(g.uses for g in b) for b in rollout_batches),
                rewards=tuple(float(g.rewards.sum()) for g in groups),
            )
        )
        self._round += 1
        fresh = self._config.k_mode == "fresh_batches"
        k = len(rollout_batches) if fresh or not rollout_batches else self._config.k
        self._version += k
        step = GradientStep(
            loss=0.5,
            grad_norm=1.0,
            entropy_nats=2.0,
            clip_fraction=0.0,
            ratio_max=1.0,
            bounded_tokens=0,
            ratio_counts=(0, len(groups), 0),
            lr=1e-4,
            skipped=False,
            kl={},
        )
        middle = start + (end - start) / 2
        rows = sum(len(group.rewards) for group in groups)
        return Updated(
            round=self._round,
            version=self._version,
            steps=[step] * k,
            skipped_steps=0,
            reference_nll_nats=1.2,
            # A nat a round.
            kl={"reference": Drift(k1=float(self._round), k3=float(self._round))} if k else {},
            responses=ResponseFigures(
                advantages=np.zeros(rows, dtype=np.float32),
                policy_log_probs=None,
                reference_log_probs=None,
            ),
            at=end,
            spans=[Span("reference", start, middle), Span("optimize", middle, end)],
        )

    def publish(self, start: float, end: float, needed_from: int) -> Published:
        self._releases.append((start, needed_from))
        return Published(
            handle=(self._version, self._round),
            version=self._version,
            round=self._round,
            spans=[Span("sync", start, end)],
        )

    def state(self, start: float, end: float) -> LearnerState:
        counters = {"version": self._version, "round": self._round}
        return LearnerState(policy={}, optimizer={}, counters=counters)

    def load_state(self, start: float, end: float, state: LearnerState) -> None:
        self._version, self._round = state.counters["version"], state.counters["round"]

    def close(self, start: float, end: float) -> None:
        pass


class VirtualColocated:
    """Both roles in one actor."""

    def __init__(self, generator: VirtualGenerator, learner: VirtualLearner) -> None:
        self.generate, self.load = generator.generate, generator.load
        self.score = generator.score
        self.update, self.publish = learner.update, learner.publish
        self.state, self.load_state = learner.state, learner.load_state


@dataclass
class World:
    """A pipeline over fake actors, and what these have seen."""

    config: GRPOConfig
    runtime: VirtualRuntime
    pipeline: Pipeline
    learners: LearnerGroup
    requests: VirtualRequests
    trained: list[TrainingCall] = field(default_factory=list)
    generated: list[GeneratorCall] = field(default_factory=list)
    # (when, round): from then on weights of an earlier round may be gone.
    releases: list[tuple[float, int]] = field(default_factory=list)

    def run(self, rounds: int) -> list[RoundReport]:
        """Starts and runs so many rounds."""
        self.pipeline.start()
        return [self.pipeline.run_round() for _ in range(rounds)]

    def used_after_release(self) -> list[GeneratorCall]:
        """Calls that still needed weights that the learner had been told nobody needs."""
        return [
            call
            for call in self.generated
            if any(call.weights_round < before and at < call.end for at, before in self.releases)
            and not any(
                name == call.actor and call.start < at < call.end for name, at in self.runtime.kills
            )
        ]

    def of_stream(self, stream: str) -> list[GeneratorCall]:
        return [call for call in self.generated if call.stream == stream]


def world(
    config: GRPOConfig,
    *,
    durations: Durations | None = None,
    seed: int = 0,
    latency: float = 0.0,
    max_waits: int = MAX_WAITS,
    reward_fails: Callable[[str, int], bool] = lambda stream, prompt_index: False,
    hangs: Callable[[str, str, int], bool] = lambda actor, stage, n: False,
    dies: Callable[[str, str, int], bool] = lambda actor, stage, n: False,
    step_s: float = TICK,
    mute: bool = False,
) -> World:
    """`hangs(actor, stage, n)`: whether the n-th call of a stage to the actors of a name is never
    answered; `dies(actor, stage, n)`: whether the actor dies in it."""
    durations = durations or constant_durations()
    runtime = VirtualRuntime(seed=seed, latency=latency, max_waits=max_waits)
    trained: list[TrainingCall] = []
    generated: list[GeneratorCall] = []
    releases: list[tuple[float, int]] = []

    submitted: dict[str, dict[str, int]] = {}

    def actor(name: str, role: Any) -> VirtualActor:
        return VirtualActor(
            runtime,
            name,
            role,
            durations,
            lambda stage, n: hangs(name, stage, n),
            lambda stage, n: dies(name, stage, n),
            submitted.setdefault(name, {}),
            step_s=step_s,
            mute=mute,
        )

    def generator_role(name: str) -> VirtualGenerator:
        return VirtualGenerator(
            name,
            generated,
            reward_fails,
            takes_deposits=config.in_mid_batch,
            scores_beside=config.task.reward == SCORED_BESIDE,
        )

    def spawn(name: str) -> VirtualActor:
        return actor(name, generator_role(name))

    learner_role = VirtualLearner(config, trained, releases)
    if config.placement == "colocated":
        role = VirtualColocated(generator_role("worker"), learner_role)
        learner = actor("worker", role)
        generators = [learner]
    else:
        learner = actor("learner", learner_role)
        generators = [spawn(f"generator-{i}") for i in range(config.resources.num_generators)]
    learners = LearnerGroup([learner], runtime, config.resources.deadline_s)
    requests = VirtualRequests(config)
    pipeline = Pipeline(
        config,
        requests,
        generators,
        learners,
        runtime,
        runtime.now,
        spawn=None if config.placement == "colocated" else spawn,
    )
    return World(config, runtime, pipeline, learners, requests, trained, generated, releases)


# ---- Whole trials ----------------------------------------------------------------------------


def simulate(
    config: GRPOConfig, durations: Durations, *, hop_s: float = 0.0, gap_s: float = 0.0, seed: int
) -> list[RoundReport]:
    """Every round of a trial. `hop_s`: from a call's submission to its start; `gap_s`: from the end
    of one `step()` to the start of the next."""
    simulated = world(config, durations=durations, seed=seed, latency=hop_s, max_waits=10**9)
    simulated.pipeline.start()
    reports = []
    for _ in range(config.rounds):
        simulated.runtime.time += gap_s
        reports.append(simulated.pipeline.run_round())
    return reports


def wall_clock_a_round(reports: Sequence[RoundReport]) -> float:
    """Seconds, from the start of the first round given to the end of the last, evaluation
    subtracted."""
    evaluation_s = sum(stage_seconds(report.spans)["time/eval_s"] for report in reports)
    return (reports[-1].end - reports[0].start - evaluation_s) / len(reports)
