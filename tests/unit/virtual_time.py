"""Groups and durations for tests in virtual time."""

from __future__ import annotations

import random
from collections.abc import Sequence

from grpo_trainable.protocol.rollout import RolloutGroup
from grpo_trainable.simulation.groups import group_of
from grpo_trainable.simulation.runtime import TICK, Durations


def one_token_group(
    prompt_index: int,
    *,
    rewards: Sequence[float] = (0.0, 1.0),
    version: int = 0,
    round_: int = 0,
    uses: int = 0,
) -> RolloutGroup:
    """Return a group of one-token responses."""
    return group_of(prompt_index, rewards=rewards, weights=[(version, round_)], uses=uses)


def long_tailed_durations(seed: int, scale: dict[str, float]) -> Durations:
    """Return log-normal durations around the stage's scale in ticks.

    Now and then, a duration is ten times the scale.
    """
    rng = random.Random(seed)
    return lambda actor, stage: (
        (1 + int(scale.get(stage, 1.0) * rng.lognormvariate(0.0, 1.2))) * TICK
    )
