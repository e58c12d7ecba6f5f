"""Faults of a cluster: machines that are lost or cut off, and links that lose packets.

The command and the head of the cluster are on one machine, which has no room for actors. Three
other machines have two CPUs each. The learner fills one of these machines. Ray spreads the
Trainable and two generators over the other two. Each of those two has room for the Trainable and
both generators, so the whole trial still fits into the cluster after one machine has died.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import IO, Any

import psutil
from measure import ROOT
from survival import (
    FIRST,
    LAST,
    ROLES,
    Experiment,
    Fault,
    Lost,
    Outcome,
    fingerprint,
    is_ours,
    judge,
)

sys.path.append(str(ROOT / "tests" / "cluster"))

from machines import Machine, missing
from ray_cluster import Cluster, ray_cluster

__all__ = ["FAULTS", "SPREAD", "missing"]

WORKERS = 3
SPREAD = {
    "resources.spread": "spread",
    "resources.num_generators": 2,
    "resources.learner_cpus": 1.95,
    "resources.generator_cpus": 0.9,
    "rollout.unit_prompts": 2,
}
# If a machine is cut off, its processes end after a minute without contact with the head.
GONE_S = 150.0
ENVIRONMENT = {
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
}


@contextmanager
def cluster_of(workers: int = WORKERS, spare: int = 0) -> Iterator[Cluster]:
    """Start a cluster that consists of the command's machine and `workers` others, and yield it.

    Args:
        workers: number of other machines in the cluster.
        spare: number of further machines that may join.
    """
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
        **settings: Any,
    ) -> None:
        super().__init__(storage, arm, **{**SPREAD, **settings})
        self._cluster = cluster
        self._own = settings

    def launch(self, command: Sequence[str], log: IO[bytes]) -> subprocess.Popen[Any]:
        machine = self._cluster.machines[0]
        there = [*command, "--address", self._cluster.address]
        return machine.start(there, self._cluster.environment, stdout=log)

    def uninterrupted(self) -> tuple[Any, ...]:
        return uninterrupted_on_cluster(self.arm, tuple(sorted(self._own.items())))


@cache
def uninterrupted_on_cluster(arm: str, settings: tuple[tuple[str, Any], ...]) -> tuple[Any, ...]:
    with tempfile.TemporaryDirectory() as storage, cluster_of() as cluster:
        experiment = OnCluster(cluster, Path(storage), arm, **dict(settings))
        with experiment.start() as running:
            running.ends_well()
        return fingerprint(experiment)


# ---- Processes of a machine ------------------------------------------------------------------


def ours_on(machine: Machine, role: str | None = None) -> list[int]:
    """Return our processes on a machine, either those of `role` or all of them."""
    return [pid for pid in machine.processes() if _is_ours(pid, role)]


def _is_ours(pid: int, role: str | None) -> bool:
    try:
        return is_ours(psutil.Process(pid), role)
    except psutil.NoSuchProcess:
        return False


def machine_of(cluster: Cluster, role: str) -> Machine:
    """Return a machine with an actor of this role. A generator's machine has no other role."""
    for machine in cluster.machines:
        found = {name for name in ROLES if ours_on(machine, name)}
        if role in found and (role != "Generator" or found == {role}):
            return machine
    raise Lost(f"no machine of {role} was found")


def roles_on(machine: Machine) -> str:
    return "+".join(name for name in ROLES for _ in ours_on(machine, name))


def none_left_on(machines: Sequence[Machine]) -> str:
    """Wait until our processes on these machines have ended.

    Raises:
        Lost: A process still runs after `GONE_S`.
    """
    began = time.monotonic()
    while left := [pid for machine in machines for pid in ours_on(machine)]:
        if time.monotonic() - began > GONE_S:
            raise Lost(f"{len(left)} of our processes still ran {GONE_S:g} s after the end")
        time.sleep(0.5)
    return f"our processes ended after {time.monotonic() - began:.1f} s"


# ---- Faults ------------------------------------------------------------------------------------

