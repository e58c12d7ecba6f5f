"""The lag rule, in one place, and the record of a change of weights."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class StalenessGate:
    """Admits groups: first training within `lag` rounds of their weights, any within `max_age`.

    `learner_round` is the number of rounds trained so far, which is also the index of the next
    round and the round of the newest weights. The gate is asked three times: before a group is
    generated (`Pipeline._dispatch`), before it is trained on (`ReplayBuffer.sample`), and after
    each round, about every group that is kept (`ReplayBuffer.evict`). Admission before generation
    keeps the bound alone only while every group is trained on once and in order.
    """

    lag: int
    max_age: int
    learner_round: int = 0

    def may_generate(self, weights_round: int, rounds_ahead: int) -> bool:
        """Whether a group may be started with weights of this round. `rounds_ahead`: rounds that
        will be trained before it."""
        return self.learner_round + rounds_ahead - weights_round <= self.lag

    def may_train(self, oldest_round: int, *, first_use: bool) -> bool:
        """Whether the next round may train on a group whose oldest token is of `oldest_round`."""
        return self.learner_round - oldest_round <= (self.lag if first_use else self.max_age)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sync:
    """How weights came from the learner into a generator."""

    transport: str
    bytes: int
    publish_s: float  # the learner takes the snapshot and its checksum
    transfer_s: float  # the weights come into the generator's memory
    load_s: float  # they become its parameters, checksum included

    @property
    def seconds(self) -> float:
        return self.publish_s + self.transfer_s + self.load_s


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionChange:
    """An actor computes with other weights than before."""

    at: float  # seconds since 1970, by the actor's clock
    role: str  # "generator" or "learner"
    actor: str
    version: int
    weights_round: int
    sync: Sync | None = None  # None in the learner, which made the weights
