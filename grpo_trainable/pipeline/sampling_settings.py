"""The settings that decide what a trial samples.

If these settings differ between two trials, neither trial may use the rollouts in the other trial's
checkpoint.
"""

from __future__ import annotations

from typing import Any

from grpo_trainable.config import CHECKS, OF_TRAINING, GRPOConfig, flatten, schedule

SECTIONS = (
    "model",
    "engine",
    "env",
    "seed",
    "lag",
    "lag_mode",
    "weight_update",
    "task",
    "rollout",
    "pools",
    "buffer_capacity",
    "buffer_sampling",
    "buffer",
)

# Keys that only training reads, unless responses are interrupted.
OF_INTERRUPTION = ("rollout.overlong", "rollout.overlong_buffer")


def sampling_settings(config: GRPOConfig) -> dict[str, Any]:
    """Return, as plain data, the settings that decide what a trial samples.

    These settings decide which prompts a round trains on, and how the responses are sampled.
    """
    settings = config.to_dict()
    return {
        "batches_per_round": schedule.batches_per_round(config),
        "units_per_batch": len(schedule.chunks(config)),
        "groups_bring_reference": config.reference_role == "generator",
        **{section: settings[section] for section in SECTIONS},
        # With the advantage `vine`, groups contain the values of their states. With any other
        # advantage, the key `vine` is left out.
        **({"vine": settings["vine"]} if config.loss.advantage == "vine" else {}),
    }


def is_same_sampling(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return True if two results of `sampling_settings` lead to the same rollouts."""
    return _of_sampling(one) == _of_sampling(other)


def _of_sampling(work: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of `work` that influence sampling, under dotted keys.

    Settings that only training reads are left out. Settings at their default are left out too,
    because a state written by an earlier version of this package may lack them.
    """
    settings = flatten(work)
    interrupts = settings.get("rollout.overlong") == "interrupt"
    unread = {*OF_TRAINING} - {*(OF_INTERRUPTION if interrupts else ())}
    return {
        key: value
        for key, value in settings.items()
        if key not in unread and not (key in CHECKS and value in CHECKS[key].unremarkable)
    }
