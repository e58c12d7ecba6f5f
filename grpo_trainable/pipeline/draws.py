"""What became of the prompts that were drawn for a round, whether it trained on them or not."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from grpo_trainable.pipeline.ledger import FilledBatch
from grpo_trainable.protocol.rollout import RolloutGroup


class Draws:
    """What scored groups earned, kept until the round that drew them has told of them."""

    def __init__(self, planned: int) -> None:
        """`planned`: prompts of a rollout batch."""
        self._planned = planned
        # Mean reward and mean answer reward of a group, by prompt index.
        self._rewards: dict[int, tuple[float, float]] = {}

    def scored(self, groups: Sequence[RolloutGroup]) -> None:
        """Takes note of groups, those included that are left out."""
        self._rewards |= {
            group.prompt_index: (float(group.rewards.mean()), group.answer_mean) for group in groups
        }

    def answers(self, drawn: Iterable[int]) -> dict[int, float]:
        """The mean answer rewards of those of the prompts `drawn` that were scored."""
        return {index: self._rewards[index][1] for index in drawn if index in self._rewards}

    def take_metrics(self, batches: Sequence[FilledBatch]) -> dict[str, float]:
        """Metrics of what was drawn for the batches of a round; forgets it."""
        drawn = [index for batch in batches for index in batch.drawn]
        rewards = [self._rewards.pop(index)[0] for index in drawn if index in self._rewards]
        accepted = sum(len(batch.accepted) for batch in batches)
        row = {
            "group/drawn": float(len(drawn)),
            "group/filtered": float(len(rewards) - accepted),
            "group/resampled": float(len(drawn) - self._planned * len(batches)),
        }
        if rewards:
            # fsum is exact, so the order in which groups came does not matter.
            row["reward/drawn_mean"] = math.fsum(rewards) / len(rewards)
        return row

    # ---- Checkpoints -------------------------------------------------------------------------

    def state(self) -> list[list[Any]]:
        return [[index, *rewards] for index, rewards in sorted(self._rewards.items())]

    def load_state(self, state: Sequence[Sequence[Any]]) -> None:
        self._rewards = {index: (reward, answer) for index, reward, answer in state}
