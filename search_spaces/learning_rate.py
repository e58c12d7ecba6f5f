"""Which learning rate?"""

from __future__ import annotations

from search_spaces.async_vs_sync import fresh
from search_spaces.columns import DRIFT, LEARNING, SPEED
from search_spaces.search_space import SearchSpace

# The default first: the others are compared with it.
RATES = ("3e-4", "2e-5", "5e-5", "1e-4", "5e-4", "1e-3")

LEARNING_RATE = SearchSpace(
    name="learning_rate",
    question="how high may the learning rate be before the policy is damaged?",
    arms={f"lr{rate}": {**fresh(1), "optim.lr": float(rate)} for rate in RATES},
    columns=(*LEARNING, *DRIFT, SPEED),
)
