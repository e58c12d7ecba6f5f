"""The generator (engine, task and scorer), which turns prompts into scored groups."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from grpo_trainable.config import GRPOConfig, resources, threads
from grpo_trainable.engines.checks import check_groups, check_load, check_played
from grpo_trainable.engines.engine import (
    EarningEngine,
    EngineSetup,
    PlayingEngine,
    SleepingEngine,
    build_engine,
)
from grpo_trainable.engines.selection import chosen_engine
from grpo_trainable.generator.episodes import EpisodePlayer
from grpo_trainable.generator.scorer import make_scorer
from grpo_trainable.generator.state_values import Completer, Completions, state_values
from grpo_trainable.learner.log_probs import Reference
from grpo_trainable.models.directory import policy_shape, policy_tokenizer
from grpo_trainable.protocol.messages import (
    Cancelled,
    Deposited,
    FailedPrompt,
    Loaded,
    Sampled,
    Scored,
)
from grpo_trainable.protocol.rollout import PolicyWeights, Request, RolloutGroup, Rubric
from grpo_trainable.protocol.weight_transfer import WeightReceiver
from grpo_trainable.tasks import RewardError, Score
from grpo_trainable.tasks.prompts import Prompts, build_task
from grpo_trainable.tasks.task import has_failed, weighted
from grpo_trainable.telemetry.actor_process import RoleContext, keep_freed_memory
from grpo_trainable.telemetry.progress import advance, steps_done
from grpo_trainable.telemetry.timers import Span, StageClock, now

Scores = list[Score | RewardError]  # scores of a group: one per response, then one per completion


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fetched:
    """Weights in this process that the engine has not loaded yet."""

    weights: PolicyWeights
    bytes: int  # number of bytes that were transferred
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rollouts:
    """The results of sampling in one call of `generate`."""

    stream: str
    groups: list[RolloutGroup]
    rubrics: list[tuple[Rubric, ...] | None]  # rubrics of each group's prompt; see `Request`
    completions: list[Completions]  # one for each group; empty if not needed


class _SamplingCancelled(Exception):
    """Ends a call of `generate` after `cancel` was called for it."""


class Generator:
    """Samples responses with a private copy of the weights, and scores them."""

    CONCURRENT = ("progress", "deposit", "score", "cancel")

    def __init__(
        self, config: GRPOConfig, receiver: WeightReceiver, clock: StageClock | None = None
    ) -> None:
        """Build the generator in this process.

        Args:
            config: The trial's settings.
            receiver: Fetches published weights.
            clock: The clock of another role that runs in the same process. By default, a new clock.
        """
        keep_freed_memory()
        r = config.resources
        self._context = RoleContext(
            threads=threads(resources.generator_cpus(config)),
            gpus=r.worker_gpus if config.placement == "colocated" else r.generator_gpus,
            clock=clock,
        )
        self._receiver = receiver
        # Rollouts that wait for `score` are numbered. The numbers continue after a reset, so a late
        # `score` call from before the reset cannot get newer rollouts.
        self._numbers = itertools.count()
        self._build(config)

    def reset(self, config: GRPOConfig) -> None:
        """Start over with a config that leaves placement, resources and transport unchanged."""
        self.close()
        self._context.clock.reset()
        # Free the memory of the old engine and reference before the new ones need it.
        del self.engine, self._reference
        self._fetched = {}
        self._build(config)

    def _build(self, config: GRPOConfig) -> None:
        self._fetched: dict[str, torch.Tensor] = {}  # the weights of the last fetch
        # Another thread puts weights into the mailbox. Newer weights replace older ones that have
        # not been taken out yet.
        self._mailbox: deque[_Fetched] = deque(maxlen=1)
        self._loaded: list[Loaded] = []
        # The calls that must be cancelled, each identified by the index of its first training
        # prompt. Another thread adds them.
        self._to_cancel: set[int] = set()
        self._sampling: int | None = None  # first training prompt of the current call
        self._to_score: dict[int, _Rollouts] = {}  # rollouts that wait for `score`, by number
        self._engine_name = chosen_engine(config).name
        self._tokenizer = policy_tokenizer(config.model)
        self._vocab_size = policy_shape(config.model).vocab_size
        self.engine = build_engine(
            EngineSetup(config=config, tokenizer=self._tokenizer, device=self._context.device)
        )
        here = config.reference_role == "generator"
        device = self._context.device
        self._reference = Reference(config, self._tokenizer, device) if here else None
        self._completer = None
        if config.loss.advantage == "vine":
            self._completer = Completer(config.vine, self._tokenizer.decode, self._complete)
        task = build_task(config)
        self._prompts = Prompts(config, task, self._tokenizer)
        self._player = self._scorer = None
        if config.env.plays:
            self._player = EpisodePlayer(config.env, self._prompts, self._tokenizer)
        elif not isinstance(self.engine, EarningEngine):
            self._scorer = make_scorer(config, task)
        self._weights = config.task.part_weights

    def load(self, handle: Any, received: Any = None, sent_at: float = math.inf) -> Loaded:
        """Fetch published weights and load them into the engine, which verifies them.

        Args:
            handle: The handle of the published weights.
            received: Tensors of the weights, if the transport delivers them with this call.
            sent_at: Earliest time at which the tensors could be sent, in seconds since 1970.
        """
        with self._context.call("sync", since=sent_at) as waited_s:
            with self._context.clock("sync"):
                loaded = self._take(self._fetch(handle, received, waited_s))
            return replace(loaded, spans=self._context.clock.take())

    def deposit(self, handle: Any, received: Any = None, sent_at: float = math.inf) -> Deposited:
        """Fetch published weights and put them into a mailbox.

        The sampling loop checks the mailbox before every token. This method runs in a separate
        thread, concurrently with any other call. The arguments are the same as for `load`.
        """
        mailbox = self._mailbox  # `reset` replaces the attribute
        called = now()
        start = min(called, sent_at)
        fetched = self._fetch(handle, received, called - start)
        mailbox.append(fetched)
        return Deposited(
            version=fetched.weights.version,
            round=fetched.weights.round,
            bytes=fetched.bytes,
            spans=[Span("sync", start, now(), concurrent=True)],
        )

    def _fetch(self, handle: Any, received: Any, waited_s: float) -> _Fetched:
        start = time.perf_counter()
        weights = self._receiver.fetch(handle, received)
        seconds = waited_s + time.perf_counter() - start
        # A tensor that was already in this process was not transferred.
        new = [t for name, t in weights.tensors.items() if t is not self._fetched.get(name)]
        self._fetched = weights.tensors
        return _Fetched(weights=weights, bytes=sum(t.nbytes for t in new), seconds=seconds)

    def _take(self, fetched: _Fetched) -> Loaded:
        """Load fetched weights into the engine."""
        weights = fetched.weights
        start = time.perf_counter()
        self.engine.load(weights)
        check_load(self._engine_name, self.engine, weights)
        self._receiver.release(weights.round)
        return Loaded(
            version=weights.version,
            round=weights.round,
            transport=self._receiver.name,
            bytes=fetched.bytes,
            transfer_s=fetched.seconds,
            load_s=time.perf_counter() - start,
            at=now(),
            spans=[],
        )

    def generate(self, requests: Sequence[Request]) -> Scored | Sampled | Cancelled:
        """Sample responses to requests, and score the responses if scoring is quick.

        All requests belong to the same stream, `train` or `eval`. If scoring is slow, the result is
        a `Sampled`, and `score` computes the rewards while the responses to the next requests are
        sampled. Episodes are rewarded while they are played. In an evaluation, both sampling and
        scoring are timed as the stage `eval`. If the call is cancelled before the responses are
        complete, the result is a `Cancelled`.
        """
        self._sampling = requests[0].prompt_index if requests[0].stream == "train" else None
        try:
            return self._generate(requests)
        except _SamplingCancelled:
            loaded, self._loaded = self._loaded, []
            return Cancelled(loaded=loaded, spans=self._context.clock.take())
        finally:
            self._sampling = None
            self._to_cancel.clear()  # a cancellation that came too late must not end a later call

    def cancel(self, first_prompt: int) -> None:
        """End the call of `generate` whose first training prompt has this index.

        This method runs in a separate thread. The call ends before its next token. A call that has
        already ended is not affected.
        """
        self._to_cancel.add(first_prompt)

    def _generate(self, requests: Sequence[Request]) -> Scored | Sampled:
        stream = requests[0].stream
        with self._context.call():
            with self._context.clock("eval" if stream == "eval" else "rollout"):
                groups, scores = self._sample_or_play(requests)
            completions = self._completions(requests, groups)
            if self._reference is not None and stream == "train":
                with self._context.clock("reference"):
                    groups = self._reference.annotate(groups)
            rubrics = [request.rubrics for request in requests]
            rollouts = _Rollouts(
                stream=stream, groups=groups, rubrics=rubrics, completions=completions
            )
            if self._scorer is not None and not self._scores_apart:
                with self._context.clock(_scoring_stage(stream)):
                    scores = self._scores(rollouts)
            loaded, self._loaded = self._loaded, []
            spans = self._context.clock.take()
        if self._scores_apart:
            number = next(self._numbers)
            self._to_score[number] = rollouts
            return Sampled(number=number, loaded=loaded, spans=spans)
        assert scores is not None, "episodes have scores, and so do responses scored inline"
        return _scored(rollouts, scores, self._weights, loaded, spans)

    @property
    def _scores_apart(self) -> bool:
        """True if `generate` returns a `Sampled` and leaves the rewards to `score`."""
        return self._scorer is not None and not self._scorer.is_inline

    def score(self, number: int) -> Scored:
        """Score the responses that `generate` sampled.

        This runs in a separate thread, concurrently with any other call. The result of `generate`
        already lists the weights that were loaded during sampling.

        Args:
            number: The number in the `Sampled` that `generate` returned.
        """
        rollouts = self._to_score.pop(number)
        start = now()
        with self._context.clock.concurrent():
            scores = self._scores(rollouts)
        spans = [Span(_scoring_stage(rollouts.stream), start, now(), concurrent=True)]
        return _scored(rollouts, scores, self._weights, [], spans)

    def warm_up(self, requests: Sequence[Request]) -> None:
        """Sample once and drop the responses, so that memory and code are warm in the first round.

        Random draws depend only on the request, so the warm-up does not change later draws. Nothing
        is scored, because a user's reward function may count its calls or cost money.
        """
        with self._context.call():
            if isinstance(self.engine, EarningEngine):
                groups, _ = self._earn(self.engine, requests, advance)
            else:
                groups = self._sample(requests, advance)
            if self._reference is not None:
                self._reference.annotate(groups)
            self._context.clock.synchronize()
        self._context.clock.reset()

    def _completions(
        self, requests: Sequence[Request], groups: Sequence[RolloutGroup]
    ) -> list[Completions]:
        """Sample completions of each group's states (VinePPO), or return [] if none are needed."""
        if self._completer is None or requests[0].stream == "eval":
            return []
        with self._context.clock("vine"):
            return self._completer.completions(groups, requests[0].limits)

    def _complete(self, requests: Sequence[Request]) -> list[RolloutGroup]:
        """Sample completions with the weights that sampled the responses."""
        return self._sample(requests, advance)

    def _sample_or_play(
        self, requests: Sequence[Request]
    ) -> tuple[list[RolloutGroup], list[Scores] | None]:
        """Return the groups, and the scores of episodes.

        The scores are None if the responses must still be scored.
        """
        if isinstance(self.engine, EarningEngine):
            return self._earn(self.engine, requests, self.between_tokens)
        if self._player is None:
            return self._sample(requests, self.between_tokens), None
        assert isinstance(self.engine, PlayingEngine), "the config check rejects other engines"
        groups, scores = self._player.play(self.engine, requests, self.between_tokens)
        check_played(self._engine_name, self.engine, requests, groups, self._vocab_size)
        return groups, scores

    def _earn(
        self,
        engine: EarningEngine,
        requests: Sequence[Request],
        between_tokens: Callable[[], None],
    ) -> tuple[list[RolloutGroup], list[Scores]]:
        """Return groups of episodes, and a score for each episode."""
        groups, scores = engine.earn(requests, between_tokens)
        densities = any(group.actions is not None for group in groups)
        check_played(
            self._engine_name,
            self.engine,
            requests,
            groups,
            self._vocab_size,
            densities=densities,
        )
        return groups, scores

    def _sample(
        self, requests: Sequence[Request], between_tokens: Callable[[], None]
    ) -> list[RolloutGroup]:
        groups = self.engine.generate(requests, between_tokens)
        check_groups(
            self._engine_name, self.engine, requests, groups, self._tokenizer, self._vocab_size
        )
        return groups

    def between_tokens(self) -> None:
        """Load weights that have arrived in the mailbox.

        The engine calls this method before every token.

        Raises:
            _SamplingCancelled: The current call has been cancelled.
        """
        advance()
        if self._sampling in self._to_cancel:
            raise _SamplingCancelled
        if not self._mailbox:
            return
        with self._context.clock("sync"):
            self._loaded.append(self._take(self._mailbox.pop()))

    def progress(self) -> int:
        """Return a count that changes with each token and each reward."""
        return steps_done()

    def sleep(self) -> None:
        """Let the engine release its GPU memory until its next call, if it can."""
        if isinstance(self.engine, SleepingEngine):
            self.engine.sleep()

    def close(self) -> None:
        """Close the scorer, the environments and the receiver."""
        engine = self.engine if isinstance(self.engine, EarningEngine) else None
        for own in (self._scorer, self._player, engine):
            if own is not None:
                own.close()
        self._receiver.close()

    def _scores(self, rollouts: _Rollouts) -> list[Scores]:
        """Return each group's scores, first of the responses and then of the completions."""
        responses = [group.responses() for group in rollouts.groups]
        for of_group, completed in zip(responses, rollouts.completions, strict=False):
            of_group += completed.responses
        requests = [
            replace(
                self._prompts.score_request(rollouts.stream, group.example, ids), rubrics=rubrics
            )
            for group, of_group, rubrics in zip(
                rollouts.groups, responses, rollouts.rubrics, strict=True
            )
            for ids in of_group
        ]
        assert self._scorer is not None, "episodes are scored while they are played"
        answers = iter(self._scorer.score(requests))
        return [[next(answers) for _ in of_group] for of_group in responses]


