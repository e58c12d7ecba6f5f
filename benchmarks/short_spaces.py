"""Shipped search spaces with only a few of their arms, for benchmarks/off_policy.py.

`launch/tune.py --space benchmarks/short_spaces.py:LAG_EXACT_SHORT` runs one of these spaces.
"""

from __future__ import annotations

from dataclasses import replace

from search_spaces.search_space import SearchSpace
from search_spaces.spaces import SPACES


def short(name: str, *arms: str) -> SearchSpace:
    """Return a shipped space with only some of its arms."""
    space = SPACES[name]
    return replace(space, name=f"{name}_short", arms={arm: space.arms[arm] for arm in arms})


GRADIENT_STEPS_SHORT = short("gradient_steps", "k1", "same_batch_k4", "minibatches_k4")
LAG_EXACT_SHORT = short("lag_exact", "lag0", "lag2", "lag8")
REPLAY_SHORT = short("replay", "no_replay", "capacity2", "capacity4_mixed")
ASYNC_VS_SYNC_SHORT = short("async_vs_sync", "sync", "async_k1", "colocated_k8")
SHORT = {
    space.name: space
    for space in (GRADIENT_STEPS_SHORT, LAG_EXACT_SHORT, REPLAY_SHORT, ASYNC_VS_SYNC_SHORT)
}
