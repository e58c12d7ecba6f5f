"""Place a trial's bundles on nodes by the same rules as Ray, to see whether they fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

# For each node: Ray's name for a resource -> the total or the free amount of that resource.
Nodes: TypeAlias = Sequence[Mapping[str, float]]
KINDS = ("CPU", "GPU")


def room_beside(
    bundles: Iterable[Mapping[str, float]], nodes: Nodes, strategy: str = "PACK"
) -> Nodes | None:
    """Place bundles on nodes as Ray does, and return the resources that the nodes have left.

    The rules come from Ray 2.60 (`BundlePackSchedulingPolicy`, `BundleSpreadSchedulingPolicy`). The
    largest bundle is placed first, on the node that keeps the largest share of the bundle's
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


def shown(all_resources: Iterable[Mapping[str, float]]) -> str:
    """Return bundles or nodes as text, such as `2 CPUs and 1 GPU, 2 CPUs`."""
    return ", ".join(map(_shown, all_resources))


def _shown(bundle: Mapping[str, float]) -> str:
    """Return one bundle or node as text, such as `2 CPUs and 1 GPU`."""
    amounts = {kind: bundle.get(kind, 0.0) for kind in KINDS}
    return " and ".join(
        amount_of(amount, kind) for kind, amount in amounts.items() if amount or kind == "CPU"
    )


def amount_of(amount: float, kind: str) -> str:
    """Return an amount of a resource as text, such as `2 CPUs`."""
    return f"{amount:g} {kind}{'' if amount == 1 else 's'}"
