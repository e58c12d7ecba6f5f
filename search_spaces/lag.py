"""How stale may rollouts be, and does truncated importance sampling help?"""

from __future__ import annotations

from search_spaces.async_vs_sync import fresh
from search_spaces.columns import DRIFT, OFF_POLICY, SPEED, STALENESS
from search_spaces.search_space import SearchSpace

LAGS = (0, 1, 2, 4, 8)
CAP = 2.0
# Two passes over each batch: training takes longer than sampling, so the generator runs ahead as
# far as the lag allows and the bound is reached.
WORKLOAD = {"placement": "disaggregated", **fresh(1), "k": 2, "k_mode": "same_batch"}

LAG = SearchSpace(
    name="lag",
    question="how much staleness is tolerated, with and without a cap on the importance weight?",
    arms={
        **{f"lag{lag}": {**WORKLOAD, "lag": lag} for lag in LAGS},
        **{
            f"lag{lag}_capped": {**WORKLOAD, "lag": lag, "loss.importance_cap": CAP} for lag in LAGS
        },
    },
    columns=(*STALENESS, SPEED, *OFF_POLICY, *DRIFT),
)
