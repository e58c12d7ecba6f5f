"""How should weights travel?"""

from __future__ import annotations

from typing import Any

from grpo_trainable.config.transport_catalog import TRANSPORTS
from search_spaces.async_vs_sync import fresh
from search_spaces.columns import SPEED, STALENESS, SYNC
from search_spaces.search_space import SearchSpace

# The arms are asynchronous, where most of a sync overlaps with the work of both sides.
WORKLOAD = {"placement": "disaggregated", "lag": 1, **fresh(1)}
GPUS: dict[str, dict[str, Any]] = {
    "nccl": {"resources.generator_gpus": 1, "resources.learner_gpus": 1},
    "cuda_ipc": {"resources.generator_gpus": 0.5, "resources.learner_gpus": 0.5},
}

TRANSPORT = SearchSpace(
    name="transport",
    question="how should weights travel, and what share of a round does it take?",
    arms={
        name: {**WORKLOAD, "transport": name, **GPUS.get(name, {})}
        for name in ("object_store", "shm", "gloo", "nixl", "nccl", "cuda_ipc")
    },
    columns=(*SYNC, SPEED, *STALENESS),
    missing=lambda name: TRANSPORTS[name].missing_on_machine(),
)
