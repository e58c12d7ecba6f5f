"""What population-based training varies, and between which bounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_trainable.config import GRPOConfig, flatten, set_dotted

# Dotted key -> its least and greatest value; those of the clip range are multiples of its default.
MUTATIONS = {"optim.lr": (1e-5, 1e-3), "loss.clip": (0.25, 2.0)}

Bounds = Mapping[str, tuple[float, float]]


def pbt_bounds(trial: GRPOConfig) -> dict[str, tuple[float, float]]:
    """Dotted key -> least and greatest value, of the keys that such a trial reads."""
    bounds = {key: limits for key, limits in MUTATIONS.items() if trial.reads(key)}
    if "loss.clip" in bounds:
        low, high = bounds["loss.clip"]
        bounds["loss.clip"] = (low * trial.clip_low, high * trial.clip_low)
    return bounds


def within_bounds(bounds: Bounds, config: dict[str, Any]) -> dict[str, Any]:
    """The config that PBT explores next, each key moved into its bounds: Tune's factors of 0.8 and
    1.2 multiply from clone to clone, beyond what is valid."""
    for key, (low, high) in bounds.items():
        set_dotted(config, key, min(max(flatten(config)[key], low), high))
    return config
