"""Whether a bundle of the trial's placement group lies on a machine that is alive.

When a machine dies Ray gives its bundles to others as soon as one has room. Until then, and until
it has noticed (15 s where the machine is dead, a minute where the link is cut), an actor for such a
bundle would wait for ever, or die at once.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
import ray.util

ANSWER_S = 1.0  # time limit for a connection to a machine's raylet
POLL_S = 1.0


def has_room(bundle: int, patience_s: float) -> bool:
    """Whether an actor can be started in this bundle, after at most so many seconds."""
    until = time.monotonic() + patience_s
    while not _has_room_now(bundle):
        left_s = until - time.monotonic()
        if left_s <= 0:
            return False
        time.sleep(min(POLL_S, left_s))
    return True


def _has_room_now(bundle: int) -> bool:
    if ray.util.get_current_placement_group() is None:  # outside of Tune: actors may be anywhere
        return True
    node = node_of(bundle, places_of_bundles(), ray.nodes())
    return node is not None and _answers(node["NodeManagerAddress"], node["NodeManagerPort"])


def places_of_bundles() -> dict[int, str]:
    """The id of the machine that each bundle of the trial's placement group lies on; empty outside
    of Tune."""
    group = ray.util.get_current_placement_group()
    return {} if group is None else ray.util.placement_group_table(group)["bundles_to_node_id"]


def node_of(
    bundle: int, places: Mapping[int, str], nodes: Sequence[Mapping[str, Any]]
) -> Mapping[str, Any] | None:
    """The machine that a bundle lies on, as far as Ray knows; None where that is dead, or none has
    had room yet. `places`: the id of each bundle's machine."""
    for node in nodes:
        if node["NodeID"] == places.get(bundle) and node["Alive"]:
            return node
    return None


def _answers(address: str, port: int) -> bool:
    """Whether a machine answers: Ray counts a dead one as alive for a while."""
    try:
        socket.create_connection((address, port), ANSWER_S).close()
    except OSError:
        return False
    return True
