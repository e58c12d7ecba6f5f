"""Machines of a cluster that are lost, cut off or join, and links that lose packets, at random
moments."""

from __future__ import annotations

import copy
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from cluster_survival import (
    WORKERS,
    Cluster,
    OnCluster,
    cluster_of,
    machine_of,
    none_left_on,
    ours_on,
    roles_on,
)
from survival import FIRST, LAST, Fault, Lost, Outcome, judge

REPEATS = 5
ARMS = ("sync", "async_k1")
MOVABLE = ("Generator", "Learner", "DetailedGRPO")  # whose machines are cut off, in turn


def at_a_random_moment(
    strike: Callable[[Cluster], str], rng: random.Random, repeat: int, last: int = LAST
) -> Outcome:
    """A trial that a fault strikes after a random round, `last` at the latest, and that has to end
    by itself. `strike` says in a few words what it did."""
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
    """Every process of the machine ends at once; Tune and the pipeline have to go on alone."""

    def strike(cluster: Cluster) -> str:
        machine = machine_of(cluster, role)
        roles = roles_on(machine)
        machine.kill()
        return f"lost {roles}"

    return at_a_random_moment(strike, rng, repeat)


def cut_link(seconds: float | None, rng: random.Random, repeat: int) -> Outcome:
    """Nothing reaches a machine or leaves it, for so long or for good; it goes on by itself."""

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
    """From the first rounds on, to the end."""

    def strike(cluster: Cluster) -> str:
        for machine in cluster.machines:
            machine.lose(LOSS_PERCENT)
        return "every machine"

    return at_a_random_moment(strike, rng, repeat, last=2)


def kill_head(rng: random.Random, repeat: int) -> Outcome:
    """The command ends with its machine, and with it the cluster: the others end by themselves.
    Then a cluster is started again on the same machines, and the command with --resume."""
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
                machine.kill()  # Ray's own processes: what `ray stop` does
            cluster.begin()
            cluster.join(*others)
            struck = time.time()
            experiment.resume()
            none_left_on(cluster.machines)
        return judge(experiment, f"{experiment.arm}, round {before}, {left}", before, struck)


LARGER = {"rollout.prompts": 16, "rollout.unit_prompts": 8}  # rounds longer than the start of Ray


def join_later(rng: random.Random, repeat: int) -> Outcome:
    """A machine joins while the first of two trials runs. The second one has to use it."""
    with tempfile.TemporaryDirectory() as storage:
        with cluster_of(WORKERS - 1, spare=1) as cluster:
            joins = cluster.machines[-1]
            first = OnCluster(cluster, Path(storage), "async_k1", **LARGER)
            first.trials, first.command = "async_k1-0-*", [*first.command, "--num-samples", "2"]
            second = copy.copy(first)
            second.trials = "async_k1-1-*"
            with first.start() as running:
                running.wait_for_rounds(rng.randint(1, FIRST))
                before, struck = len(first.rows()), time.time()
                cluster.join(joins)
                joined = len(first.rows())
                if second.rows():
                    raise Lost("the first trial had ended before the machine had joined")
                running.wait_for(lambda: second.rows() and ours_on(joins))
                roles = roles_on(joins)
                running.ends_well()
            left = none_left_on(cluster.machines)
        happened = f"after rounds {before}-{joined} of the first trial, then had {roles}, {left}"
        judge(second, happened, 0, struck)
        return judge(first, happened, before, struck)


def killed(role: str):
    return lambda rng, repeat: kill_machine(role, rng, repeat)


FAULTS = (
    Fault(name="machine of a generator lost", repeats=REPEATS, strike=killed("Generator")),
    Fault(name="machine of the learner lost", repeats=REPEATS, strike=killed("Learner")),
    Fault(name="machine of the Trainable lost", repeats=REPEATS, strike=killed("DetailedGRPO")),
    Fault(name="machine of the command lost, then --resume", repeats=REPEATS, strike=kill_head),
    Fault(
        name="link cut for 5 s",
        repeats=REPEATS,
        strike=lambda rng, repeat: cut_link(5.0, rng, repeat),
    ),
    Fault(
        name="link cut for good",
        repeats=REPEATS,
        strike=lambda rng, repeat: cut_link(None, rng, repeat),
    ),
    Fault(name=f"{LOSS_PERCENT:g} % of packets lost", repeats=REPEATS, strike=lose_packets),
    Fault(name="machine joins, next trial uses it", repeats=REPEATS, strike=join_later),
)
