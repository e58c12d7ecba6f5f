"""One experiment on a Ray cluster of machines of our own making, and what of it is left there.

The command and the head of the cluster are on one machine, which has room for nothing else. Three
others have two CPUs each. The learner leaves no room for anything else on its machine, and Ray
spreads the Trainable and two generators over the other two, of which one has room for all three:
the death of one machine leaves room for the whole trial.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

import psutil
from measure import ROOT
from survival import ROLES, Experiment, Lost, fingerprint, is_ours

sys.path.append(str(ROOT / "tests" / "cluster"))

from machines import Machine, missing
from ray_cluster import Cluster, ray_cluster

__all__ = ["SETTINGS", "Experiment", "OnCluster", "cluster_of", "missing"]

WORKERS = 3
SETTINGS = {
    "resources.spread": "spread",
    "resources.num_generators": 2,
    "resources.learner_cpus": 1.95,
    "resources.generator_cpus": 0.9,
    "rollout.unit_prompts": 2,
}
# A machine that was cut off ends what runs on it once it has missed the head for a minute.
GONE_S = 150.0
ENVIRONMENT = {
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
}


@contextmanager
def cluster_of(workers: int = WORKERS, spare: int = 0) -> Iterator[Cluster]:
    """A cluster of the command's machine and so many others, and `spare` ones that may join it."""
    with ray_cluster(1 + workers, spare=spare, head_cpus=0, **ENVIRONMENT) as cluster:
        yield cluster


class OnCluster(Experiment):
    """A trial that the command starts on the first machine of a cluster."""

    longest_s = 480.0

    def __init__(
        self,
        cluster: Cluster,
        storage: Path,
        arm: str,
        kept_in: str | None = None,
        environment: dict[str, str] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(storage, arm, kept_in, **{**SETTINGS, **settings})
        self._cluster = cluster
        self._own = settings
        self._environment = {**cluster.environment, **(environment or {})}

    def launch(self, command: Sequence[str], log: IO[bytes]) -> subprocess.Popen[Any]:
        machine = self._cluster.machines[0]
        there = [*command, "--address", self._cluster.address]
        return machine.start(there, self._environment, stdout=log)

    def uninterrupted(self) -> tuple[Any, ...]:
        return uninterrupted_on_cluster(self.arm, tuple(sorted(self._own.items())))


@cache
def uninterrupted_on_cluster(arm: str, settings: tuple[tuple[str, Any], ...]) -> tuple[Any, ...]:
    with TemporaryDirectory() as storage, cluster_of() as cluster:
        experiment = OnCluster(cluster, Path(storage), arm, **dict(settings))
        with experiment.start() as running:
            running.ends_well()
        return fingerprint(experiment)


# ---- What runs where -------------------------------------------------------------------------


def ours_on(machine: Machine, role: str | None = None) -> list[int]:
    """Our processes on a machine: of one role, or of any."""
    return [pid for pid in machine.processes() if _is_ours(pid, role)]


def _is_ours(pid: int, role: str | None) -> bool:
    try:
        return is_ours(psutil.Process(pid), role)
    except psutil.NoSuchProcess:
        return False


def machine_of(cluster: Cluster, role: str) -> Machine:
    """The machine that has an actor of this role; one with a generator has no other role."""
    for machine in cluster.machines:
        found = {name for name in ROLES if ours_on(machine, name)}
        if role in found and (role != "Generator" or found == {role}):
            return machine
    raise Lost(f"no machine of {role} was found")


def roles_on(machine: Machine) -> str:
    return "+".join(name for name in ROLES for _ in ours_on(machine, name))


def none_left_on(machines: Sequence[Machine]) -> str:
    """Waits for our processes on these machines to end. Lost when one is there still after
    `GONE_S`."""
    began = time.monotonic()
    while left := [pid for machine in machines for pid in ours_on(machine)]:
        if time.monotonic() - began > GONE_S:
            raise Lost(f"{len(left)} of our processes were left {GONE_S:g} s after the end")
        time.sleep(0.5)
    return f"ours gone after {time.monotonic() - began:.1f} s"
