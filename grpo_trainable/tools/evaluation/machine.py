"""What an evaluation samples with: device and threads."""

from __future__ import annotations

import os

import torch

from grpo_trainable.config import resources, threads
from grpo_trainable.tools.evaluation.checkpoint import TrainedPolicy

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
