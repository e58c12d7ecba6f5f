"""Which loss?"""

from __future__ import annotations

from typing import Any

from search_spaces.async_vs_sync import fresh
from search_spaces.columns import DRIFT, LEARNING, OFF_POLICY, SPEED
from search_spaces.search_space import SearchSpace

# Four gradient steps on parts of the batch: on the first step of a round every ratio is 1, and the
# losses hardly differ.
WORKLOAD = {**fresh(1), "k": 4, "k_mode": "minibatches"}
TYPES = (
    *("grpo_clip", "reinforce_with_baseline", "dapo", "cispo", "gspo", "gmpo", "sapo", "topr"),
    *("dppo_tv", "dppo_kl", "m2po", "clip_cov", "kl_cov"),
)


def _with(**loss: Any) -> dict[str, Any]:
    return {**WORKLOAD, **{f"loss.{name}": value for name, value in loss.items()}}


LOSSES = SearchSpace(
    name="losses",
    question="which loss, all else equal, with four gradient steps a round?",
    arms={
        **{name: _with(type=name) for name in TYPES},
        "dual_clip": _with(type="grpo_clip", dual_clip=3.0),
    },
    columns=(*LEARNING, *OFF_POLICY, *DRIFT, SPEED),
)
