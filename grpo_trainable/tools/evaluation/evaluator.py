"""Samples and scores the held-out prompts of a config with one policy, batch by batch.

It is the path of a trial's own evaluation without its actors: the same prompts, draws, batches and
checks. With a checkpoint, the trial's settings and as many threads it gives the same responses.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from grpo_trainable.config import ConfigError, GRPOConfig, resources, threads
from grpo_trainable.engines.checks import check_groups, check_load, check_played
from grpo_trainable.engines.engine import EngineSetup, PlayingEngine, build_engine
from grpo_trainable.engines.selection import chosen_engine
from grpo_trainable.generator.episodes import EpisodePlayer
from grpo_trainable.generator.scorer import make_scorer
from grpo_trainable.pipeline.evaluation import held_out_chunks
from grpo_trainable.protocol.rollout import Request, RolloutGroup
from grpo_trainable.tasks import RewardError, Score, eval_size
from grpo_trainable.tasks.prompts import Prompts, build_task
from grpo_trainable.tools.evaluation.checkpoint import TrainedPolicy
from grpo_trainable.tools.evaluation.generation import Generation
from grpo_trainable.tools.evaluation.policy import EvaluatedPolicy

STREAM = "eval"

Scores = list[Score | RewardError]  # one a response, in their order


def with_all_prompts(config: GRPOConfig) -> GRPOConfig:
    """The config with every held-out prompt of its task once.

    Raises:
        ValueError: the task does not say how many it has, or cannot be made.
    """
    size = eval_size(build_task(config))
    if size is None:
        raise ConfigError(
            f"task.name={config.task.name}: does not say how many held-out prompts it has "
            "(eval_size); give a number of prompts"
        )
    return replace(config, eval=replace(config.eval, prompts=size))


class Evaluator:
    """Samples `eval.samples` responses to each of the first `eval.prompts` held-out prompts.

    Raises:
        ValueError: the task, its reward or the engine cannot be had, or a prompt does not fit the
            context of the policy; in one line.
        EngineError: the engine breaks its contract, also while it samples.
    """

    def __init__(
        self,
        config: GRPOConfig,
        policy: EvaluatedPolicy,
        *,
        device: str = "cpu",
        batch: int | None = None,
    ) -> None:
        """`batch`: responses sampled together; None: as many as the trial samples."""
        self.config = config
        self.policy = policy
        self._chunks = held_out_chunks(config, batch)
        task = build_task(config)
        self._prompts = Prompts(config, task, policy.tokenizer)
        self._prompts.check_lengths(STREAM, config.eval.prompts, policy.context_length)
        self._engine_name = chosen_engine(config).name
        self._engine = build_engine(
            EngineSetup(config=config, tokenizer=policy.tokenizer, device=torch.device(device))
        )
        self._engine.load(policy.weights)
        check_load(self._engine_name, self._engine, policy.weights)
        self._player = self._scorer = None
        if config.env.plays:
            self._player = EpisodePlayer(config.env, self._prompts, policy.tokenizer)
        else:
            self._scorer = make_scorer(config, task)

    @property
    def prompts(self) -> list[str]:
        """The texts of the prompts."""
        return [self._prompts.text(STREAM, index) for index in range(self.config.eval.prompts)]

    @property
    def responses(self) -> int:
        """How many there will be."""
        return self.config.eval.prompts * self.config.eval.samples

    def batches(
        self, between_tokens: Callable[[], None] = lambda: None
    ) -> Iterator[list[Generation]]:
        """Yields the responses of one batch after the other, in the order of prompts.

        `between_tokens` is called before each token that a batch samples.
        """
        for chunk in self._chunks:
            requests = [self._prompts.request(STREAM, index) for index in chunk.prompt_indices]
            groups, scores = self._sampled(requests, between_tokens)
            sampled = [response for group in groups for response in self._responses(group)]
            if scores is None:
                scores = self._scores(sampled)
            yield [_with_score(own, score) for own, score in zip(sampled, scores, strict=True)]

    def close(self) -> None:
        """Ends the processes of a reward or an environment of the user's."""
        for own in (self._scorer, self._player):
            if own is not None:
                own.close()

    def _sampled(
        self, requests: Sequence[Request], between_tokens: Callable[[], None]
    ) -> tuple[list[RolloutGroup], Scores | None]:
        """The groups, and the scores of episodes; None where responses are yet to be scored."""
        name, vocab_size = self._engine_name, self.policy.vocab_size
        if self._player is None:
            groups = self._engine.generate(requests, between_tokens)
            check_groups(name, self._engine, requests, groups, self.policy.tokenizer, vocab_size)
            return groups, None
        assert isinstance(self._engine, PlayingEngine), "checked with the config"
        groups, scores = self._player.play(self._engine, requests, between_tokens)
        check_played(name, self._engine, requests, groups, vocab_size)
        return groups, [score for own in scores for score in own]

    def _scores(self, sampled: Sequence[Generation]) -> Scores:
        assert self._scorer is not None, "episodes are scored while they are played"
        requests = [
            self._prompts.score_request(STREAM, own.prompt_index, own.response) for own in sampled
        ]
        return self._scorer.score(requests)

    def _responses(self, group: RolloutGroup) -> Iterator[Generation]:
        """Yields the responses of a group, not scored yet."""
        index = group.prompt_index
        log_probs = group.behaviour_log_probs.double().sum(dim=1).tolist()
        tokens = group.response_mask.sum(dim=1).tolist()
        for g, ids in enumerate(group.responses()):
            yield Generation(
                prompt_index=index,
                response_index=g,
                prompt=self._prompts.text(STREAM, index),
                response=self.policy.tokenizer.decode(ids),
                ground_truth=self._prompts.ground_truth(STREAM, index),
                answer=None,
                reward=None,
                format_reward=None,
                answer_reward=None,
                finished=bool(group.finished[g]),
                tokens=tokens[g],
                log_prob=log_probs[g],
            )


