"""Report trials that wait because no node has room for their actors."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import ray

from callbacks.fail_safe import FailSafeCallback
from callbacks.trial_files import label
from grpo_trainable.config.placement import Nodes, room_beside, shown

LOOK_S = 10.0  # pause between two checks of the nodes


def nodes_alive() -> Nodes:
    """Return the resources of the nodes that are alive."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


class UnplaceableTrialsCallback(FailSafeCallback):
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
                    f"node, but the nodes that are alive have {shown(nodes)}. The trial continues "
                    "when a node with room joins. If none will join, lower the trial's "
                    "resources.*",
                    flush=True,
                )
