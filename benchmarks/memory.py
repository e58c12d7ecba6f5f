"""How much memory a command and all that it starts take at most."""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

PROC = Path("/proc")
EVERY_S = 2.0
LARGE_MB = 400.0  # smaller processes are not named one by one


@dataclass
class Peaks:
    """The most memory that was held, in units of 10⁶ bytes. A page that several processes share
    counts once in `total_mb`."""

    total_mb: float = 0.0  # sum over all processes, sampled every `EVERY_S`
    by_process_mb: dict[str, float] = field(default_factory=dict)  # what was resident at once

    def see(self, root: int) -> None:
        """Takes in how things are now with the process `root` and its descendants."""
        shares, resident = 0.0, defaultdict(float)
        for pid in descendants(root):
            # It may have ended since it was listed.
            with contextlib.suppress(OSError):
                shares += _kilobytes(PROC / str(pid) / "smaps_rollup", "Pss") / 1e3
                most = _kilobytes(PROC / str(pid) / "status", "VmHWM") / 1e3
                name = process_name(pid)
                resident[name] = max(resident[name], most)
        self.total_mb = max(self.total_mb, shares)
        for name, most in resident.items():
            if most >= LARGE_MB:
                self.by_process_mb[name] = max(self.by_process_mb.get(name, 0.0), most)


@contextmanager
def peaks_of(root: int) -> Iterator[Peaks]:
    """Watches a process until the block ends."""
    peaks, over = Peaks(), threading.Event()

    def watch() -> None:
        while not over.wait(EVERY_S):
            peaks.see(root)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peaks
    finally:
        over.set()
        thread.join()


def descendants(root: int) -> list[int]:
    """The process and all that it started, directly or not, as far as they still run."""
    children = defaultdict(list)
    for path in PROC.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name, in brackets, may hold anything.
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children[parent].append(int(path.parent.name))
    found, waiting = [], [root]
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        waiting += children[pid]
    return found


def process_name(pid: int) -> str:
    """`ray::Learner` of an actor whatever it does just now; else the program."""
    words = (PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    first = words[0]
    return first.partition(".")[0] if first.startswith("ray::") else Path(first).name


def _kilobytes(path: Path, key: str) -> float:
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return float(value.split()[0])
    return 0.0
