"""Bundles of the trial's placement group: their sizes, and the machines that they are on.

When a machine fails, Ray moves its bundles as soon as another machine has room for them. But Ray
must first notice the failure, which takes 15 s if the machine is dead and a minute if its network
link is cut. An actor that is started in such a bundle before the move would wait forever or die
immediately.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
import ray.util

from grpo_trainable.config import ConfigError, GRPOConfig, resources

ANSWER_S = 1.0  # time limit for a connection to a machine's raylet
POLL_S = 1.0
ROUNDING = 1e-4  # Ray rounds the amounts of resources to this precision


def refuse_other_bundles(config: GRPOConfig) -> None:
    """Check that the placement group has a large enough bundle for each process of the trial.

    Outside Tune there is no placement group, so there is nothing to check.

    Raises:
        ConfigError: A bundle is missing or too small.
    """
    group = ray.util.get_current_placement_group()
    if group is None:
        return
    needed, reserved = resources.bundles(config), group.bundle_specs
    missing = [{}] * (len(needed) - len(reserved))
    for bundle, has in zip(needed, [*reserved, *missing], strict=False):
        if any(has.get(name, 0.0) < amount - ROUNDING for name, amount in bundle.items()):
            raise ConfigError(
                f"placement={config.placement}: needs the bundles {needed}, but the trial has "
                f"reserved {reserved}; remove tune.with_resources and set resources.* instead; do "
                "not let a scheduler change resources.* or placement"
            )


def has_room(bundle: int, patience_s: float) -> bool:
    """Return True once a bundle is on a live machine, or False after `patience_s` seconds."""
    until = time.monotonic() + patience_s
    while not _has_room_now(bundle):
        left_s = until - time.monotonic()
        if left_s <= 0:
            return False
        time.sleep(min(POLL_S, left_s))
    return True


def _has_room_now(bundle: int) -> bool:
    if ray.util.get_current_placement_group() is None:  # outside Tune, actors may be anywhere
        return True
    node = node_of(bundle, places_of_bundles(), ray.nodes())
    return node is not None and _answers(node["NodeManagerAddress"], node["NodeManagerPort"])


def places_of_bundles() -> dict[int, str]:
    """Return the machine id of each bundle of the trial's placement group, or {} outside Tune."""
    group = ray.util.get_current_placement_group()
    return {} if group is None else ray.util.placement_group_table(group)["bundles_to_node_id"]


def node_of(
    bundle: int, places: Mapping[int, str], nodes: Sequence[Mapping[str, Any]]
) -> Mapping[str, Any] | None:
    """Return a bundle's machine, or None if the machine is dead or Ray has not chosen one yet.

    Args:
        bundle: Number of the bundle.
        places: Bundle -> id of its machine.
        nodes: The machines, as `ray.nodes()` returns them.
    """
    for node in nodes:
        if node["NodeID"] == places.get(bundle) and node["Alive"]:
            return node
    return None


def _answers(address: str, port: int) -> bool:
    """Return True if a machine answers. Ray lists a dead machine as alive for a while."""
    try:
        socket.create_connection((address, port), ANSWER_S).close()
    except OSError:
        return False
    return True
