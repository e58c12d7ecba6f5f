"""A Ray cluster of several simulated machines, on which launch/tune.py can run."""

from __future__ import annotations

import contextlib
import secrets
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from machines import Machine, machines

ROOT = Path(__file__).parents[2]
PORT = 6379
CPUS = 2  # per machine, as passed to `ray start`
OBJECT_STORE = 300_000_000  # bytes


@dataclass(frozen=True)
class Cluster:
    machines: list[Machine]  # the first machine runs the head of the cluster
    disk: Path  # each machine has a different disk at this path
    environment: Mapping[str, str]
    head_cpus: int = CPUS

    @property
    def address(self) -> str:
        return f"{self.machines[0].address}:{PORT}"

    def tune(self, *arguments: str, **environment: str) -> tuple[int, str]:
        """Run launch/tune.py on the first machine; return its exit status and output."""
        return self.machines[0].run(self.command(*arguments), {**self.environment, **environment})

    def command(self, *arguments: str) -> list[str]:
        tune = [sys.executable, str(ROOT / "launch" / "tune.py"), "--address", self.address]
        return [*tune, *arguments]

    def begin(self) -> None:
        """Start Ray on the first machine."""
        options = ("--head", f"--port={PORT}", "--include-dashboard=false")
        self._ray([self.machines[0]], options, self.head_cpus)

    def join(self, *machines: Machine) -> None:
        """Start Ray on further machines, all at once."""
        self._ray(machines, [f"--address={self.address}"], CPUS)

    def _ray(self, machines: Sequence[Machine], options: Sequence[str], cpus: int) -> None:
        starting = [
            machine.start(ray_start(machine, str(self.disk), options, cpus), self.environment)
            for machine in machines
        ]
        for process in starting:
            printed, _ = process.communicate()
            assert process.returncode == 0, printed


@contextlib.contextmanager
def ray_cluster(
    count: int, *, spare: int = 0, head_cpus: int = CPUS, **environment: str
) -> Iterator[Cluster]:
    """Yield a cluster of `count` machines. `spare` more machines exist, but have not joined."""
    variables = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        # At Ray's default niceness of 15, trials would give way to all other processes here.
        "RAY_worker_niceness": "0",
        # By default Ray starts a process for each CPU, whether or not it is used.
        "RAY_prestart_worker_first_driver": "0",
        **environment,
    }
    # Ray's sockets need a short path.
    with (
        tempfile.TemporaryDirectory(prefix="disk-") as disk,
        machines(count + spare, Path(disk)) as made,
    ):
        cluster = Cluster(made, Path(disk), variables, head_cpus)
        cluster.begin()
        cluster.join(*made[1:count])
        yield cluster


def ray_start(machine: Machine, disk: str, options: Sequence[str], cpus: int = CPUS) -> list[str]:
    return [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", *options),
        *(f"--node-ip-address={machine.address}", f"--num-cpus={cpus}"),
        *(f"--object-store-memory={OBJECT_STORE}", f"--temp-dir={disk}/ray"),
    ]