def _scoring_stage(stream: str) -> str:
    """Return the name of the stage that records the time for scoring a stream."""
    return "eval" if stream == "eval" else "reward"


def _scored(
    rollouts: _Rollouts,
    scores: list[Scores],
    weights: Mapping[str, float],
    loaded: list[Loaded],
    spans: list[Span],
) -> Scored:
    """Add rewards, reward parts and state values to the groups.

    Leave out groups with a failed score.

    Args:
        rollouts: The groups and their completions.
        scores: The result of `Generator._scores`.
        weights: Weights of the reward parts. If empty, the task's own reward is used.
        loaded: Records of the weights that the engine loaded while it sampled.
        spans: The time that the call spent on each stage.
    """
    scores = [[weighted(score, weights) for score in row] for row in scores]
    scored = Scored(
        groups=[],
        failed=[],
        reward_errors=sum(has_failed(s) for row in scores for s in row),
        unverified=sum(isinstance(s, Score) and not s.verified for row in scores for s in row),
        completions=sum(len(completed.responses) for completed in rollouts.completions),
        usage=dict(sum((Counter(s.usage) for row in scores for s in row), Counter[str]())),
        loaded=loaded,
        spans=spans,
    )
    completions = rollouts.completions or [None] * len(scores)
    for group, completed, row in zip(rollouts.groups, completions, scores, strict=True):
        valid = [score for score in row if isinstance(score, Score)]
        errors = [score for score in row if isinstance(score, RewardError)]
        if errors:
            # Report a failure, if there is one, rather than a reward that was omitted on purpose.
            error = max(errors, key=has_failed)
            scored.failed.append(
                FailedPrompt(
                    group.prompt_index,
                    error.message,
                    group.num_tokens,
                    error.repeats,
                    error.is_failure,
                )
            )
            continue
        if valid[0].rubrics is not None:
            scored.rubrics[group.prompt_index] = tuple(Rubric(*own) for own in valid[0].rubrics)
        if completed is not None:
            beside = [score.reward for score in valid[len(group.response_ids) :]]
            group = replace(group, state_values=state_values(group, completed, beside))
        valid = valid[: len(group.response_ids)]
        scored.groups.append(
            replace(
                group,
                rewards=torch.tensor([score.reward for score in valid], dtype=torch.float32),
                format_rewards=_double([score.format_reward for score in valid]),
                answer_rewards=_double([score.answer_reward for score in valid]),
                reward_parts=_parts_of(valid, weights),
                # The parts of an episode are the numbers in its `info`.
                parts=None if group.info is not None else _logged_parts(valid, weights),
            )
        )
    return scored


def _logged_parts(
    scores: Sequence[Score], weighted_names: Collection[str]
) -> dict[str, list[float | None]] | None:
    """Return the values of each part that has a weight or that the reward function returned.

    The result is None if there are no such parts.
    """
    names = sorted({*weighted_names, *(name for score in scores for name in score.parts)})
    return {name: [score.all_parts.get(name) for score in scores] for name in names} or None


def _double(values: list[float | None]) -> torch.Tensor:
    known = [math.nan if value is None else value for value in values]
    return torch.tensor(known, dtype=torch.float64)


def _parts_of(scores: Sequence[Score], names: Collection[str]) -> torch.Tensor | None:
    """Return the named parts of the rewards, (G, K) float32, or None if no part is named."""
    if not names:
        return None
    rows = [[score.all_parts[name] for name in names] for score in scores]
    return torch.tensor(rows, dtype=torch.float32)
