"""Check that trials find what they need, before anything starts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

from grpo_trainable.command_line import UsageError
from grpo_trainable.config import GRPOConfig, default_beside, schedule, shown
from grpo_trainable.config.transport_catalog import transport_named
from tuning.prompt_notes import about_prompts

if TYPE_CHECKING:
    from grpo_trainable.models.shape import PolicySettings
    from grpo_trainable.tasks import Example

# Limits on checking the lengths of a trial's prompts. The first is a number of prompts, and applies
# separately to training prompts and to held-out prompts. The second is a time in seconds. A file
# may have millions of prompts, and applying a chat template takes time.
MAX_PROMPTS = 4096
MAX_LENGTHS_S = 10.0
# A note is shown if a learning rate is at least this many times the default for the model.
MUCH_FASTER = 20
ADAPTERS = "adapters"  # first word of a line about the adapters that a policy starts from


class Missing(UsageError):
    """The trials are valid, but something that they need is missing.

    Examples are memory, a file, or a model on the hub. A dry run shows the trials before it reports
    the error.
    """


# A check raises an error if it finds a mistake in a trial. Otherwise, it returns notes for the
# user.
TrialCheck: TypeAlias = Callable[[GRPOConfig], Sequence[str]]


def too_short_for_lag(trials: Sequence[GRPOConfig]) -> str | None:
    """Return a sentence about arms that have too few rounds to deliver their lag, or None.

    Such arms would certainly fail their audit.
    """
    from reports.audit import least_rounds  # imports pyarrow, slowly

    short = [trial for trial in trials if trial.rounds < least_rounds(trial.lag)]
    if not short:
        return None
    common = math.lcm(*map(schedule.responses_per_round, trials))
    needed = max(least_rounds(t.lag) * schedule.responses_per_round(t) for t in short)
    arms = ", ".join(sorted({trial.arm for trial in short}))
    return (
        f"too few rounds for the lag of {arms}, so the audit would fail and there would be no "
        f"verdict; use --samples {math.ceil(needed / common) * common} or more"
    )


def checks_of(
    trials: Sequence[GRPOConfig], *, here: bool
) -> Iterator[tuple[TrialCheck, GRPOConfig]]:
    """Yield pairs of a check and a trial to check.

    If several trials agree in the settings that a check depends on, only the first is checked.

    Args:
        trials: All trials.
        here: Add the checks that are only valid if the trials run on this machine.
    """
    checks = ((check_transport, _transport), *TRIAL_CHECKS) if here else TRIAL_CHECKS
    for check, depends_on in checks:
        first: dict[Hashable, GRPOConfig] = {}
        for trial in trials:
            first.setdefault(depends_on(trial), trial)
        yield from ((check, trial) for trial in first.values())


def check_transport(trial: GRPOConfig) -> Sequence[str]:
    """Refuse a transport that cannot be loaded or that lacks something on this machine.

    Raises:
        UsageError: The transport does not suit the actors, or needs something that this machine
            lacks.
        PluginError: A user's transport cannot be loaded.
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
    """Read the inputs of a trial: model, tokenizer and task files.

    Returns:
        Lines about the LoRA adapters and the prompts, with a note if the lengths of some prompts
        were not checked.
    """
    from grpo_trainable.engines.selection import chosen_engine
    from grpo_trainable.models.directory import check_policy
    from grpo_trainable.models.hf.files import NotOnTheHub
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
        until = time.monotonic() + MAX_LENGTHS_S
        # Later passes over the training prompts only repeat the prompts of the first pass.
        first_pass = min(prompts.train_count, prompts.train_size or prompts.train_count)
        of_streams = {"eval": schedule.held_out_prompts(trial, final=True), "train": first_pass}
        seen = 0
        for stream, count in of_streams.items():
            most = min(count, MAX_PROMPTS)
            seen += prompts.check_lengths(stream, most, context, until)
        told = [*about_adapter(trial.model), *about_prompts(trial, task, prompts)]
    except ValueError as error:
        raise UsageError(str(error)) from None
    asked = sum(of_streams.values())
    if seen < asked:
        told.append(
            f"note: only {seen:,} of the {asked:,} prompts of a trial were checked against the "
            f"model's context of {context:,} tokens"
        )
    return told


