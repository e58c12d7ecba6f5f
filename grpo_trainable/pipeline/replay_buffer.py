"""The replay buffer: scored groups that wait to be trained on or may be used again."""

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
    """The groups for one gradient step, or for all passes over one batch."""

    groups: Groups  # sorted by prompt index; `uses` includes this use
    first_used: int  # number of groups used for the first time
    stale: int  # number of groups that the gate rejected before they were ever trained on


class ReplayBuffer:
    """Scored groups, stored by prompt index.

    `sample` considers the round's fresh rollout batch and the older batches that are kept. First,
    the gate checks each group of these batches once more, and groups that it rejects are removed. A
    removed group counts as stale if it was never trained on. From the remaining groups, `sample`
    selects up to `count` groups without replacement, by the rule that `buffer_sampling` names. If
    only one rollout batch of `count` groups is kept, the sample is that batch, so nothing is
    replayed.
    """

    def __init__(self, sampling: str = "recency", fresh_fraction: float = 0.5) -> None:
        self._sampling = SAMPLINGS[sampling]
        self._fresh_fraction = fresh_fraction
        self._groups: dict[int, RolloutGroup] = {}

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def waiting(self) -> int:
        """Number of groups that have not been trained on yet."""
        return sum(group.uses == 0 for group in self._groups.values())

    def add(self, groups: Sequence[RolloutGroup]) -> None:
        """Add scored groups whose prompt indices are not in the buffer yet."""
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
        """Select groups to train on, and increase `uses` of each selected group by one.

        Args:
            fresh: Prompt indices of the fresh rollout batch.
            older: Prompt indices of older batches.
            count: Maximum number of groups to take.
            gate: Checks each group before it is used.
            rng: Source of the random draws.
        """
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
        """Remove groups that will not be used again, and return how many were never trained on.

        Args:
            closed: Prompt indices of the batches that are no longer kept.
            gate: Checks the remaining groups. A group that the gate rejects for the next round is
                removed as well.
        """
        removed = [self._groups.pop(index) for index in closed if index in self._groups]
        unused = sum(group.uses == 0 for group in removed)
        return unused + self._remove_not_admitted(list(self._groups), gate)

    def groups(self) -> Groups:
        """Return all groups, sorted by prompt index, for a checkpoint."""
        return [self._groups[index] for index in sorted(self._groups)]

    def _held(self, prompt_indices: Sequence[int]) -> Groups:
        return [self._groups[i] for i in sorted(prompt_indices) if i in self._groups]

    def _remove_not_admitted(self, prompt_indices: Sequence[int], gate: StalenessGate) -> int:
        """Remove the groups that the gate rejects for the next round.

        Return how many of the removed groups were never trained on.
        """
        stale = 0
        for group in self._held(prompt_indices):
            if not gate.may_train(group.oldest_round, first_use=group.uses == 0):
                del self._groups[group.prompt_index]
                stale += group.uses == 0
        return stale


# ---- Sampling: (fresh, older, count, fresh fraction, rng) -> groups ----------------------------

Sampling = Callable[[Groups, Groups, int, float, np.random.Generator], Groups]


def newest(
    fresh: Groups, older: Groups, count: int, fraction: float, rng: np.random.Generator
) -> Groups:
    """Return the newest groups."""
    return [*older, *fresh][-count:]


def least_used_then_oldest(
    fresh: Groups, older: Groups, count: int, fraction: float, rng: np.random.Generator
) -> Groups:
    """Return the least used groups. Among equally used groups, prefer the oldest."""
    return sorted([*older, *fresh], key=lambda group: (group.uses, group.prompt_index))[:count]


def uniform(
    fresh: Groups, older: Groups, count: int, fraction: float, rng: np.random.Generator
) -> Groups:
    """Return groups drawn uniformly from all groups, fresh and older."""
    return _some([*older, *fresh], count, rng)


def fresh_and_older(
    fresh: Groups, older: Groups, count: int, fraction: float, rng: np.random.Generator
) -> Groups:
    """Draw ceil(fraction · count) groups from the fresh ones, and the rest from the older ones.

    Both draws are uniform. If there are too few groups of one kind, draw more of the other kind.
    """
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
    """Draw `count` groups without replacement.

    If there are at most `count` groups, return all of them without drawing.
    """
    if count >= len(groups):
        return groups
    return [groups[i] for i in rng.choice(len(groups), size=count, replace=False)]
