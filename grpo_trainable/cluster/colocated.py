"""Generator and learner in one actor, on one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_trainable.config import GRPOConfig
from grpo_trainable.generator.generator import Generator
from grpo_trainable.learner.learner import Learner
from grpo_trainable.protocol.messages import (
    Cancelled,
    LearnerState,
    Loaded,
    Published,
    Sampled,
    Scored,
    Updated,
)
from grpo_trainable.protocol.rollout import Request, RolloutGroup
from grpo_trainable.protocol.weight_transfer import LocalTransport
from grpo_trainable.storage.checkpointing import LearnerFiles
from grpo_trainable.telemetry.timers import StageClock


class Colocated:
    """Worker that is both generator and learner. The generator keeps a copy of the weights.

    The worker samples with as many threads as `resources.generator_cpus` allows and trains with as
    many as `resources.worker_cpus` allows. The shipped policy does not sample any faster with a
    second thread.
    """

    # Sampling does not change the learner's state, so a checkpoint need not wait for sampling to
    # end.
    CONCURRENT = ("progress", "score", "write")

    def __init__(self, config: GRPOConfig, transport: LocalTransport) -> None:
        clock = StageClock()
        self._generator = Generator(config, transport, clock)
        self._generator.sleep()
        self._learner = Learner(config, transport, clock)

    def reset(self, config: GRPOConfig) -> None:
        """Restart both roles with a config that has the same placement, resources and transport."""
        self._generator.reset(config)
        self._generator.sleep()
        self._learner.reset(config)

    def warm_up(self, requests: Sequence[Request], prompt_tokens: int) -> None:
        """Warm up both roles, as `Generator.warm_up` and `Learner.warm_up` do."""
        self._generator.warm_up(requests)
        self._generator.sleep()
        self._learner.warm_up(prompt_tokens)

    def generate(self, requests: Sequence[Request]) -> Scored | Sampled | Cancelled:
        """Call `Generator.generate`."""
        return self._generator.generate(requests)

    def score(self, number: int) -> Scored:
        """Call `Generator.score`."""
        return self._generator.score(number)

    def load(self, handle: Any) -> Loaded:
        """Call `Generator.load`."""
        return self._generator.load(handle)

    def update(self, rollout_batches: Sequence[Sequence[RolloutGroup]]) -> Updated:
        """Call `Learner.update`. During the call, the generator's engine sleeps if it can."""
        self._generator.sleep()
        return self._learner.update(rollout_batches)

    def publish(self, needed_from: int = 0) -> Published:
        """Call `Learner.publish`."""
        return self._learner.publish(needed_from)

    def state(self) -> LearnerState:
        """Call `Learner.state`."""
        return self._learner.state()

    def write(self, directory: str, seen_by: str) -> LearnerFiles:
        """Call `Learner.write`."""
        return self._learner.write(directory, seen_by)

    def next_message(self) -> tuple[str, bytes] | None:
        """Call `Learner.next_message`."""
        return self._learner.next_message()

    def read_state(
        self, directory: str, digests: Mapping[str, str], counters: dict[str, Any]
    ) -> bool:
        """Call `Learner.read_state`."""
        return self._learner.read_state(directory, digests, counters)

    def load_state(self, state: LearnerState) -> None:
        """Call `Learner.load_state`."""
        self._learner.load_state(state)

    def progress(self) -> int:
        """Return a count that changes while the worker works."""
        return self._generator.progress()  # this count includes the learner's steps

    def close(self) -> None:
        """Close both roles."""
        self._generator.close()
        self._learner.close()
