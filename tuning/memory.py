"""Compare the memory that trials need with the machine's memory, before anything starts."""

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

# Files with the memory limit of a container, in both versions of cgroups.
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


class DoesNotFit(Missing):
    """A trial needs more memory than is available."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """Memory that a trial needs.

    `estimate` is None if the sizes of the policy or of the teacher are not known.
    """

    trial: GRPOConfig
    estimate: Estimate | None


def unlike(trials: Sequence[GRPOConfig]) -> list[GRPOConfig]:
    """Drop trials that differ from others only in seed and arm, and so need the same memory."""
    return list({replace(trial, seed=0, arm="custom"): trial for trial in trials}.values())


def need_of(trial: GRPOConfig) -> Need:
    """Estimate the memory that a trial needs.

    Raises:
        UsageError: The policy, the teacher or a reward model cannot be used. The message is one
            line.
    """
    from tuning.memory_estimate import estimate

    policy = _dimensions("model.path", trial.model)
    teacher = _dimensions("loss.teacher", trial.teacher)
    if policy is None or (teacher is None and trial.teacher is not None):
        return Need(trial=trial, estimate=None)
    try:
        return Need(trial=trial, estimate=estimate(trial, policy, teacher))
    except ValueError as error:
        raise UsageError(str(error)) from None


def _dimensions(key: str, model: ModelSettings | None) -> Dimensions | None:
    from tuning.memory_estimate import policy_dimensions

    try:
        return None if model is None else policy_dimensions(model)
    except ValueError as error:
        raise UsageError(f"{key}={error}") from None


def compare(needs: Sequence[Need], together: int, available: int, where: str) -> str:
    """Return one line with the memory that the largest trial needs, in total and by part.

    Args:
        needs: The trials with their estimates.
        together: Number of trials that run at the same time.
        available: Number of bytes of main memory where the trials run.
        where: Name of the machine or cluster that the trials run on.

    Raises:
        DoesNotFit: The trials need more than `available`. The message is one line.
    """
    from tuning.memory_estimate import size

    known = [(need.trial, need.estimate) for need in needs if need.estimate is not None]
    if len(known) < len(needs):
        return "memory of a trial: not estimated, because the sizes of a model are not known"
    trial, largest = max(known, key=lambda item: item[1].host_bytes)
    takes = largest.host_bytes
    if takes * together > available:
        each = f" per trial, and {together} trials run at the same time" if together > 1 else ""
        raise DoesNotFit(
            f"arm {trial.arm} needs about {size(takes)} of memory ({largest}){each}, but {where} "
            f"has {size(available)}; docs/memory.md says how to reduce each part"
        )
    return f"memory of a trial: about {size(takes)} of {size(available)} ({largest})"


def check_gpu_memory(needs: Sequence[Need]) -> None:
    """Compare the GPU memory that trials need with the memory of the GPUs that they reserve.

    Raises:
        DoesNotFit: A trial needs more than its GPUs have. The message is one line.
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
                f"arm {need.trial.arm} needs about {size(takes)} of GPU memory "
                f"({need.estimate}), but the GPUs that it reserves ({reserved:g}) have "
                f"{size(there)}; docs/memory.md says how to reduce each part"
            )


def machine_bytes() -> int:
    """Return the bytes of main memory of this machine, or of its container if that has less."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in map(Path, LIMITS):
        text = path.read_text().strip() if path.is_file() else ""
        if text.isdecimal():
            found.append(int(text))
    return min(found)
