"""Memory that scoring uses, measured in a separate process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import re, sys, torch
from pathlib import Path
from grpo_trainable.models import scoring
torch.set_num_threads(1)
vocab, width = 32768, 16
weight = torch.randn(vocab, width, requires_grad=True)
law = scoring._Law(1.0, (0,), None)
def peak_after(rows):
    hidden = torch.randn(rows, width, requires_grad=True)
    scored = scoring._HeadLogProbs.apply(hidden, weight, torch.ones(rows).long(), law)
    scored[0].sum().backward()
    # The peak of getrusage would include the process that started this one.
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1])
before = peak_after(8)
print(*(peak_after(int(rows)) - before for rows in sys.argv[1:]))
"""


def peak_bytes(*rows: int) -> list[int]:
    """Return the rise of a process's peak memory, in bytes, for each given number of rows.

    The rise is relative to the peak after a forward and a backward pass of the head with 8 rows.
    """
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(str, rows)],
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    return [int(word) for word in run.stdout.split()]


def test_the_memory_of_the_head_does_not_grow_with_rows_times_vocabulary() -> None:
    few, many = peak_bytes(2048, 8192)
    held = 4 * 2048 * 32768  # bytes of the probabilities of 2048 rows, which are one block
    assert few < 1.5 * held
    # 8192 rows are four blocks. Two blocks in memory together would take 256 MiB more than one, and
    # all four 768 MiB more.
    assert many < few + 0.6 * held
