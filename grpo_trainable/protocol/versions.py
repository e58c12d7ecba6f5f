"""The rule that limits the lag, and the record of a change of weights."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class StalenessGate:
    """Decides which groups may be generated, and which may be trained on.

    A group must be trained on for the first time within `lag` rounds of the weights that sampled
    it, and for the last time within `max_age` rounds. `learner_round` is the number of rounds
    finished so far. This number is also the index of the next round and the round of the newest
    weights.

    The rule is checked before a group is generated (`Pipeline._dispatch`) and before the group is
    trained on (`ReplayBuffer.sample`). After each round, the rule is also checked for every group
    in the buffer (`ReplayBuffer.evict`). The check before generation would suffice only if every
    group were trained on once and in order.
    """

    lag: int
    max_age: int
    learner_round: int = 0

    def may_generate(self, weights_round: int, rounds_ahead: int) -> bool:
        """Return True if weights of round `weights_round` may begin to sample a group.

        Args:
            weights_round: the round of the weights that will sample the group.
            rounds_ahead: number of rounds that are still to be run before the round that trains on
                the group.
        """
        return self.learner_round + rounds_ahead - weights_round <= self.lag

    def may_train(self, oldest_round: int, *, first_use: bool) -> bool:
        """Return True if the next round may train on a group.

        Args:
            oldest_round: the round of the weights that sampled the group's oldest token.
            first_use: True if the group has not been trained on yet.
        """
        return self.learner_round - oldest_round <= (self.lag if first_use else self.max_age)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sync:
    """The transport, size and times of one transfer of weights from the learner to a generator."""

    transport: str
    bytes: int
    publish_s: float  # time to take the snapshot and compute its checksum, in the learner
    transfer_s: float  # time until the weights are in the generator's memory
    load_s: float  # time to check the weights and make them the generator's parameters

    @property
    def seconds(self) -> float:
        """Duration of all three steps together, in seconds."""
        return self.publish_s + self.transfer_s + self.load_s


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionChange:
    """The moment from which an actor computes with new weights."""

    at: float  # seconds since 1970, by the clock of the trial's process
    role: str  # "generator" or "learner"
    actor: str
    version: int
    weights_round: int
    sync: Sync | None = None  # None for the learner, which produced the weights
