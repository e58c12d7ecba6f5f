"""The learners of a trial behind one interface; at present there is one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from grpo_trainable.calls import Actor, Call, OutOfBand, Runtime
from grpo_trainable.liveness import Watch
from grpo_trainable.messages import LearnerState, Published
from grpo_trainable.rollout import RolloutGroup


class LearnerGroup:
    """Calls the learner: waits for everything but `update`, which the pipeline collects."""

    def __init__(
        self,
        actors: Sequence[Actor],
        runtime: Runtime,
        deadline_s: float,
        staged: Callable[[int], Any] | None = None,
    ) -> None:
        """`staged(round)` gives a reference to the published tensors, where the transport has the
        learner send them."""
        (self._actor,) = actors
        self._staged = staged
        self._watch = Watch(runtime, deadline_s)

    @property
    def name(self) -> str:
        return self._actor.name

    def update(self, rollout_batches: Sequence[Sequence[RolloutGroup]]) -> Call:
        """Submits the round's k gradient steps. The call's value is `Updated`."""
        return self._actor.submit("optimize", "update", rollout_batches)

    def publish(self, needed_from: int) -> Published:
        """Publishes a snapshot of the present weights. Nobody needs one of a round before
        `needed_from` any more."""
        published: Published = self._await("sync", "publish", needed_from)
        if self._staged is None:
            return published
        sent_at = published.spans[-1].end
        handle = OutOfBand(published.handle, self._staged(published.round), sent_at)
        return replace(published, handle=handle)

    def state(self) -> LearnerState:
        """What a checkpoint keeps of the learner."""
        return self._await("checkpoint", "state")

    def load_state(self, state: LearnerState) -> None:
        """Puts the learner where `state` was taken."""
        self._await("restore", "load_state", state)

    def _await(self, stage: str, method: str, *args: Any) -> Any:
        return self._watch.result(self._actor.submit(stage, method, *args))
