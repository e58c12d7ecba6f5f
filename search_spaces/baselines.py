"""What is a response compared with?"""

from __future__ import annotations

from search_spaces.async_vs_sync import fresh
from search_spaces.columns import DRIFT, LEARNING, SIGNAL, SPEED
from search_spaces.search_space import SearchSpace

ADVANTAGES = ("group_mean", "rloo", "group_std", "group_mean_batch_std", "batch", "maxrl")

# No ratio and no clip: the arms differ in the advantage alone.
BASELINES = SearchSpace(
    name="baselines",
    question="what should a response be compared with: nothing, its group, the others, the batch?",
    arms={
        "none": {**fresh(1), "loss.type": "no_baseline", "loss.advantage": "none"},
        **{
            name: {**fresh(1), "loss.type": "reinforce_with_baseline", "loss.advantage": name}
            for name in ADVANTAGES
        },
    },
    columns=(*LEARNING, *SIGNAL, *DRIFT, SPEED),
)
