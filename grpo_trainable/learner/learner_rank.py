"""One of several learners of a trial, each in a separate process."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_trainable.config import GRPOConfig
from grpo_trainable.learner.learner import Learner
from grpo_trainable.learner.process_group import ProcessGroup, Rendezvous
from grpo_trainable.learner.ranks import Ranks, Replicas
from grpo_trainable.protocol.messages import LearnerState, Published, Updated
from grpo_trainable.protocol.rollout import RolloutGroup
from grpo_trainable.protocol.weight_transfer import WeightSender
from grpo_trainable.storage.checkpointing import LearnerFiles
from grpo_trainable.telemetry.progress import steps_done


class LearnerRank:
    """A learner that joins other learners. The methods of `Learner` may be called after `join`.

    All ranks get the same calls in the same order. The first rank publishes the weights, and only
    its results contain tensors.
    """

    CONCURRENT = ("progress",)

    def __init__(self, config: GRPOConfig, sender: WeightSender | None) -> None:
        """Prepare to join the group. `join` builds the learner.

        Args:
            config: The trial's settings.
            sender: Publishes the weights. None on all ranks except the first.
        """
        r = config.resources
        self._config = config
        self._sender = sender
        self._address = ""
        self._rendezvous: Rendezvous | None = None
        device = torch.device("cuda" if r.learner_gpus else "cpu")
        self._group = ProcessGroup(device, r.deadline_s, elastic=r.elastic)
        self._learner: Learner | None = None
        # State before the last round. Only a rank of an elastic group keeps it.
        self._before: LearnerState | None = None

    def host(self, address: str = "") -> tuple[str, int]:
        """Open, in this process, a meeting point for all ranks. Return its address and port.

        Args:
            address: The address by which the other ranks reach this process. Empty: use the address
                of the previous call.
        """
        self._address = address or self._address
        self._rendezvous = Rendezvous(self._address, self._config.resources.deadline_s)
        return self._rendezvous.place

    def join(self, rank: int, size: int, place: tuple[str, int]) -> None:
        """Wait for the other ranks, and build the learner.

        Args:
            rank: Index of this rank.
            size: Number of ranks.
            place: The result of `host` on the first rank.
        """
        self._group.join(rank, size, place, self._rendezvous)
        self._learner = Learner(self._config, self._sender, ranks=self._ranks())

    def _ranks(self) -> Ranks:
        if self._config.resources.learner_strategy == "replicated":
            return Replicas(self._group)
        from grpo_trainable.learner.shards import Shards  # this import loads a large part of torch

        return Shards(self._group)

    def leave(self) -> None:
        """Leave the group. Ranks that still wait for this rank fail immediately."""
        gc.collect()
        self._group.leave()

    def rejoin(self, rank: int, size: int, place: tuple[str, int]) -> None:
        """Join a new group of ranks, and go back to the state before the last round."""
        assert self._before is not None, "only an elastic group keeps the state before a round"
        self._group.join(rank, size, place, self._rendezvous)
        self.learner.rewind(self._before)

    @property
    def learner(self) -> Learner:
        """The learner, once this rank has joined."""
        assert self._learner is not None, "call `join` first"
        return self._learner

    def reset(self, config: GRPOConfig) -> None:
        """Start over with a different config."""
        self._config, self._before = config, None
        self.learner.reset(config)

    def warm_up(self, prompt_tokens: int) -> None:
        """Call `Learner.warm_up`."""
        self.learner.warm_up(prompt_tokens)

    def update(self, rollout_batches: Sequence[Sequence[RolloutGroup]]) -> Updated:
        """Train for one round, as `Learner.update` does.

        In an elastic group, keep a copy of the state before the round.
        """
        if not self._config.resources.elastic:
            return self.learner.update(rollout_batches)
        self._before = self.learner.own_state()
        try:
            return self.learner.update(rollout_batches)
        except RuntimeError as error:
            reason = f"{type(error).__name__}: {error}"
        # Raise a new error. The frames of the caught error refer to the group. While these frames
        # exist, `leave` cannot close the group's connections, and the other ranks might wait for
        # this rank instead of the lost rank.
        raise RuntimeError(reason)

    def publish(self, needed_from: int = 0) -> Published:
        """Call `Learner.publish`."""
        return self.learner.publish(needed_from)

    def staged(self, round_: int) -> list[Tensor]:
        """Call `Learner.staged`."""
        return self.learner.staged(round_)

    def state(self) -> LearnerState:
        """Call `Learner.state`."""
        return self.learner.state()

    def write(self, directory: str, seen_by: str) -> LearnerFiles:
        """Call `Learner.write`."""
        return self.learner.write(directory, seen_by)

    def next_message(self) -> tuple[str, bytes] | None:
        """Call `Learner.next_message`."""
        return self.learner.next_message()

    def read_state(
        self, directory: str, digests: Mapping[str, str], counters: dict[str, Any]
    ) -> bool:
        """Call `Learner.read_state`."""
        return self.learner.read_state(directory, digests, counters)

    def load_state(self, state: LearnerState) -> None:
        """Call `Learner.load_state`."""
        self.learner.load_state(state)

    def progress(self) -> int:
        """Return a count that changes while this rank works, even before it has joined."""
        return steps_done()

    def close(self) -> None:
        """Close the learner and leave the group."""
        if self._learner is not None:
            self._learner.close()
            self._group.leave()
