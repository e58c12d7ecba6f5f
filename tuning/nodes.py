"""The nodes that trials run on, and whether the actors of a trial find room on them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import ray

from callbacks.fail_safe import FailSafeCallback
from callbacks.trial_files import label
from grpo_trainable.command_line import UsageError
from grpo_trainable.config import GRPOConfig, resources

# What each node has, or has left: CPUs and GPUs by Ray's names.
Nodes: TypeAlias = Sequence[Mapping[str, float]]
KINDS = ("CPU", "GPU")


def usable_cpus() -> int:
    return len(os.sched_getaffinity(0))


def this_machine(trials: Sequence[GRPOConfig]) -> Nodes:
    """This machine as the only node, with its GPUs when a trial asks for any."""
    machine = {"CPU": float(usable_cpus()), "GPU": 0.0}
    if any(resources.uses_gpus(trial) for trial in trials):
        import torch

        machine["GPU"] = float(torch.cuda.device_count())
    return [machine]


def total(nodes: Nodes, kind: str) -> float:
    """How much of a kind all nodes have together."""
    return sum(node.get(kind, 0.0) for node in nodes)


def room_beside(
    bundles: Iterable[Mapping[str, float]], nodes: Nodes, strategy: str = "PACK"
) -> Nodes | None:
    """What the nodes have left when each bundle has a place on one of them; None where Ray finds
    none for a bundle, although there might be one.

    `strategy`: Ray's PACK or SPREAD, followed as Ray 2.60 does (`BundlePackSchedulingPolicy`,
    `BundleSpreadSchedulingPolicy`). The largest bundle comes first and takes the node that has the
    largest share of what it asks for free then. With PACK all others that fit come to the same
    node, which is then done with; with SPREAD no node takes a second one while another has room.
    """
    left = [{kind: node.get(kind, 0.0) for kind in KINDS} for node in nodes]
    waiting = sorted(bundles, key=_size, reverse=True)
    candidates, taken = list(left), []
    while waiting:
        bundle, *waiting = waiting
        node = _roomiest(bundle, candidates) or _roomiest(bundle, taken)
        if node is None:
            return None
        _take(bundle, node)
        if strategy == "SPREAD":
            taken = [*taken, *(other for other in candidates if other is node)]
        else:
            waiting = [other for other in waiting if not _took(other, node)]
        candidates = [other for other in candidates if other is not node]
    return left


def _roomiest(
    bundle: Mapping[str, float], nodes: Sequence[dict[str, float]]
) -> dict[str, float] | None:
    """The node on which the bundle leaves the largest shares free of what it asks for."""
    fitting = [node for node in nodes if all(_fits(bundle, node, kind) for kind in KINDS)]
    asked = [kind for kind in KINDS if bundle.get(kind)]
    return max(
        fitting, key=lambda node: sum(1 - bundle[kind] / node[kind] for kind in asked), default=None
    )


def _took(bundle: Mapping[str, float], node: dict[str, float]) -> bool:
    """Whether the node had room for the bundle, which it has taken then."""
    fits = all(_fits(bundle, node, kind) for kind in KINDS)
    if fits:
        _take(bundle, node)
    return fits


def _take(bundle: Mapping[str, float], node: dict[str, float]) -> None:
    for kind in KINDS:
        node[kind] = round(node[kind] - bundle.get(kind, 0.0), 4)


def _size(bundle: Mapping[str, float]) -> tuple[float, float]:
    return bundle.get("GPU", 0.0), bundle.get("CPU", 0.0)


def _fits(bundle: Mapping[str, float], node: Mapping[str, float], kind: str) -> bool:
    return round(bundle.get(kind, 0.0), 4) <= node[kind]


def check_resources(trials: Iterable[GRPOConfig], nodes: Nodes, where: str) -> None:
    """Refuses a trial that would stay pending for ever because its placement group never fits.

    Raises:
        UsageError: its actors need more than there is, or find no room on any single node.
    """
    for trial in trials:
        if (
            room_beside(resources.bundles(trial), nodes, resources.placement_strategy(trial))
            is None
        ):
            raise UsageError(_misfit(trial, nodes, where))


def _misfit(trial: GRPOConfig, nodes: Nodes, where: str) -> str:
    """Why a trial finds no room, and what to lower."""
    keys = ("worker",) if trial.placement == "colocated" else ("generator", "learner")
    fewer = ("num_learners",) if trial.resources.num_learners > 1 else ()
    for kind in KINDS:
        needed = round(sum(bundle.get(kind, 0.0) for bundle in resources.bundles(trial)), 4)
        lower = _settings(*(f"{key}_{kind.lower()}s" for key in keys), *fewer)
        if needed > total(nodes, kind):
            return (
                f"arm {trial.arm} needs {needed:g} {kind}s, {where} has {total(nodes, kind):g}; "
                f"lower {lower}"
            )
    lower = _settings(*(f"{key}_cpus" for key in keys), *fewer)
    if trial.resources.spread == "one_node_learners":
        lower += ", or set resources.spread=pack: all learners share a node"
    return (
        f"arm {trial.arm} has actors of {shown(resources.bundles(trial))}, each on one node, for "
        f"which the nodes of {where} have no room: {shown(nodes)}; lower {lower}"
    )


def _settings(*names: str) -> str:
    return " or ".join(f"resources.{name}" for name in names)


def shown(all_resources: Iterable[Mapping[str, float]]) -> str:
    """`2 CPUs and 1 GPU, 2 CPUs`, of bundles or nodes."""
    return ", ".join(map(_shown, all_resources))


def _shown(bundle: Mapping[str, float]) -> str:
    """`2 CPUs`, `2 CPUs and 1 GPU`."""
    amounts = {kind: bundle.get(kind, 0.0) for kind in KINDS}
    return " and ".join(
        f"{amount:g} {kind}{'' if amount == 1 else 's'}"
        for kind, amount in amounts.items()
        if amount or kind == "CPU"
    )


def at_once(trials: Sequence[GRPOConfig], nodes: Nodes) -> int:
    """How many of the largest trials fit beside each other, at most as many as there are."""
    shapes = {
        (str(resources.bundles(trial)), resources.placement_strategy(trial)): trial
        for trial in trials
    }
    return min(_times(trial, nodes, len(trials)) for trial in shapes.values())


def _times(trial: GRPOConfig, nodes: Nodes, most: int) -> int:
    """How often a trial fits, up to `most` times."""
    left: Nodes | None = nodes
    for times in range(most):
        left = room_beside(resources.bundles(trial), left, resources.placement_strategy(trial))
        if left is None:
            return times
    return most


# ---- Trials that wait ----------------------------------------------------------------------------


LOOK_S = 10.0  # pause between two looks at the nodes


def nodes_alive() -> Nodes:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


class WaitingCallback(FailSafeCallback):
    """Prints a line for each trial that the nodes that are alive have no room for, and another once
    they have."""

    def __init__(
        self,
        nodes: Callable[[], Nodes] = nodes_alive,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._nodes, self._clock = nodes, clock
        self._waiting: set[str] = set()  # trials that were told of, by id
        self._looked_at = -LOOK_S

    def on_step_begin(self, iteration: int, trials: list, **info: Any) -> None:
        pending = [trial for trial in trials if trial.status == "PENDING"]
        if not (pending or self._waiting) or self._clock() < self._looked_at + LOOK_S:
            return
        self._looked_at = self._clock()
        nodes = self._nodes()
        for trial in trials:
            wanted = trial.placement_group_factory
            bundles = wanted.bundles
            if trial not in pending or room_beside(bundles, nodes, wanted.strategy) is not None:
                if trial.trial_id in self._waiting:
                    print(f"{label(trial)}: there is room again", flush=True)
                self._waiting.discard(trial.trial_id)
            elif trial.trial_id not in self._waiting:
                self._waiting.add(trial.trial_id)
                print(
                    f"{label(trial)} waits for room: its actors need {shown(bundles)}, each on one "
                    f"node, and the nodes that are alive have {shown(nodes)}; it goes on when "
                    "another node joins",
                    flush=True,
                )
