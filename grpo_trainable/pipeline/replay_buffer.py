"""Scored groups between generation and training, and for how long they are used again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from grpo_trainable.config import fresh_wanted
from grpo_trainable.protocol.rollout import RolloutGroup
from grpo_trainable.protocol.versions import StalenessGate

Groups = list[RolloutGroup]


@dataclass(frozen=True, kw_only=True)
class ReplaySample:
    """What one gradient step, or a round's passes over one batch, trains on."""

    groups: Groups  # sorted by prompt index; this use is counted in them
    first_used: int  # groups that are used for the first time
    stale: int  # groups that the gate refused before they were ever trained on


class ReplayBuffer:
    """Scored groups, each found by the index of its prompt.

    `sample` sees the fresh rollout batch of its round and the older ones that are kept, and takes
    `count` groups of them without replacement (`buffer_sampling`). What is seen passes the gate
    once more: a group that fails is removed, and counted when nothing was ever trained on it. With
    one rollout batch to see and `count` groups in it, that batch is what comes out: no replay.
    """

    def __init__(self, sampling: str = "recency", fresh_fraction: float = 0.5) -> None:
        self._sampling = SAMPLINGS[sampling]
        self._fresh_fraction = fresh_fraction
        self._groups: dict[int, RolloutGroup] = {}

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def waiting(self) -> int:
        """Groups that nothing was trained on yet."""
        return sum(group.uses == 0 for group in self._groups.values())

    def add(self, groups: Sequence[RolloutGroup]) -> None:
        for group in groups:
            assert group.prompt_index not in self._groups, group.prompt_index
            self._groups[group.prompt_index] = group

    def sample(
        self,
        fresh: Sequence[int],
        older: Sequence[int],
        count: int,
        gate: StalenessGate,
        rng: np.random.Generator,
    ) -> ReplaySample:
        """Takes some of the groups of the prompts `fresh` and `older`, and counts one use more."""
        stale = self._remove_not_admitted([*older, *fresh], gate)
        chosen = self._sampling(
            self._held(fresh), self._held(older), count, self._fresh_fraction, rng
        )
        groups = sorted(chosen, key=lambda group: group.prompt_index)
        first_used = sum(group.uses == 0 for group in groups)
        groups = [replace(group, uses=group.uses + 1) for group in groups]
        self._groups.update({group.prompt_index: group for group in groups})
        return ReplaySample(groups=groups, first_used=first_used, stale=stale)

    def evict(self, closed: Iterable[int], gate: StalenessGate) -> int:
        """Removes the groups of the prompts `closed`, and those that the gate will not let the next
        round train on. Returns how many of them were never trained on."""
        removed = [self._groups.pop(index) for index in closed if index in self._groups]
        unused = sum(group.uses == 0 for group in removed)
        return unused + self._remove_not_admitted(list(self._groups), gate)

    def groups(self) -> Groups:
        """All groups by prompt index, for a checkpoint."""
        return [self._groups[index] for index in sorted(self._groups)]

    def _held(self, prompt_indices: Sequence[int]) -> Groups:
        return [self._groups[i] for i in sorted(prompt_indices) if i in self._groups]

    def _remove_not_admitted(self, prompt_indices: Sequence[int], gate: StalenessGate) -> int:
        """Removes the groups that the gate will not let the next round train on. Returns how many
        of them were never trained on."""
        stale = 0
        for group in self._held(prompt_indices):
            if not gate.may_train(group.oldest_round, first_use=group.uses == 0):
                del self._groups[group.prompt_index]
                stale += group.uses == 0
        return stale


# ---- Sampling: (fresh, older, how many, fresh fraction, rng) -> groups, by prompt index -------

Sampling = Callable[[Groups, Groups, int, float, np.random.Generator], Groups]


def newest(
    fresh: Groups, older: Groups, count: int, fraction: float, rng: np.random.Generator
) -> Groups:
    return [*older, *fresh][-count:]


def least_used_then_oldest(
    fresh: Groups, older: Groups, count: int, fraction: float, rng: np.random.Generator
) -> Groups:
    return sorted([*older, *fresh], key=lambda group: (group.uses, group.prompt_index))[:count]


def uniform(
    fresh: Groups, older: Groups, count: int, fraction: float, rng: np.random.Generator
) -> Groups:
    return _some([*older, *fresh], count, rng)


def fresh_and_older(
    fresh: Groups, older: Groups, count: int, fraction: float, rng: np.random.Generator
) -> Groups:
    """ceil(fraction · count) fresh ones, and the rest uniformly of the older; where there are too
    few of one kind, more of the other."""
    wanted = max(fresh_wanted(fraction, count), count - len(older))
    some_fresh = _some(fresh, wanted, rng)
    return [*some_fresh, *_some(older, count - len(some_fresh), rng)]


SAMPLINGS: Mapping[str, Sampling] = {
    "recency": newest,
    "fifo": least_used_then_oldest,
    "uniform": uniform,
    "mixed": fresh_and_older,
}


def _some(groups: Groups, count: int, rng: np.random.Generator) -> Groups:
    """`count` of the groups without replacement; all of them, and no draw, where there are no
    more."""
    if count >= len(groups):
        return groups
    return [groups[i] for i in rng.choice(len(groups), size=count, replace=False)]
