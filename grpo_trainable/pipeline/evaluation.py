"""Evaluation: the mean reward on the held-out prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from grpo_trainable.config import GRPOConfig, schedule
from grpo_trainable.pipeline.by_task import ByTask
from grpo_trainable.pipeline.reward_errors import (
    JUDGED_PROMPTS,
    error_for,
    refuse_reward_errors,
    what_scores,
)
from grpo_trainable.pipeline.rollout_metrics import part_means
from grpo_trainable.protocol.messages import FailedPrompt, Scored
from grpo_trainable.protocol.rollout import RolloutGroup
from grpo_trainable.text import plural


@dataclass(frozen=True, slots=True)
class HeldOutChunk:
    """Held-out prompts whose responses a generator samples in one call."""

    stream: ClassVar[str] = "eval"
    stage: ClassVar[str] = "eval"

    prompt_indices: tuple[int, ...]
    examples: None = None  # the examples have the same indices as the prompts


@dataclass(kw_only=True)
class Evaluation:
    """The held-out rewards of the latest evaluation, and the mean reward of the first one."""

    first: float  # `mean` of the first evaluation
    mean: float  # mean over the scored prompts
    round: int  # number of rounds of training before the evaluation
    unscored: int = 0  # prompts that could not be scored
    # Label of a task in `task.mix` -> its figures (`ByTask.held_out`). Empty without a mix.
    tasks: dict[str, dict[str, float]] = field(default_factory=dict)
    # Name of a part of the reward -> its mean (`part_means`).
    parts: dict[str, float] = field(default_factory=dict)
    parts_first: dict[str, float] = field(default_factory=dict)  # `parts` of the first evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """The responses of one evaluation."""

    round: int  # number of rounds of training before the evaluation
    groups: list[RolloutGroup]  # sorted by prompt index


def held_out_chunks(
    config: GRPOConfig, responses: int | None = None, *, final: bool = False
) -> list[HeldOutChunk]:
    """Return all held-out prompts of an evaluation, divided into chunks.

    Args:
        config: The trial's settings.
        responses: Maximum number of responses in a chunk. The default is the number of responses
            in the largest training chunk. All responses to a prompt belong to the same chunk, even
            if they exceed the maximum.
        final: True for the last evaluation of a trial.
    """
    if responses is None:
        responses = schedule.chunk_responses(config)
    size = max(1, responses // config.eval.samples)
    prompts = range(schedule.held_out_prompts(config, final=final))
    return [HeldOutChunk(tuple(prompts[i : i + size])) for i in range(0, len(prompts), size)]


def held_out_rewards(
    config: GRPOConfig,
    round_: int,
    before: Evaluation | None,
    answers: Sequence[Scored],
    by_task: ByTask,
) -> tuple[Evaluation, HeldOut, list[str]]:
    """Return an evaluation, its responses, and notes for the user.

    Args:
        config: The trial's settings.
        round_: Number of rounds of training before the evaluation.
        before: The previous evaluation, or None if this is the first one.
        answers: The scored chunks, in any order.
        by_task: Computes the figures of each task.

    Raises:
        ActorFailed: More rewards failed than the task allows, or each prompt has a response without
            a reward, so that no prompt could be scored.
    """
    groups = sorted((g for scored in answers for g in scored.groups), key=lambda g: g.prompt_index)
    failed = sorted(prompt for scored in answers for prompt in scored.failed)
    prompts = len(groups) + len(failed)
    errors = sum(scored.reward_errors for scored in answers)
    notes = _check_rewards(config, prompts, errors, failed)
    notes += _unverified(config, prompts, sum(scored.unverified for scored in answers))
    rewards = [float(group.rewards.mean()) for group in groups]
    # fsum is exact, so the order in which generators answered does not matter.
    mean = math.fsum(rewards) / len(rewards)
    parts = part_means(groups)
    evaluation = Evaluation(
        first=mean if before is None else before.first,
        mean=mean,
        round=round_,
        unscored=len(failed),
        tasks=by_task.held_out(
            groups,
            [prompt.prompt_index for prompt in failed],
            {} if before is None else before.tasks,
        ),
        parts=parts,
        parts_first=parts if before is None else before.parts_first,
    )
    return evaluation, HeldOut(round=round_, groups=groups), notes


def _check_rewards(
    config: GRPOConfig, prompts: int, errors: int, failed: Sequence[FailedPrompt]
) -> list[str]:
    """Return a note if prompts could not be scored.

    Args:
        config: The trial's settings.
        prompts: Number of prompts of the evaluation.
        errors: Number of responses on which the reward function failed.
        failed: The prompts that could not be scored.
    """
    if not failed:
        return []
    responses = prompts * config.eval.samples
    told = f"eval: {what_scores(config)} failed on {errors} of "
    told += plural(responses, "held-out response")
    judged = max(prompts, JUDGED_PROMPTS) * config.eval.samples
    refuse_reward_errors(config, told, errors, judged, failed)
    example = f"prompt {failed[0].prompt_index}: {failed[0].reason}"
    if len(failed) == prompts:
        happened = told if errors else f"eval: {what_scores(config)} returned None"
        raise error_for(failed)(
            f"{happened}, at least once for each prompt, so nothing could be scored; {example}"
        )
    return [
        f"{len(failed)} of {plural(prompts, 'held-out prompt')} could not be scored; "
        f"reward/eval_mean is the mean of the others ({example})"
    ]


def _unverified(config: GRPOConfig, prompts: int, responses: int) -> list[str]:
    """Return a note if answers to held-out prompts could not be verified."""
    if not responses:
        return []
    asked = plural(prompts * config.eval.samples, "held-out response")
    return [f"{responses} of {asked} could not be verified and count as wrong"]
