"""What does a replay buffer buy?"""

from __future__ import annotations

from typing import Any

from search_spaces.async_vs_sync import fresh
from search_spaces.columns import DRIFT, OFF_POLICY, REUSE, SPEED
from search_spaces.search_space import SearchSpace

SAMPLINGS = ("fifo", "uniform", "mixed")


def _replay(capacity: int, sampling: str) -> dict[str, Any]:
    """Settings for gradient steps on two rollout batches, drawn from those of `capacity` rounds."""
    return {
        **fresh(1),
        "buffer_capacity": capacity,
        "buffer_sampling": sampling,
        "buffer.sample_batches": 2,
    }


REPLAY = SearchSpace(
    name="replay",
    question="what does training on rollouts more than once buy, at equal fresh samples?",
    arms={
        "no_replay": fresh(1),
        # A draw of two batches takes all of a capacity of two, whatever the sampling.
        "capacity2": _replay(2, "recency"),
        **{f"capacity{c}_{s}": _replay(c, s) for c in (4, 8) for s in SAMPLINGS},
    },
    columns=(*REUSE, SPEED, *OFF_POLICY, *DRIFT),
)
