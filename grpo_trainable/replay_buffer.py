"""Scored groups between generation and training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from grpo_trainable.rollout import RolloutGroup
from grpo_trainable.versions import StalenessGate


class ReplayBuffer:
    """Groups by cursor, kept until they are trained on. Capacity 1: nothing is trained on twice.

    What is handed out passes the gate once more; a group that fails is dropped and counted, never
    trained on.
    """

    def __init__(self) -> None:
        self._groups: dict[int, RolloutGroup] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, groups: Sequence[RolloutGroup]) -> None:
        for group in groups:
            assert group.cursor not in self._groups, group.cursor
            self._groups[group.cursor] = group

    def take(self, cursors: Sequence[int], gate: StalenessGate) -> tuple[list[RolloutGroup], int]:
        """The groups of one rollout batch, used once more; how many were stale."""
        held = [self._groups.pop(cursor) for cursor in cursors if cursor in self._groups]
        fresh = [g for g in held if gate.may_train(g.oldest_round, first_use=g.uses == 0)]
        return [replace(group, uses=group.uses + 1) for group in fresh], len(held) - len(fresh)

    def groups(self) -> list[RolloutGroup]:
        """All of them by cursor, for a checkpoint."""
        return [self._groups[cursor] for cursor in sorted(self._groups)]
