"""Nodes that trials run on, and checks that the nodes have room for the actors of a trial."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from grpo_trainable.command_line import UsageError
from grpo_trainable.config import GRPOConfig, resources
from grpo_trainable.config.placement import KINDS, Nodes, amount_of, room_beside, shown


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
                f"arm {trial.arm} needs {amount_of(needed, kind)}, but {where} has "
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
