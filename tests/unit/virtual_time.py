"""Groups, durations and recorded calls for tests in virtual time."""

from __future__ import annotations

import random
from collections.abc import Sequence

from grpo_trainable.protocol.rollout import RolloutGroup
from grpo_trainable.simulation.groups import group_of
from grpo_trainable.simulation.roles import GeneratorCall, TrainingCall
from grpo_trainable.simulation.runtime import TICK, Durations
from grpo_trainable.simulation.trial import VirtualTrial


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


def of_stream(trial: VirtualTrial, stream: str) -> list[GeneratorCall]:
    """Return the generator calls of a stream: "train", "eval" or "load"."""
    return [call for call in trial.generated if call.stream == stream]


def used_after_release(trial: VirtualTrial) -> list[GeneratorCall]:
    """Return the calls that still used weights after the learner had released them."""
    return [
        call
        for call in trial.generated
        if any(call.weights_round < before and at < call.end for at, before in trial.releases)
        and not any(
            name == call.actor and call.start < at < call.end for name, at in trial.runtime.kills
        )
    ]


def all_prompt_indices(call: TrainingCall) -> list[int]:
    """Return the prompt indices of all rollout batches of an update."""
    return [index for batch in call.prompt_indices for index in batch]
