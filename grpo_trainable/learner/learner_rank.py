"""One of several learners of a trial, in a process of its own."""

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
    """Has the methods of a learner once it has joined the others.

    All ranks are asked for everything in the same order. The first publishes and answers with
    tensors.
    """

    CONCURRENT = ("progress",)

    def __init__(self, config: GRPOConfig, sender: WeightSender | None) -> None:
        """`sender`: None in all ranks but the first."""
        r = config.resources
        self._config = config
        self._sender = sender
        self._address = ""
        self._rendezvous: Rendezvous | None = None
        device = torch.device("cuda" if r.learner_gpus else "cpu")
        self._group = ProcessGroup(device, r.deadline_s, elastic=r.elastic)
        self._learner: Learner | None = None
        self._before: LearnerState | None = None  # the state before the round, if asked for

    def host(self, address: str = "") -> tuple[str, int]:
        """Where the ranks meet: in this process, which the others reach by `address`, or as they
        did before."""
        self._address = address or self._address
        self._rendezvous = Rendezvous(self._address, self._config.resources.deadline_s)
        return self._rendezvous.place

    def join(self, rank: int, size: int, place: tuple[str, int]) -> None:
        """Waits for the others at what `host` of the first gave, and builds the learner."""
        self._group.join(rank, size, place, self._rendezvous)
        self._learner = Learner(self._config, self._sender, ranks=self._ranks())

    def _ranks(self) -> Ranks:
        if self._config.resources.learner_strategy == "replicated":
            return Replicas(self._group)
        from grpo_trainable.learner.shards import Shards  # loads much of torch

        return Shards(self._group)

    def leave(self) -> None:
        """Ends the group: who still waits for this rank fails at once."""
        gc.collect()
        self._group.leave()

    def rejoin(self, rank: int, size: int, place: tuple[str, int]) -> None:
        """Goes back to where the last round began, among other ranks."""
        assert self._before is not None, "only an elastic group goes on"
        self._group.join(rank, size, place, self._rendezvous)
        self.learner.rewind(self._before)

    @property
    def learner(self) -> Learner:
        assert self._learner is not None, "joins before anything else"
        return self._learner

    def reset(self, config: GRPOConfig) -> None:
        self._config = config
        self.learner.reset(config)

    def warm_up(self, prompt_tokens: int) -> None:
        self.learner.warm_up(prompt_tokens)

    def update(self, rollout_batches: Sequence[Sequence[RolloutGroup]]) -> Updated:
        if not self._config.resources.elastic:
            return self.learner.update(rollout_batches)
        self._before = self.learner.own_state()
        try:
            return self.learner.update(rollout_batches)
        except RuntimeError as error:
            reason = f"{type(error).__name__}: {error}"
        # Another error, since the frames of this one hold the group, whose connections `leave` has
        # to close: others may wait for this rank and not for the one that is lost.
        raise RuntimeError(reason)

    def publish(self, needed_from: int = 0) -> Published:
        return self.learner.publish(needed_from)

    def staged(self, round_: int) -> list[Tensor]:
        return self.learner.staged(round_)

    def state(self) -> LearnerState:
        return self.learner.state()

    def write(self, directory: str, seen_by: str) -> LearnerFiles:
        return self.learner.write(directory, seen_by)

    def next_message(self) -> tuple[str, bytes] | None:
        return self.learner.next_message()

    def read_state(
        self, directory: str, digests: Mapping[str, str], counters: dict[str, Any]
    ) -> bool:
        return self.learner.read_state(directory, digests, counters)

    def load_state(self, state: LearnerState) -> None:
        self.learner.load_state(state)

    def progress(self) -> int:
        return steps_done()

    def close(self) -> None:
        if self._learner is not None:
            self._learner.close()
            self._group.leave()
