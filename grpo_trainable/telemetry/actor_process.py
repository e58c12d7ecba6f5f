"""Set-up of an actor's process: memory, threads, device and clock."""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from grpo_trainable.telemetry.progress import advance
from grpo_trainable.telemetry.timers import StageClock

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for the next allocation instead of returning it to the system.

    Every microbatch allocates and frees activations of a few megabytes. Getting the memory pages
    for them from the system each time would take a fifth of a training step on a virtual machine.
    With another C library, this function does nothing.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the largest value glibc accepts
        mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
        mallopt(_M_TOP_PAD, 16 << 20)


class RoleContext:
    """The number of threads, the device and the clock that a role uses in its process.

    Roles that share a process share its clock: `idle` is the time in which none of the roles works.
    """

    def __init__(self, *, threads: int, gpus: float, clock: StageClock | None = None) -> None:
        if gpus and not torch.cuda.is_available():
            raise RuntimeError(f"GPUs were reserved ({gpus:g}), but torch sees no CUDA device")
        self.threads = threads
        self.device = torch.device("cuda" if gpus else "cpu")
        self.clock = clock or StageClock()
        if gpus:
            self.clock.synchronize = torch.cuda.synchronize

    @contextmanager
    def call(self, stage: str = "idle", since: float = math.inf) -> Iterator[float]:
        """Time one call, as `StageClock.call` does, and run it with this role's number of threads.

        Two roles that share a process may have different numbers of threads.
        """
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        advance()
        with self.clock.call(stage, since) as waited_s:
            yield waited_s
