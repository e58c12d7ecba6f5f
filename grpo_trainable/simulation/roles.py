"""Stand-ins for generators, learners and colocated workers, used as roles of virtual actors.

They run no model, and only count and record what they are asked to do.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from grpo_trainable.config import GRPOConfig, schedule
from grpo_trainable.protocol.messages import (
    Cancelled,
    Deposited,
    Drift,
    FailedPrompt,
    GradientStep,
    LearnerState,
    Loaded,
    Published,
    ResponseFigures,
    Sampled,
    Scored,
    Updated,
)
from grpo_trainable.protocol.rollout import Request, RolloutGroup, SamplingLimits
from grpo_trainable.simulation.groups import group_of
from grpo_trainable.telemetry.stages import IDLE
from grpo_trainable.telemetry.timers import Span


class VirtualRequests:
    """Makes requests with prompts of one token, and records each request."""

    def __init__(self, config: GRPOConfig) -> None:
        self.config = config
        self.limit = schedule.most_prompts(config)  # every prompt index is below this limit
        self.asked: list[tuple[str, int]] = []
        self.train_size = 24  # number of training examples, needed by difficulty pools
        self.examples: dict[int, int] = {}  # prompt index of a training prompt -> its example

    def request(self, stream: str, prompt_index: int, example_index: int | None = None) -> Request:
        """Return the request for a prompt, and record it."""
        config = self.config
        held_out = schedule.held_out_prompts(config, final=True)
        limit = self.limit if stream == "train" else held_out
        assert 0 <= prompt_index < limit, (stream, prompt_index)
        self.asked.append((stream, prompt_index))
        if example_index is not None:
            known = self.examples.setdefault(prompt_index, example_index)
            assert known == example_index, "a repeated request has a different example"
        size = config.rollout.group_size if stream == "train" else config.eval.samples
        limits = SamplingLimits(min_new_tokens=1, max_new_tokens=1, temperature=1.0, end_ids=())
        return Request(
            stream=stream,
            prompt_index=prompt_index,
            example_index=example_index,
            prompt_ids=(1,),
            group_size=size,
            limits=limits,
        )


@dataclass(frozen=True)
class GeneratorCall:
    """One call, as the generator recorded it."""

    actor: str
    stream: str  # "train", "eval", "load" if the call fetched weights, or "cancelled"
    prompt_indices: tuple[int, ...]
    weights_round: int
    start: float
    end: float


class VirtualGenerator:
    """A generator whose rewards, like real ones, depend only on the prompt index and the weights.

    The methods mirror those of the real generator, but each method takes the start and end of the
    call before its other arguments.
    """

    def __init__(
        self,
        name: str,
        record: list[GeneratorCall],
        reward_fails: Callable[[str, int], bool] = lambda stream, prompt_index: False,
        *,
        equal_rewards: Callable[[int, int], bool] = lambda prompt_index, weights_round: False,
        slowness: Callable[[int], float] = lambda example: 1.0,
        takes_deposits: bool = False,
        scores_apart: bool = False,
        completions: int = 0,
        interrupted: Callable[[int, int], bool] | None = None,
    ) -> None:
        """Create a generator without weights.

        Args:
            name: name of the actor.
            record: list to which each call is appended.
            reward_fails: `reward_fails(stream, prompt_index)` is True if the reward function fails
                on the prompt.
            equal_rewards: `equal_rewards(prompt_index, weights_round)` is True if all responses to
                a training prompt earn the same reward.
            slowness: `slowness(example)` is the factor by which a training example takes longer
                than usual.
            takes_deposits: True if a response has three tokens, each sampled with the weights that
                the generator has when it samples the token.
            scores_apart: True if responses are scored in separate calls, as they are with a
                user-defined reward.
            completions: number of completions that are sampled to estimate the value of each
                training state; 0 if values are not estimated. Responses have one token, so the
                states are the prompts.
            interrupted: `interrupted(prompt_index, response)` is True if a response to a training
                prompt is interrupted: it reads the second of its three tokens instead of sampling
                it. None: responses have one token.
        """
        self.takes_deposits = takes_deposits
        self._scores_apart = scores_apart
        self._completions = completions
        self._interrupted = interrupted
        self._completing_s = 0.0  # seconds in which the current call samples completions of states
        self._scored: dict[int, tuple[str, Scored]] = {}  # number -> (stream, answer of `score`)
        self._numbers = itertools.count()
        self._name = name
        self._record = record
        self._reward_fails = reward_fails
        self._equal_rewards = equal_rewards
        self._slowness = slowness
        self._weights: list[tuple[float, int, int]] = []  # (time of arrival, version, round)
        self._reported = -1  # the last version that was reported as loaded
        self._idle_since: float | None = None

    def seconds(
        self, seconds_of: Callable[[str], float], stage: str, requests: Sequence[Request]
    ) -> float:
        """Return the duration of a call to `generate`, in seconds.

        Args:
            seconds_of: returns how many seconds a stage takes for prompts of usual length.
            stage: the stage of the call.
            requests: the requests of the call.
        """
        sampling_s, self._completing_s = seconds_of(stage), 0.0
        if requests[0].stream == "eval":
            return sampling_s
        slowness = max(self._slowness(request.example) for request in requests)
        if self._completions:
            self._completing_s = slowness * seconds_of("vine")
        return slowness * sampling_s + self._completing_s

    def load(self, start: float, end: float, handle: tuple[int, int]) -> Loaded:
        """Load weights, given as (version, round). They are in use from `end` on."""
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
        """Deposit weights, given as (version, round). They are in use from `end` on."""
        assert self.takes_deposits
        self._record.append(GeneratorCall(self._name, "load", (), handle[1], start, end))
        self._weights.append((end, *handle))
        return Deposited(version=handle[0], round=handle[1], bytes=1000, spans=[])

    def _at(self, moment: float) -> tuple[int, int]:
        """Return (version, round) of the weights that the generator had at `moment`."""
        # Weights arrive in the order of their versions.
        for since, version, round_ in reversed(self._weights):
            if since <= moment:
                return version, round_
        raise AssertionError("the generator samples before it has weights")

    def generate(self, start: float, end: float, requests: Sequence[Request]) -> Scored | Sampled:
        """Return groups for the requests, or the number to pass to `score` to get the groups."""
        scored = self._generate(start, end, requests)
        if not self._scores_apart:
            return scored
        stream = requests[0].stream
        sampled_at = end - self._completing_s
        spans = [Span("eval" if stream == "eval" else "rollout", start, sampled_at)]
        spans += self._vine(sampled_at)
        number = next(self._numbers)
        self._scored[number] = stream, scored
        return Sampled(number=number, loaded=scored.loaded, spans=spans)

    def cancelled(self, start: float, end: float, requests: Sequence[Request]) -> Cancelled:
        """Record a call of `generate` that was cancelled at `end`."""
        indices, round_ = tuple(r.prompt_index for r in requests), self._at(start)[1]
        self._record.append(GeneratorCall(self._name, "cancelled", indices, round_, start, end))
        spans = [*self._idle(start, end), Span("rollout", start, end)]
        return Cancelled(loaded=[], spans=spans)

    def score(self, start: float, end: float, number: int) -> Scored:
        """Return the groups for which `generate` returned `number`."""
        stream, scored = self._scored.pop(number)
        spans = [Span("eval" if stream == "eval" else "reward", start, end, concurrent=True)]
        return replace(scored, loaded=[], spans=spans)

    def _generate(self, start: float, end: float, requests: Sequence[Request]) -> Scored:
        middle = (start + end) / 2 if self.takes_deposits else start
        last = end if self.takes_deposits else start
        three = self.takes_deposits or self._interrupted is not None
        weights = [self._at(moment) for moment in ((start, middle, last) if three else (start,))]
        round_ = weights[0][1]
        stream = requests[0].stream
        assert stream == "train" or len(set(weights)) == 1, "an evaluation uses several versions"
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
        groups, failed = [], []
        for request in requests:
            if self._reward_fails(stream, request.prompt_index):
                tokens = request.group_size * len(weights)
                failed.append(FailedPrompt(request.prompt_index, "KeyError: 'apple'", tokens))
                continue
            rng = random.Random(f"{stream}/{request.prompt_index}/{round_}")
            # Make held-out rewards differ widely in magnitude, so that a float sum of them depends
            # on their order.
            scale = 1.0 if stream == "train" else 10.0 ** rng.randint(-9, 9)
            rewards = [scale * rng.random() for _ in range(request.group_size)]
            if stream == "train" and self._equal_rewards(request.prompt_index, round_):
                rewards = [rewards[0]] * len(rewards)
            group = group_of(
                request.prompt_index,
                rewards=rewards,
                weights=weights,
                interrupted=self._reading(request),
            )
            if stream == "train" and self._completions:
                value = sum(rng.random() for _ in range(self._completions)) / self._completions
                values = torch.full(group.response_mask.shape, value)
                group = replace(group, state_values=values)
            formats = torch.full((len(rewards),), rng.random(), dtype=torch.float64)
            groups.append(
                replace(group, format_rewards=formats, example_index=request.example_index)
            )
        rollout, reward = ("eval", "eval") if stream == "eval" else ("rollout", "reward")
        completions = 0 if stream == "eval" else self._completions
        sampled_at = start + (end - self._completing_s - start) / 2
        completed_at = sampled_at + self._completing_s
        return Scored(
            groups=groups,
            failed=failed,
            reward_errors=len(failed) * (requests[0].group_size + completions),
            unverified=0,
            completions=len(requests) * completions,
            loaded=loaded,
            spans=[
                *self._idle(start, end),
                Span(rollout, start, sampled_at),
                *self._vine(sampled_at),
                Span(reward, completed_at, end),
            ],
        )

    def _reading(self, request: Request) -> list[bool] | None:
        """Return a list with True for each interrupted response, and False for the others.

        If no response can be interrupted, return None.
        """
        if self._interrupted is None or request.stream == "eval":
            return None
        return [self._interrupted(request.prompt_index, i) for i in range(request.group_size)]

    def _vine(self, start: float) -> list[Span]:
        """Return the span, from `start` on, in which the call samples completions of states."""
        end = start + self._completing_s
        return [Span("vine", start, end)] if end > start else []

    def _idle(self, start: float, end: float) -> list[Span]:
        since, self._idle_since = self._idle_since, end
        return [] if since is None else [Span(IDLE, since, start)]

    def close(self, start: float, end: float) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class TrainingCall:
    """One `update`, as the learner recorded it."""

    round: int  # number of rounds finished before this call
    start: float
    end: float
    prompt_indices: tuple[tuple[int, ...], ...]  # one tuple for each rollout batch
    examples: tuple[int, ...]  # the examples of all groups
    group_rounds: tuple[tuple[int, ...], ...]
    group_uses: tuple[tuple[int, ...], ...]
    rewards: tuple[float, ...]


class VirtualLearner:
    """A learner that counts rounds and gradient steps, and records the groups it trains on.

    The methods mirror those of the real learner, but each method takes the start and end of the
    call before its other arguments.
    """

    def __init__(
        self, config: GRPOConfig, record: list[TrainingCall], releases: list[tuple[float, int]]
    ) -> None:
        self._config = config
        self._record = record
        self._releases = releases
        self._version = 0
        self._round = 0
        self._before = 0, 0  # version and round before the last update

    def update(
        self, start: float, end: float, rollout_batches: Sequence[Sequence[RolloutGroup]]
    ) -> Updated:
        """Simulate the training of a round: record the groups and count the gradient steps."""
        self._before = self._version, self._round
        groups = [group for batch in rollout_batches for group in batch]
        self._record.append(
            TrainingCall(
                round=self._round,
                start=start,
                end=end,
                prompt_indices=tuple(
                    tuple(g.prompt_index for g in batch) for batch in rollout_batches
                ),
                examples=tuple(group.example for group in groups),
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
            weights_bounded_fraction=0.0,
            ratio_max=1.0,
            bounded_tokens=0,
            ratio_counts=(0, len(groups), 0),
            lr=1e-4,
            ess_fraction=1.0,
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
            kl_coefficient=0.0,
            # The KL grows by one nat in each round.
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
        """Publish a snapshot, and record that weights from before `needed_from` are released."""
        self._releases.append((start, needed_from))
        return Published(
            handle=(self._version, self._round),
            version=self._version,
            round=self._round,
            spans=[Span("sync", start, end)],
        )

    def state(self, start: float, end: float) -> LearnerState:
        """Return the state for a checkpoint: version and round."""
        counters = {"version": self._version, "round": self._round}
        return LearnerState(policy={}, optimizer={}, counters=counters)

    def load_state(self, start: float, end: float, state: LearnerState) -> None:
        """Restore the version and the round."""
        self._version, self._round = state.counters["version"], state.counters["round"]

    def leave(self, start: float, end: float) -> None:
        """Do nothing."""

    def host(self, start: float, end: float) -> tuple[str, int]:
        """Return a fixed address and port."""
        return "here", 0

    def rejoin(
        self, start: float, end: float, rank: int, size: int, place: tuple[str, int]
    ) -> None:
        """Reset the version and the round to their values before the last update."""
        self._version, self._round = self._before

    def close(self, start: float, end: float) -> None:
        """Do nothing."""


class VirtualColocated:
    """Both roles in one actor, like a colocated worker."""

    def __init__(self, generator: VirtualGenerator, learner: VirtualLearner) -> None:
        self.generate, self.load = generator.generate, generator.load
        self.score, self.seconds = generator.score, generator.seconds
        self.update, self.publish = learner.update, learner.publish
        self.state, self.load_state = learner.state, learner.load_state
