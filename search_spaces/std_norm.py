"""Is the advantage divided by a standard deviation?"""

from __future__ import annotations

from search_spaces.async_vs_sync import fresh
from search_spaces.columns import DRIFT, LEARNING, SIGNAL, SPEED
from search_spaces.search_space import SearchSpace

ADVANTAGES = {
    "group_std": "group_std",
    "no_std": "group_mean",
    "batch_std": "group_mean_batch_std",
}

STD_NORM = SearchSpace(
    name="std_norm",
    question="should advantages be divided by the standard deviation of their group, of the batch, "
    "or not at all?",
    arms={arm: {**fresh(1), "loss.advantage": name} for arm, name in ADVANTAGES.items()},
    columns=(*LEARNING, *SIGNAL, *DRIFT, SPEED),
)
