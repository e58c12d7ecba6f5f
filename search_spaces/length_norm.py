"""What is the loss of a response divided by?"""

from __future__ import annotations

from search_spaces.async_vs_sync import fresh
from search_spaces.columns import DRIFT, LEARNING, LENGTH, SPEED
from search_spaces.search_space import SearchSpace

LENGTH_NORM = SearchSpace(
    name="length_norm",
    question="does dividing by the length of a response change how long responses become?",
    arms={
        aggregation: {**fresh(1), "loss.aggregation": aggregation}
        for aggregation in ("sequence_mean", "token_mean", "constant")
    },
    columns=(*LENGTH, *LEARNING, *DRIFT, SPEED),
)
