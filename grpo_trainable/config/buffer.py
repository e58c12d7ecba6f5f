"""The `buffer` section: the reuse of rollouts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from grpo_trainable.config import schedule
from grpo_trainable.config.conditions import REPLAY, Config, Conflict, one_of
from grpo_trainable.config.defaults import when_read
from grpo_trainable.config.values import Settings, integer, number


@dataclass(frozen=True, kw_only=True)
class BufferSettings(Settings):
    """Reuse of rollouts. A `buffer_capacity` above 1 turns reuse on."""

    SECTION: ClassVar[str] = "buffer"

    sample_batches: int | None = integer(
        None,
        "Number of groups that a gradient step draws, as a multiple of rollout.prompts. `none` "
        "means 2. With buffer_sampling=mixed, some groups are never used if fresh_fraction times "
        "sample_batches is below 1.",
        minimum=1,
        read_if=REPLAY,
        harmless=(1,),
        default_by=when_read(("buffer_capacity",), lambda capacity: 2 if capacity > 1 else 1),
    )
    max_age: int | None = integer(
        None,
        "Maximum number of rounds by which a group may be behind the learner whenever the group is "
        "used in training. `none` means lag + buffer_capacity − 1.",
        minimum=0,
        read_if=REPLAY,
    )
    fresh_fraction: float = number(
        0.5,
        "Share of each draw that consists of fresh groups, which have not been used in training "
        "before.",
        above=0,
        maximum=1,
        read_if=(REPLAY, one_of("buffer_sampling", "mixed")),
    )


def fresh_wanted(fraction: float, count: int) -> int:
    """Return ceil(fraction · count) without floating-point error: 0.28 · 25 gives 7."""
    return math.ceil(round(fraction * count, 9))


def conflicts(config: Config) -> Iterator[Conflict]:
    """Yield combinations of settings that never reuse a group, and conflicts between limits."""
    sampling, sample = config.buffer_sampling, config.effective("buffer.sample_batches")
    replay = config.buffer_capacity > 1
    drawn = sample * config.rollout.prompts

    yield (
        sample > config.buffer_capacity,
        "buffer.sample_batches",
        f"must be <= buffer_capacity={config.buffer_capacity}",
    )
    yield (
        sampling == "recency" and config.buffer_capacity > sample,
        "buffer_capacity",
        f"must be <= buffer.sample_batches={sample} with buffer_sampling=recency, which never "
        "draws older groups; or set buffer_sampling to fifo, uniform or mixed",
    )
    # In the next two conflicts, fresh groups alone would fill each draw.
    yield (
        replay and sampling == "fifo" and sample == 1,
        "buffer.sample_batches",
        "must be >= 2 with buffer_sampling=fifo, which never reuses a group while unused groups "
        "remain",
    )
    yield (
        replay
        and sampling == "mixed"
        and fresh_wanted(config.buffer.fresh_fraction, drawn) >= drawn
        and sample == 1,
        "buffer.fresh_fraction",
        "never reuses a group with buffer.sample_batches=1; lower buffer.fresh_fraction",
    )
    yield (
        replay and schedule.max_age(config) == config.lag,
        "buffer.max_age",
        f"must be > lag={config.lag}: otherwise a group that is first used at that lag is never "
        "reused",
    )
    yield (
        replay and config.lag_mode == "exact",
        "lag_mode",
        f"needs buffer_capacity=1, got {config.buffer_capacity}: replay trains on groups that are "
        "more than lag rounds behind",
    )
    yield schedule.max_age(config) < config.lag, "buffer.max_age", f"must be >= lag={config.lag}"