def about_adapter(model: PolicySettings) -> Iterator[str]:
    """Yield a line about the adapters that a policy starts from, if there are any."""
    if model.adapter is not None:
        yield (
            f"{ADAPTERS}: the policy starts from the LoRA adapters in {model.adapter} (rank "
            f"{model.lora_rank}), on the model {model.path}"
        )


def check_scoring(trial: GRPOConfig) -> Sequence[str]:
    """Begin an episode of the environment, or load the reward, in a separate process.

    Return a note if some parts of the reward have no weight.

    A process that loads user code may take a long time, and a judge's answer may cost money. So
    trials that differ only in the seed are checked once, although their examples differ.
    """
    from grpo_trainable.generator.scorer import check_reward, reward_apart
    from grpo_trainable.tasks.mix import MixTask
    from grpo_trainable.tasks.prompts import build_task

    apart = [own.task.is_scored_apart and not own.env.plays for own in trial.alone]
    if not (trial.env.plays or any(apart)):
        return ()
    try:
        task = build_task(trial)
        if trial.env.plays:
            _check_first_episode(trial, task.train_example(0))
        notes = []
        tasks = list(task.parts.values()) if isinstance(task, MixTask) else [task]
        for own, of_own, is_apart in zip(trial.alone, tasks, apart, strict=True):
            if is_apart:
                left_out = check_reward(
                    *reward_apart(own),
                    examples=[of_own.train_example(0), *of_own.eval_examples(1)],
                    weighted=own.task.part_weights,
                )
                if left_out:
                    notes.append(
                        "note: task.reward_weights leaves out a part of the reward, which "
                        f"therefore does not count: {', '.join(left_out)}"
                    )
    except ValueError as error:
        raise UsageError(str(error)) from None
    return notes


def _check_first_episode(trial: GRPOConfig, example: Example) -> None:
    """Begin the episode of the first training example.

    Raises:
        ValueError: The environment cannot be created, or cannot begin the episode.
    """
    from grpo_trainable.generator.env_processes import EpisodeError, check_environment
    from grpo_trainable.tasks.messages import last_text

    truth = example.ground_truth
    try:
        check_environment(trial.env, truth, last_text(example.prompt))
    except EpisodeError as error:
        raise ValueError(
            f"env.name={trial.env.name}: {error}; the first training example of "
            f"task.name={trial.task.name} has the specification {shown(truth)}"
        ) from None


def _teachers_context(trial: GRPOConfig) -> int | None:
    """Return the teacher's context in tokens, or None without a teacher.

    If there is a teacher, this function imports torch.
    """
    if trial.teacher is None:
        return None
    from grpo_trainable.learner.teacher import check_teacher

    return check_teacher(trial)


def check_code(trial: GRPOConfig) -> Sequence[str]:
    """Try the user's loss, advantage and engine in a separate process.

    Raises:
        PluginError: The loss, the advantage or the engine cannot be used.
    """
    from grpo_trainable.learner.user_code import check_user_code

    check_user_code(trial)
    return ()


def check_learning_rate(trial: GRPOConfig) -> Sequence[str]:
    """Return a note if the learning rate is far above the default for the model."""
    usual, reason = default_beside(trial, "optim.lr")
    if not reason or trial.optim.lr < MUCH_FASTER * usual:
        return ()
    return (
        f"note: optim.lr={shown(trial.optim.lr)} is {trial.optim.lr / usual:,.0f} times the "
        f"default for {reason} ({shown(usual)}), and may destroy what the model can do",
    )


def _transport(trial: GRPOConfig) -> Hashable:
    return trial.transport, trial.resources


def _inputs(trial: GRPOConfig) -> Hashable:
    held_out = trial.eval.prompts, trial.eval.final_prompts
    prompts = *held_out, schedule.most_prompts(trial), trial.pools.enabled
    of_policies = trial.engine, trial.model, trial.loss.teacher
    return *of_policies, trial.task, trial.env, trial.rollout, trial.seed, prompts


def _scoring(trial: GRPOConfig) -> Hashable:
    return trial.task, trial.env


def _learning_rate(trial: GRPOConfig) -> Hashable:
    return trial.model, trial.optim.lr


def _code(trial: GRPOConfig) -> Hashable:
    return trial.loss.type, trial.loss.advantage, trial.rollout.group_size, trial.engine


# Each check of a trial, with a function that returns the settings on which the check depends.
TRIAL_CHECKS = (
    (check_inputs, _inputs),
    (check_scoring, _scoring),
    (check_learning_rate, _learning_rate),
    (check_code, _code),
)
