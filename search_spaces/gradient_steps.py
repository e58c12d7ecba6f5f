"""How many gradient steps from one round's rollouts, and of which kind?"""

from __future__ import annotations

from typing import Any

from search_spaces.async_vs_sync import fresh
from search_spaces.columns import DRIFT, OFF_POLICY, SPEED, STEPS
from search_spaces.search_space import SearchSpace

KS = (2, 4, 8)


def _reused(k_mode: str, k: int) -> dict[str, Any]:
    """Settings with one rollout batch a round for every k: equal samples in equally many rounds."""
    return {**fresh(1), "k": k, "k_mode": k_mode}


GRADIENT_STEPS = SearchSpace(
    name="gradient_steps",
    question="how many gradient steps per rollout batch, and of which kind, at equal samples?",
    arms={
        "k1": fresh(1),
        # k passes over the batch: k times the steps.
        **{f"same_batch_k{k}": _reused("same_batch", k) for k in KS},
        # The batch in k parts: k times the steps, each on a k-th of the rows.
        **{f"minibatches_k{k}": _reused("minibatches", k) for k in KS},
        # k batches a round, sampled by one version: as many steps as with k = 1.
        **{f"fresh_batches_k{k}": fresh(k) for k in KS},
    },
    columns=(STEPS, SPEED, *OFF_POLICY, *DRIFT),
)
