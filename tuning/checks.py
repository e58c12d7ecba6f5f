"""What the trials of an experiment need, compared with what is here, before anything starts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from grpo_trainable.command_line import UsageError
from grpo_trainable.config import GRPOConfig, shown
from grpo_trainable.engines import ENGINES
from grpo_trainable.plugins import PluginError, load
from grpo_trainable.transports import transport_named
from tuning.mutations import pbt_bounds

MAX_PROMPTS = 4096  # of a trial's stream whose lengths are looked at


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


def check_transports(trials: Sequence[GRPOConfig]) -> None:
    """Refuses transports that cannot be loaded or lack something on this machine."""
    for trial in trials:
        if trial.transport == "auto":
            continue
        r = trial.resources
        try:
            transport = transport_named(trial.transport)
        except PluginError as error:
            raise UsageError(str(error)) from None
        refused = transport.refuses_gpus(r.generator_gpus, r.learner_gpus, r.num_generators)
        wrong = refused or transport.missing_on_machine()
        if wrong is not None:
            raise UsageError(f"transport={trial.transport}: {wrong}")


def check_engines(trials: Sequence[GRPOConfig]) -> None:
    """Refuses engines of the user's that cannot be loaded."""
    for engine in {trial.engine for trial in trials} - ENGINES.keys():
        try:
            load("engine", engine)
        except PluginError as error:
            raise UsageError(str(error)) from None


def check_inputs(trials: Sequence[GRPOConfig]) -> None:
    """Reads what each trial will read: model, tokenizer, task files and reward function."""
    seen = set()
    for trial in trials:
        prompts = trial.rounds * trial.prompts_per_round
        inputs = (trial.model, trial.task, trial.rollout, trial.eval, trial.seed, prompts)
        if inputs not in seen:
            _check_inputs(trial)
        seen.add(inputs)


def check_functions(trials: Sequence[GRPOConfig]) -> None:
    """Tries the losses and advantages of the user's own that the trials will train by."""
    from grpo_trainable.actors.user_functions import check_user_functions

    functions = {
        (trial.loss.type, trial.loss.advantage, trial.rollout.group_size): trial for trial in trials
    }
    for trial in functions.values():
        try:
            check_user_functions(trial)
        except PluginError as error:
            raise UsageError(str(error)) from None


def _check_inputs(trial: GRPOConfig) -> None:
    from grpo_trainable.actors.scorer import check_reward, reward_apart
    from grpo_trainable.models.store import build_policy
    from grpo_trainable.prompts import Prompts, build_task

    try:
        model, tokenizer = build_policy(trial.model.preset, trial.model.path, trial.seed)
    except ValueError as error:
        raise UsageError(f"model.path={error}") from None
    try:
        prompts = Prompts(trial, build_task(trial), tokenizer)
        if trial.task.is_scored_apart:
            check_reward(*reward_apart(trial))
    except ValueError as error:
        raise UsageError(str(error)) from None
    trained = trial.rounds * trial.prompts_per_round
    asked = {"train": min(trained, MAX_PROMPTS), "eval": trial.eval.prompts}
    for stream, count in asked.items():
        for index in range(count):
            length = len(prompts.request(stream, index).prompt_ids)
            _check_length(trial, length, prompts.text(stream, index), model.config.context_length)


def _check_length(trial: GRPOConfig, prompt_tokens: int, prompt: str, context: int) -> None:
    if prompt_tokens + trial.rollout.max_new_tokens > context:
        raise UsageError(
            f"rollout.max_new_tokens={trial.rollout.max_new_tokens}: the model's context "
            f"is {context} tokens and the prompt {shown(prompt)} "
            f"takes {prompt_tokens}; valid: at most {context - prompt_tokens}"
        )


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
