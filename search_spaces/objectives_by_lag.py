"""Which objective permits which staleness?"""

from __future__ import annotations

from typing import Any

from search_spaces.algorithms import ALGORITHMS
from search_spaces.columns import DRIFT, IMPORTANCE, LEARNING, OFF_POLICY, STALENESS
from search_spaces.lag import WORKLOAD
from search_spaces.search_space import SearchSpace

LAGS = (0, 4, 8)
# The presets' objectives alone: all arms sample and train alike.
OBJECTIVES = (
    *("grpo", "dr_grpo", "dapo", "cispo", "gspo", "gmpo", "sapo", "topr", "dppo_tv", "dppo_kl"),
    *("m2po", "clip_cov", "kl_cov", "rloo", "maxrl", "icepop"),
)


def objective(name: str) -> dict[str, Any]:
    """What a preset sets of the loss."""
    settings = ALGORITHMS[name].settings
    return {key: value for key, value in settings.items() if key.startswith("loss.")}


OBJECTIVES_BY_LAG = SearchSpace(
    name="objectives_by_lag",
    question="which objective permits which staleness?",
    arms={
        f"{name}_lag{lag}": {**WORKLOAD, "lag": lag, **objective(name)}
        for name in OBJECTIVES
        for lag in LAGS
    },
    columns=(*STALENESS, *OFF_POLICY, *IMPORTANCE, *LEARNING, *DRIFT),
)
