"""What the trials of an experiment need, compared with what is here, before anything starts."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from grpo_trainable.command_line import UsageError
from grpo_trainable.config import GRPOConfig, schedule, shown
from grpo_trainable.config.transport_catalog import transport_named
from tuning.prompt_notes import about_prompts
from tuning.schedulers import pbt_bounds

if TYPE_CHECKING:
    from grpo_trainable.tasks.prompts import Prompts

# A trial's prompts whose lengths are looked at, and for how long: a file may have millions, and a
# chat template takes its time.
MAX_PROMPTS = 4096
MAX_LENGTHS_S = 10.0


class Missing(UsageError):
    """Something that valid trials need is missing: memory, a file, a model of the hub. A dry run
    shows the trials before it says so."""


# Raises what is wrong with a trial. What a user may want to know besides are lines.
TrialCheck: TypeAlias = Callable[[GRPOConfig], Sequence[str]]


def check_population(trials: Sequence[GRPOConfig], fixed: Mapping[str, object]) -> None:
    """Refuses trials between which population-based training could not clone anything."""
    arms = {trial.arm for trial in trials}
    if len(arms) > 1:
        raise UsageError(
            "--scheduler pbt: trials go on from one another's checkpoints, which those of "
            f"other arms cannot; choose one by --set arm=…, of {', '.join(sorted(arms))}"
        )
    varied = pbt_bounds(trials[0])
    if fixed.keys() >= varied.keys():
        raise UsageError(
            f"--scheduler pbt: varies {' and '.join(varied)}, which --set fixes; leave one free"
        )
    if len(trials) < 2:
        raise UsageError("--scheduler pbt: needs several trials; choose --num-samples >= 2")


def checks_of(
    trials: Sequence[GRPOConfig], *, here: bool
) -> Iterator[tuple[TrialCheck, GRPOConfig]]:
    """The checks of single trials. Where several trials are alike in what a check depends on, it
    gets the first of them. `here`: the trials run on this machine."""
    checks = ((check_transport, _transport), *TRIAL_CHECKS) if here else TRIAL_CHECKS
    for check, depends_on in checks:
        first: dict[Hashable, GRPOConfig] = {}
        for trial in trials:
            first.setdefault(depends_on(trial), trial)
        yield from ((check, trial) for trial in first.values())


def check_transport(trial: GRPOConfig) -> Sequence[str]:
    """Refuses a transport that cannot be loaded or lacks something on this machine.

    Raises:
        PluginError: it is a user's and cannot be loaded.
    """
    if trial.transport == "auto":
        return ()
    transport = transport_named(trial.transport)
    refused = transport.refuses_actors(**trial.resources.actors)
    wrong = refused or transport.missing_on_machine()
    if wrong is not None:
        raise UsageError(f"transport={trial.transport}: {wrong}")
    return ()


def check_inputs(trial: GRPOConfig) -> Sequence[str]:
    """Reads what a trial will read: model, tokenizer, task files and reward function. Returns what
    is to be known about its prompts, and a note where not every one was looked at."""
    from grpo_trainable.engines.selection import chosen_engine
    from grpo_trainable.generator.scorer import check_reward, reward_apart
    from grpo_trainable.models.directory import check_policy
    from grpo_trainable.models.hf.directory import NotOnTheHub
    from grpo_trainable.tasks.prompts import Prompts, build_task

    key = "model.path" if trial.model.env is None else "model.env"
    try:
        shape, tokenizer = check_policy(trial.model)
    except NotOnTheHub as error:
        raise Missing(f"{key}={error}") from None
    except ValueError as error:
        raise UsageError(f"{key}={error}") from None
    try:
        chosen_engine(trial)
        context = min(shape.context_length, _teachers_context(trial) or shape.context_length)
        task = build_task(trial)
        prompts = Prompts(trial, task, tokenizer)
        if trial.env.plays:
            _check_first_episode(trial, prompts)
        for own in trial.alone:
            if own.task.is_scored_apart and not own.env.plays:
                check_reward(*reward_apart(own))
        until = time.monotonic() + MAX_LENGTHS_S
        of_streams = {"eval": trial.eval.prompts, "train": prompts.train_count}
        seen = 0
        for stream, count in of_streams.items():
            most = min(count, MAX_PROMPTS)
            seen += prompts.check_lengths(stream, most, context, until)
        told = list(about_prompts(trial, task, prompts))
    except ValueError as error:
        raise UsageError(str(error)) from None
    asked = sum(of_streams.values())
    if seen < asked:
        told.append(
            f"note: of the {asked:,} prompts that a trial asks for, {seen:,} were compared with "
            f"the model's context of {context:,} tokens"
        )
    return told


def _check_first_episode(trial: GRPOConfig, prompts: Prompts) -> None:
    """Begin the episode of the first training example.

    Raises:
        ValueError: the environment cannot be had, or cannot begin it.
    """
    from grpo_trainable.generator.env_processes import EpisodeError, check_environment

    truth = prompts.ground_truth("train", 0)
    try:
        check_environment(trial.env, truth, prompts.said("train", 0))
    except EpisodeError as error:
        raise ValueError(
            f"env.name={trial.env.name}: {error}; the first training example of "
            f"task.name={trial.task.name} has {shown(truth)}"
        ) from None


def _teachers_context(trial: GRPOConfig) -> int | None:
    """The tokens of the teacher's context, as `check_teacher` says; that imports torch."""
    if trial.teacher is None:
        return None
    from grpo_trainable.learner.teacher import check_teacher

    return check_teacher(trial)


def check_code(trial: GRPOConfig) -> Sequence[str]:
    """Tries the user's own loss, advantage and engine, in a process of their own.

    Raises:
        PluginError: one of them cannot be used.
    """
    from grpo_trainable.learner.user_code import check_user_code

    check_user_code(trial)
    return ()


def _transport(trial: GRPOConfig) -> Hashable:
    return trial.transport, trial.resources


def _inputs(trial: GRPOConfig) -> Hashable:
    prompts = trial.eval.prompts, schedule.most_prompts(trial), trial.pools.enabled
    of_policies = trial.engine, trial.model, trial.loss.teacher
    return *of_policies, trial.task, trial.env, trial.rollout, trial.seed, prompts


def _code(trial: GRPOConfig) -> Hashable:
    return trial.loss.type, trial.loss.advantage, trial.rollout.group_size, trial.engine


# Each check of a trial, with what it depends on.
TRIAL_CHECKS = ((check_inputs, _inputs), (check_code, _code))