REPEATS = 5
ARMS = ("sync", "async_k1")
MOVABLE = ("Generator", "Learner", "DetailedGRPO")  # the machine of each is cut off in turn


def at_a_random_moment(
    strike: Callable[[Cluster], str], rng: random.Random, repeat: int, last: int = LAST
) -> Outcome:
    """Strike a running trial after a random round. The trial must then finish without help.

    Args:
        strike: causes the fault, and returns a few words about it.
        rng: source of the random draws.
        repeat: number of the repeat.
        last: the last round after which the fault may strike.
    """
    with tempfile.TemporaryDirectory() as storage:
        with cluster_of() as cluster:
            experiment = OnCluster(cluster, Path(storage), ARMS[repeat % len(ARMS)])
            with experiment.start() as running:
                running.wait_for_rounds(rng.randint(min(FIRST, last), last))
                time.sleep(rng.random() * 0.3)
                before, struck = len(experiment.rows()), time.time()
                done = strike(cluster)
                running.ends_well()
            left = none_left_on(cluster.machines)
        happened = f"{experiment.arm}, round {before}, {done}, {left}"
        return judge(experiment, happened, before, struck)


def kill_machine(role: str, rng: random.Random, repeat: int) -> Outcome:
    """Kill all processes of a machine. Tune and the pipeline must continue without help."""

    def strike(cluster: Cluster) -> str:
        machine = machine_of(cluster, role)
        roles = roles_on(machine)
        machine.kill()
        return f"lost {roles}"

    return at_a_random_moment(strike, rng, repeat)


def cut_link(seconds: float | None, rng: random.Random, repeat: int) -> Outcome:
    """Cut off a machine for `seconds` (None: for good). The machine keeps running."""

    def strike(cluster: Cluster) -> str:
        machine = machine_of(cluster, MOVABLE[repeat % len(MOVABLE)])
        machine.cut()
        if seconds is not None:
            time.sleep(seconds)
            machine.connect()
        return f"cut off {roles_on(machine)}"

    return at_a_random_moment(strike, rng, repeat)


LOSS_PERCENT = 2.0


def lose_packets(rng: random.Random, repeat: int) -> Outcome:
    """Make every machine lose packets, from the first rounds to the end."""

    def strike(cluster: Cluster) -> str:
        for machine in cluster.machines:
            machine.lose(LOSS_PERCENT)
        return "every machine"

    return at_a_random_moment(strike, rng, repeat, last=2)


def kill_head(rng: random.Random, repeat: int) -> Outcome:
    """Kill the machine that runs both the command and the cluster's head.

    The actors on the other machines must end without help. Then start a new cluster on the same
    machines, and resume.
    """
    with tempfile.TemporaryDirectory() as storage:
        with cluster_of() as cluster:
            head, *others = cluster.machines
            experiment = OnCluster(cluster, Path(storage), ARMS[repeat % len(ARMS)])
            with experiment.start() as running:
                running.wait_for_rounds(rng.randint(FIRST, LAST))
                time.sleep(rng.random() * 0.3)
                before = len(experiment.rows())
                head.kill()
                running.output()
                left = none_left_on(others)
            for machine in others:
                machine.kill()  # ends Ray's own processes too, as `ray stop` does
            cluster.begin()
            cluster.join(*others)
            struck = time.time()
            experiment.resume()
            none_left_on(cluster.machines)
        return judge(experiment, f"{experiment.arm}, round {before}, {left}", before, struck)


FAULTS = (
    Fault("machine of a generator lost", REPEATS, partial(kill_machine, "Generator")),
    Fault("machine of the learner lost", REPEATS, partial(kill_machine, "Learner")),
    Fault("machine of the Trainable lost", REPEATS, partial(kill_machine, "DetailedGRPO")),
    Fault("machine of the command lost, then --resume", REPEATS, kill_head),
    Fault("link cut for 5 s", REPEATS, partial(cut_link, 5.0)),
    Fault("link cut for good", REPEATS, partial(cut_link, None)),
    Fault(f"{LOSS_PERCENT:g} % of packets lost", REPEATS, lose_packets),
)
