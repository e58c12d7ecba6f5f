"""What the trials of an experiment need, compared with what is here, before anything starts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TypeAlias

from grpo_trainable.command_line import UsageError
from grpo_trainable.config import GRPOConfig
from grpo_trainable.transports import transport_named
from tuning.mutations import pbt_bounds

# A trial's prompts whose lengths are looked at, and for how long: a file may have millions, and a
# chat template takes its time.
MAX_PROMPTS = 4096
MAX_LENGTHS_S = 10.0


# Raises what is wrong with a trial; what was not looked at is a note.
TrialCheck: TypeAlias = Callable[[GRPOConfig], str | None]


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


def check_transport(trial: GRPOConfig) -> None:
    """Refuses a transport that cannot be loaded or lacks something on this machine.

    Raises:
        PluginError: it is a user's and cannot be loaded.
    """
    if trial.transport == "auto":
        return
    transport, r = transport_named(trial.transport), trial.resources
    refused = transport.refuses_gpus(r.generator_gpus, r.learner_gpus, r.num_generators)
    wrong = refused or transport.missing_on_machine()
    if wrong is not None:
        raise UsageError(f"transport={trial.transport}: {wrong}")


def check_inputs(trial: GRPOConfig) -> str | None:
    """Reads what a trial will read: model, tokenizer, task files and reward function. Returns a
    note where not every prompt was looked at."""
    from grpo_trainable.actors.scorer import check_reward, reward_apart
    from grpo_trainable.engines.choice import chosen_engine
    from grpo_trainable.models.store import check_policy
    from grpo_trainable.prompts import Prompts, build_task

    try:
        shape, tokenizer = check_policy(trial.model, trial.seed)
    except ValueError as error:
        raise UsageError(f"model.path={error}") from None
    try:
        chosen_engine(trial)
        prompts = Prompts(trial, build_task(trial), tokenizer)
        if trial.task.is_scored_apart:
            check_reward(*reward_apart(trial))
        until = time.monotonic() + MAX_LENGTHS_S
        of_streams = {"eval": trial.eval.prompts, "train": prompts.train_count}
        seen = 0
        for stream, count in of_streams.items():
            most = min(count, MAX_PROMPTS)
            seen += prompts.check_lengths(stream, most, shape.context_length, until)
    except ValueError as error:
        raise UsageError(str(error)) from None
    asked = sum(of_streams.values())
    if seen == asked:
        return None
    return (
        f"note: of the {asked:,} prompts that a trial asks for, {seen:,} were compared with the "
        f"model's context of {shape.context_length:,} tokens"
    )


def check_code(trial: GRPOConfig) -> None:
    """Tries the user's own loss, advantage and engine, in a process of their own.

    Raises:
        PluginError: one of them cannot be used.
    """
    from grpo_trainable.actors.user_code import check_user_code

    check_user_code(trial)


def _transport(trial: GRPOConfig) -> Hashable:
    return trial.transport, trial.resources


def _inputs(trial: GRPOConfig) -> Hashable:
    prompts = trial.eval.prompts, trial.most_prompts, trial.pools.enabled
    return trial.engine, trial.model, trial.task, trial.rollout, trial.seed, prompts


def _code(trial: GRPOConfig) -> Hashable:
    return trial.loss.type, trial.loss.advantage, trial.rollout.group_size, trial.engine


# Each check of a trial, with what it depends on.
TRIAL_CHECKS = ((check_inputs, _inputs), (check_code, _code))


def usable_cpus() -> int:
    return len(os.sched_getaffinity(0))


def this_machine(trials: Sequence[GRPOConfig]) -> dict[str, float]:
    """CPUs of this machine, and its GPUs when a trial asks for any."""
    machine = {"CPU": float(usable_cpus()), "GPU": 0.0}
    if any("GPU" in bundle for trial in trials for bundle in trial.bundles()):
        import torch

        machine["GPU"] = float(torch.cuda.device_count())
    return machine


def check_resources(
    trials: Sequence[GRPOConfig], available: Mapping[str, float], where: str
) -> None:
    """Refuses a trial that would stay pending for ever because its placement group never fits."""
    for trial in trials:
        for kind in ("CPU", "GPU"):
            needed, there = _needed(trial, kind), available.get(kind, 0.0)
            if round(needed, 4) > there:
                keys = ("worker",) if trial.placement == "colocated" else ("generator", "learner")
                lower = " or ".join(f"resources.{key}_{kind.lower()}s" for key in keys)
                raise UsageError(
                    f"arm {trial.arm} needs {round(needed, 4):g} {kind}s, {where} has {there:g}; "
                    f"lower {lower}"
                )


def at_once(trials: Sequence[GRPOConfig], available: Mapping[str, float]) -> int:
    """How many of the largest trials fit beside each other."""
    needed = {kind: max(_needed(trial, kind) for trial in trials) for kind in ("CPU", "GPU")}
    return min(int(available.get(kind, 0.0) / need) for kind, need in needed.items() if need)


def _needed(trial: GRPOConfig, kind: str) -> float:
    return sum(bundle.get(kind, 0.0) for bundle in trial.bundles())