def _with_score(sampled: Generation, score: Score | RewardError) -> Generation:
    if isinstance(score, RewardError):
        return replace(sampled, error=score.message)
    return replace(
        sampled,
        answer=score.answer,
        reward=score.reward,
        format_reward=score.format_reward,
        answer_reward=score.answer_reward,
    )


# ---- Device and threads --------------------------------------------------------------------------


# The shipped policy, of one million, samples as fast on one thread as on two.
PARAMETERS_PER_THREAD = 10_000_000


def sampling_device(asked: str | None, trained: TrainedPolicy | None) -> str:
    """`cpu` or `cuda`: as asked; else what the trial sampled on; else a GPU where there is one.

    Raises:
        ValueError: a GPU is asked for, or was the trial's, and there is none.
    """
    there = torch.cuda.is_available()
    if asked == "cuda" and not there:
        raise ValueError("--device cuda: torch sees no CUDA device")
    if asked is not None:
        return asked
    if trained is None:
        return "cuda" if there else "cpu"
    r, colocated = trained.config.resources, trained.config.placement == "colocated"
    wanted = r.worker_gpus if colocated else r.generator_gpus
    if wanted and not there:
        raise ValueError(
            "the trial sampled on a GPU, and torch sees none here; --device cpu samples on the "
            "CPU, where responses may differ"
        )
    return "cuda" if wanted else "cpu"


def sampling_threads(asked: int | None, trained: TrainedPolicy | None, parameters: int) -> int:
    """The threads to sample with: as many as `asked`; else as many as the trial's generator had,
    which gives the same bits again; else one for every `PARAMETERS_PER_THREAD` of the policy, as
    far as there are cores."""
    if asked is not None:
        return asked
    if trained is not None:
        return threads(resources.generator_cpus(trained.config))
    return min(len(os.sched_getaffinity(0)), max(1, parameters // PARAMETERS_PER_THREAD))
