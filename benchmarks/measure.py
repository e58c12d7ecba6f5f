"""What the benchmarks share: fresh processes, the machine's peaks, spread, provenance.

The part of a benchmark that computes runs in a process of its own for each number of threads, so
that nothing a thread pool or an allocator has kept from one measurement reaches the next.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
THREADS = (1, 2)
_PEAK_SIZE = 2048  # of the square matrices whose product is the peak
_COPY_BYTES = 256 << 20


# ---- In the process that computes ------------------------------------------------------------


def seconds_of(work: Callable[[], object], *, repeats: int, warm_up: int) -> list[float]:
    """Seconds of each of `repeats` calls, after `warm_up` calls that are not counted."""
    taken = []
    for call in range(warm_up + repeats):
        start = time.perf_counter()
        work()
        if call >= warm_up:
            taken.append(time.perf_counter() - start)
    return taken


def machine_peaks() -> dict[str, float]:
    """GFLOP/s of the best of five 2048³ float32 products, GB/s of the best of five large copies.

    A copy's bytes count once, as they do in the copy benchmarks of others; they are read and
    written.
    """
    import torch

    left, right = (torch.randn(_PEAK_SIZE, _PEAK_SIZE) for _ in range(2))
    product = torch.empty_like(left)
    matmul_s = min(
        seconds_of(lambda: torch.mm(left, right, out=product), repeats=5, warm_up=1)
    )
    source = torch.ones(_COPY_BYTES // 4)
    target = torch.empty_like(source)
    copy_s = min(seconds_of(lambda: target.copy_(source), repeats=5, warm_up=1))
    return {
        "matmul_gflop_per_s": 2 * _PEAK_SIZE**3 / matmul_s / 1e9,
        "copy_gb_per_s": _COPY_BYTES / copy_s / 1e9,
    }
