"""A Ray cluster of several machines on this one, and our command on it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from machines import Machine

ROOT = Path(__file__).parents[2]
PORT = 6379
CPUS = 2  # of each machine, as far as Ray knows
OBJECT_STORE = 300_000_000  # bytes


@dataclass(frozen=True)
class Cluster:
    machines: list[Machine]
    disk: Path  # of which each machine has its own
    address: str
    environment: Mapping[str, str]

    def tune(self, *arguments: str, **environment: str) -> tuple[int, str]:
        """The exit status of launch/tune.py on the first machine, and what it printed."""
        return self.machines[0].run(self.command(*arguments), {**self.environment, **environment})

    def command(self, *arguments: str) -> list[str]:
        tune = [sys.executable, str(ROOT / "launch" / "tune.py"), "--address", self.address]
        return [*tune, *arguments]


def ray_start(machine: Machine, disk: str, options: Sequence[str]) -> list[str]:
    return [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", *options),
        *(f"--node-ip-address={machine.address}", f"--num-cpus={CPUS}"),
        *(f"--object-store-memory={OBJECT_STORE}", f"--temp-dir={disk}/ray"),
    ]
