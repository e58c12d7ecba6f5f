"""Synchronous or asynchronous? Complete systems side by side, at equal samples."""

from __future__ import annotations

from typing import Any

from search_spaces.columns import DRIFT, OFF_POLICY, SPEED, STALENESS
from search_spaces.search_space import SearchSpace

ROUNDS = 96  # rounds of the arms with one rollout batch a round
EVAL_EVERY = 16


def fresh(k: int) -> dict[str, Any]:
    """Settings with k rollout batches a round and 1/k of the rounds: samples and evaluations are
    equally many for every k."""
    return {
        "k": k,
        "k_mode": "fresh_batches",
        "rounds": ROUNDS // k,
        "eval.every": EVAL_EVERY // k,
    }


ASYNC_VS_SYNC = SearchSpace(
    name="async_vs_sync",
    question="what does asynchrony buy in wall-clock, and cost in reward, at equal samples?",
    arms={
        "colocated_k1": {"placement": "colocated", **fresh(1)},
        # This arm reserves as many cores as the disaggregated ones and trains with two threads.
        "colocated_k1_two_cores": {
            "placement": "colocated",
            "resources.worker_cpus": 1.9,
            **fresh(1),
        },
        "colocated_k2": {"placement": "colocated", **fresh(2)},
        "colocated_k4": {"placement": "colocated", **fresh(4)},
        "colocated_k8": {"placement": "colocated", **fresh(8)},
        "sync": {"placement": "disaggregated", "lag": 0, **fresh(1)},
        "async_k1": {"placement": "disaggregated", "lag": 1, **fresh(1)},
        "async_k4": {"placement": "disaggregated", "lag": 1, **fresh(4)},
    },
    columns=(SPEED, *STALENESS, *OFF_POLICY, *DRIFT),
)
