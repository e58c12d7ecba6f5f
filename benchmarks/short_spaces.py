"""Search spaces with the arms that decide between k, lag and replay, for benchmarks/evidence.py.

`launch/tune.py --space benchmarks/short_spaces.py:LAG_EXACT_SHORT` runs one of them.
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
SHORT = {space.name: space for space in (GRADIENT_STEPS_SHORT, LAG_EXACT_SHORT, REPLAY_SHORT)}
