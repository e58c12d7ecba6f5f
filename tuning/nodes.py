"""Nodes that trials run on, and checks that the nodes have room for the actors of a trial."""

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

# For each node: Ray's name for a resource -> its amount, in total or still free.
Nodes: TypeAlias = Sequence[Mapping[str, float]]
KINDS = ("CPU", "GPU")


def usable_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


def this_machine(trials: Sequence[GRPOConfig]) -> Nodes:
    """Return this machine as the only node, with its GPUs if a trial uses any."""
    machine = {"CPU": float(usable_cpus()), "GPU": 0.0}
    if any(resources.uses_gpus(trial) for trial in trials):
        import torch

        machine["GPU"] = float(torch.cuda.device_count())
    return [machine]


def total(nodes: Nodes, kind: str) -> float:
    """Return the amount of a resource that all nodes have together."""
    return sum(node.get(kind, 0.0) for node in nodes)


def room_beside(
    bundles: Iterable[Mapping[str, float]], nodes: Nodes, strategy: str = "PACK"
) -> Nodes | None:
    """Place bundles on nodes as Ray does, and return what the nodes have left.

    The rules are those of Ray 2.60 (`BundlePackSchedulingPolicy`, `BundleSpreadSchedulingPolicy`).
    The largest bundle is placed first, on the node that keeps the largest share of the bundle's
    resources free. With PACK, all other bundles that fit are placed on the same node. After that,
    the node gets no more bundles. With SPREAD, no node gets a second bundle while another node has
    room.

    Args:
        bundles: The bundles to place, each on one node.
        nodes: The resources of the nodes.
        strategy: Ray's PACK or SPREAD.

    Returns:
        The resources that the nodes have left, or None if Ray finds no place for a bundle. Ray may
        overlook a possible placement.
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
    """Return the node that would keep the largest shares of the bundle's resources free."""
    fitting = [node for node in nodes if all(_fits(bundle, node, kind) for kind in KINDS)]
    asked = [kind for kind in KINDS if bundle.get(kind)]
    return max(
        fitting, key=lambda node: sum(1 - bundle[kind] / node[kind] for kind in asked), default=None
    )


def _took(bundle: Mapping[str, float], node: dict[str, float]) -> bool:
    """Place the bundle on the node if it has room, and return True if the bundle was placed."""
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
    """Refuse a trial that would wait for ever because its placement group never fits.

    Raises:
        UsageError: The actors of a trial need more than all nodes have together, or no node has
            room for one of the actors.
    """
    for trial in trials:
        if (
            room_beside(resources.bundles(trial), nodes, resources.placement_strategy(trial))
            is None
        ):
            raise UsageError(_misfit(trial, nodes, where))


def _misfit(trial: GRPOConfig, nodes: Nodes, where: str) -> str:
    """Return a message that says why a trial finds no room, and which settings to lower."""
    keys = ("worker",) if trial.placement == "colocated" else ("generator", "learner")
    fewer = ("num_learners",) if trial.resources.num_learners > 1 else ()
    for kind in KINDS:
        needed = round(sum(bundle.get(kind, 0.0) for bundle in resources.bundles(trial)), 4)
        lower = _settings(*(f"{key}_{kind.lower()}s" for key in keys), *fewer)
        if needed > total(nodes, kind):
            return (
                f"arm {trial.arm} needs {_amount(needed, kind)}, but {where} has "
                f"{total(nodes, kind):g}; lower {lower}"
            )
    lower = _settings(*(f"{key}_cpus" for key in keys), *fewer)
    if trial.resources.spread == "one_node_learners":
        lower += (
            ", or set resources.spread=pack, because one_node_learners puts all learners on one "
            "node"
        )
    return (
        f"arm {trial.arm} has actors that need {shown(resources.bundles(trial))}, each on one "
        f"node, but the nodes of {where} ({shown(nodes)}) have no room for them; lower {lower}"
    )


def _settings(*names: str) -> str:
    return " or ".join(f"resources.{name}" for name in names)


def shown(all_resources: Iterable[Mapping[str, float]]) -> str:
    """Return bundles or nodes as text, such as `2 CPUs and 1 GPU, 2 CPUs`."""
    return ", ".join(map(_shown, all_resources))


def _shown(bundle: Mapping[str, float]) -> str:
    """Return one bundle or node as text, such as `2 CPUs and 1 GPU`."""
    amounts = {kind: bundle.get(kind, 0.0) for kind in KINDS}
    return " and ".join(
        _amount(amount, kind) for kind, amount in amounts.items() if amount or kind == "CPU"
    )


def _amount(amount: float, kind: str) -> str:
    return f"{amount:g} {kind}{'' if amount == 1 else 's'}"


def at_once(trials: Sequence[GRPOConfig], nodes: Nodes) -> int:
    """Return how many copies of the largest trial fit at the same time, at most `len(trials)`."""
    shapes = {
        (str(resources.bundles(trial)), resources.placement_strategy(trial)): trial
        for trial in trials
    }
    return min(_times(trial, nodes, len(trials)) for trial in shapes.values())


def _times(trial: GRPOConfig, nodes: Nodes, most: int) -> int:
    """Return how many copies of a trial fit, at most `most`."""
    left: Nodes | None = nodes
    for times in range(most):
        left = room_beside(resources.bundles(trial), left, resources.placement_strategy(trial))
        if left is None:
            return times
    return most


# ---- Trials that wait ----------------------------------------------------------------------------


LOOK_S = 10.0  # pause between two checks of the nodes


def nodes_alive() -> Nodes:
    """Return the resources of the nodes that are alive."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


class WaitingCallback(FailSafeCallback):
    """Callback that reports when a trial waits for room on the nodes, and when the wait is over."""

    def __init__(
        self,
        nodes: Callable[[], Nodes] = nodes_alive,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._nodes, self._clock = nodes, clock
        self._waiting: set[str] = set()  # ids of trials whose wait has been printed
        self._looked_at = -LOOK_S

    def on_step_begin(self, iteration: int, trials: list, **info: Any) -> None:
        """Compare the pending trials with the nodes that are alive, every `LOOK_S` seconds."""
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
                    f"node, but the nodes that are alive have {shown(nodes)}; the trial continues "
                    "when another node joins",
                    flush=True,
                )
