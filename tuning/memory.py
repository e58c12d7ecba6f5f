"""The memory that trials take, compared with that of this machine before anything starts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_trainable.command_line import UsageError
from grpo_trainable.config import GRPOConfig, ModelSettings, resources
from tuning.checks import Missing

if TYPE_CHECKING:
    from tuning.memory_estimate import Estimate
    from tuning.model_dimensions import Dimensions

# The limits of a container, of both versions of cgroups.
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


class DoesNotFit(Missing):
    """A trial takes more memory than there is."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """What a trial takes; no `estimate` where the model names its sizes otherwise."""

    trial: GRPOConfig
    estimate: Estimate | None


def unlike(trials: Sequence[GRPOConfig]) -> list[GRPOConfig]:
    """A trial for each set of settings: seeds and labels take no memory."""
    return list({replace(trial, seed=0, arm="custom"): trial for trial in trials}.values())


def need_of(trial: GRPOConfig) -> Need:
    """
    Raises:
        UsageError: the policy cannot be used, in one line.
    """
    from tuning.memory_estimate import estimate

    policy = _dimensions("model.path", trial.model)
    teacher = _dimensions("loss.teacher", trial.teacher)
    if policy is None or (teacher is None and trial.teacher is not None):
        return Need(trial=trial, estimate=None)
    return Need(trial=trial, estimate=estimate(trial, policy, teacher))


def _dimensions(key: str, model: ModelSettings | None) -> Dimensions | None:
    from tuning.memory_estimate import policy_dimensions

    try:
        return None if model is None else policy_dimensions(model)
    except ValueError as error:
        raise UsageError(f"{key}={error}") from None


def compare(needs: Sequence[Need], together: int, available: int, where: str) -> str:
    """What the largest trial takes, with its parts, in one line.

    `together`: trials at a time. `available`: bytes of main memory `where` the trials run.

    Raises:
        DoesNotFit: they take more than that, in one line.
    """
    from tuning.memory_estimate import size

    known = [(need.trial, need.estimate) for need in needs if need.estimate is not None]
    if len(known) < len(needs):
        return "memory of a trial: not estimated, the sizes of its policy are not known"
    trial, largest = max(known, key=lambda item: item[1].host_bytes)
    takes = largest.host_bytes
    if takes * together > available:
        each = f" ({together} of them at a time)" if together > 1 else ""
        raise DoesNotFit(
            f"arm {trial.arm} takes about {size(takes)} of memory{each}, {where} has "
            f"{size(available)}: {largest}; docs/memory.md says what makes each smaller"
        )
    return f"memory of a trial: about {size(takes)} of {size(available)} ({largest})"


def check_gpu_memory(needs: Sequence[Need]) -> None:
    """Compares what trials hold on the GPUs of this machine with the part of them they reserve.

    Raises:
        DoesNotFit: they hold more, in one line.
    """
    from tuning.memory_estimate import size

    for need in needs:
        if need.estimate is None or not need.estimate.gpu_bytes:
            continue
        import torch

        gpus = range(torch.cuda.device_count())
        smallest = min(torch.cuda.get_device_properties(gpu).total_memory for gpu in gpus)
        reserved = sum(bundle.get("GPU", 0.0) for bundle in resources.bundles(need.trial))
        takes, there = need.estimate.gpu_bytes, int(smallest * reserved)
        if takes > there:
            raise DoesNotFit(
                f"arm {need.trial.arm} takes about {size(takes)} of GPU memory and reserves "
                f"{reserved:g} GPUs with {size(there)}: {need.estimate}; docs/memory.md says what "
                "makes each smaller"
            )


def machine_bytes() -> int:
    """Main memory of this machine, or of the container that this runs in."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in map(Path, LIMITS):
        text = path.read_text().strip() if path.is_file() else ""
        if text.isdecimal():
            found.append(int(text))
    return min(found)
