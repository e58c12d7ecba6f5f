"""Sample and score responses to held-out prompts with one policy, batch by batch.

Prompts, random draws, batches and checks are the same as in a trial's evaluation, but there are no
actors. With the same settings and the same number of threads, a checkpoint gives the same responses
as in the trial that wrote it.
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
from grpo_trainable.generator.scorer import check_judges, make_scorer
from grpo_trainable.pipeline.evaluation import held_out_chunks
from grpo_trainable.protocol.rollout import Request, RolloutGroup
from grpo_trainable.tasks import RewardError, Score, Task, eval_size
from grpo_trainable.tasks.mix import MixTask
from grpo_trainable.tasks.prompts import Prompts, build_task
from grpo_trainable.tasks.task import weighted
from grpo_trainable.tools.evaluation.checkpoint import TrainedPolicy
from grpo_trainable.tools.evaluation.generation import Generation
from grpo_trainable.tools.evaluation.policy import EvaluatedPolicy

STREAM = "eval"

Scores = list[Score | RewardError]  # one per response, in the same order


def with_all_prompts(config: GRPOConfig, task: Task | MixTask) -> GRPOConfig:
    """Return the config with `eval.prompts` set to the number of held-out prompts of its task.

    Raises:
        ConfigError: If the task does not state this number.
    """
    size = eval_size(task)
    if size is None:
        raise ConfigError(
            f"task.name={config.task.name}: does not state its number of held-out prompts "
            "(eval_size); give a number of prompts"
        )
    return replace(config, eval=replace(config.eval, prompts=size))


class Evaluator:
    """Samples `eval.samples` responses to each of the first `eval.prompts` held-out prompts.

    Raises:
        ValueError: If the task, its reward or the engine cannot be created, or if a prompt does
            not fit into the policy's context. The message is one line.
        EngineError: If the engine breaks its contract. Sampling may raise this error too.
    """

    def __init__(
        self,
        config: GRPOConfig,
        policy: EvaluatedPolicy,
        *,
        device: str = "cpu",
        batch: int | None = None,
    ) -> None:
        """Build the engine, load the policy and prepare the prompts.

        Args:
            config: Config of the evaluation.
            policy: Policy to evaluate.
            device: Device on which to sample, `cpu` or `cuda`.
            batch: Maximum number of responses to sample together, by default the same as in the
                trial. The responses to one prompt are always sampled together.
        """
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
            for part in config.alone:
                if part.task.reward is not None:
                    check_judges(part.task.reward)
            self._scorer = make_scorer(config, task)

    @property
    def prompts(self) -> list[str]:
        """The prompts as text."""
        return [self._prompts.text(STREAM, index) for index in range(self.config.eval.prompts)]

    @property
    def responses(self) -> int:
        """Total number of responses."""
        return self.config.eval.prompts * self.config.eval.samples

    def batches(
        self, between_tokens: Callable[[], None] = lambda: None
    ) -> Iterator[list[Generation]]:
        """Yield the scored responses of each batch, in the order of the prompts.

        Args:
            between_tokens: Called before each token of a batch is sampled.
        """
        for chunk in self._chunks:
            requests = [self._prompts.request(STREAM, index) for index in chunk.prompt_indices]
            groups, scores = self._sampled(requests, between_tokens)
            sampled = [response for group in groups for response in self._responses(group)]
            if scores is None:
                scores = self._scores(groups)
            weights = self.config.task.part_weights
            answers = [weighted(score, weights) for score in scores]
            yield [_with_score(own, answer) for own, answer in zip(sampled, answers, strict=True)]

    def close(self) -> None:
        """End the processes that compute rewards and play environments."""
        for own in (self._scorer, self._player):
            if own is not None:
                own.close()

    def _sampled(
        self, requests: Sequence[Request], between_tokens: Callable[[], None]
    ) -> tuple[list[RolloutGroup], Scores | None]:
        """Sample groups and return them with scores. Without episodes, the scores are None."""
        name, vocab_size = self._engine_name, self.policy.vocab_size
        if self._player is None:
            groups = self._engine.generate(requests, between_tokens)
            check_groups(name, self._engine, requests, groups, self.policy.tokenizer, vocab_size)
            return groups, None
        assert isinstance(self._engine, PlayingEngine), "the config check rejects other engines"
        groups, scores = self._player.play(self._engine, requests, between_tokens)
        check_played(name, self._engine, requests, groups, vocab_size)
        return groups, [score for own in scores for score in own]

    def _scores(self, groups: Sequence[RolloutGroup]) -> Scores:
        assert self._scorer is not None, "episodes are scored while they are played"
        requests = [
            self._prompts.score_request(STREAM, group.prompt_index, ids)
            for group in groups
            for ids in group.responses()
        ]
        return self._scorer.score(requests)

    def _responses(self, group: RolloutGroup) -> Iterator[Generation]:
        """Yield the responses of a group, without scores."""
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


# The shipped policy has one million parameters and samples as fast on one thread as on two.
PARAMETERS_PER_THREAD = 10_000_000


def sampling_device(asked: str | None, trained: TrainedPolicy | None) -> str:
    """Return the device to sample on, `cpu` or `cuda`.

    Args:
        asked: The requested device, or None.
        trained: Policy of a trial. The default is the trial's device. Without a trial, the default
            is a GPU if the machine has one.

    Raises:
        ValueError: If the requested device or the trial's device is a GPU, but the machine has
            none.
    """
    there = torch.cuda.is_available()
    if asked == "cuda" and not there:
        raise ValueError("--device cuda: torch sees no CUDA device; use --device cpu")
    if asked is not None:
        return asked
    if trained is None:
        return "cuda" if there else "cpu"
    r, colocated = trained.config.resources, trained.config.placement == "colocated"
    wanted = r.worker_gpus if colocated else r.generator_gpus
    if wanted and not there:
        raise ValueError(
            "the trial sampled on a GPU, but torch sees no GPU here; use --device cpu to sample on "
            "the CPU, where responses may differ"
        )
    return "cuda" if wanted else "cpu"


def sampling_threads(asked: int | None, trained: TrainedPolicy | None, parameters: int) -> int:
    """Return the number of threads to sample with.

    Args:
        asked: The requested number, or None.
        trained: Policy of a trial. The default is the number of threads of the trial's generators,
            because the same number of threads gives the same bits. Without a trial, the default is
            one thread for every `PARAMETERS_PER_THREAD` parameters, but at most torch's number of
            threads (the number of cores, or OMP_NUM_THREADS).
        parameters: Number of parameters of the policy.
    """
    if asked is not None:
        return asked
    if trained is not None:
        return threads(resources.generator_cpus(trained.config))
    most = min(len(os.sched_getaffinity(0)), torch.get_num_threads())
    return min(most, max(1, parameters // PARAMETERS_PER_THREAD))
