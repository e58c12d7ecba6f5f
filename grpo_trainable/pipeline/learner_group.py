"""The learners of a trial behind one interface."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_trainable.pipeline.liveness import Watch
from grpo_trainable.protocol.calls import Actor, ActorFailed, ActorLost, Call, OutOfBand, Runtime
from grpo_trainable.protocol.messages import LearnerState, Published, Updated
from grpo_trainable.protocol.rollout import RolloutGroup
from grpo_trainable.storage.checkpointing import LearnerFiles, read_part, write_messages
from grpo_trainable.text import plural

# A learner whose partner is gone fails before the partner's death is known: seconds to look for it.
LOOK_FOR_LOST_S = 5.0


class LearnerGroup:
    """Calls the learners: waits for everything but `update`, which the pipeline collects.

    All are asked for the same, in the same order, since what they do is collective. The first
    publishes, and answers for all.
    """

    def __init__(
        self,
        actors: Sequence[Actor],
        runtime: Runtime,
        deadline_s: float,
        staged: Callable[[int], Any] | None = None,
        *,
        elastic: bool = False,
    ) -> None:
        """`staged(round)` gives a reference to the published tensors, where the transport has the
        learner send them. `elastic`: fewer may go on where one but the first is lost."""
        self._actors = list(actors)
        self._elastic = elastic
        self._runtime = runtime
        self._staged = staged
        self._watch = Watch(runtime, deadline_s)

    @property
    def name(self) -> str:
        """The name of the first learner, which stands for all."""
        return self._actors[0].name

    def update(self, rollout_batches: Sequence[Sequence[RolloutGroup]]) -> list[Call]:
        """Submits the round's k gradient steps to every learner. The value of each call is an
        `Updated`; `agreed` makes one of them."""
        return self._submit("optimize", "update", self._shared(rollout_batches))

    def agreed(self, answers: dict[Actor, Updated]) -> Updated:
        """What the first answers to `update`, after those of all were compared.

        Raises:
            ActorFailed: two learners have not taken the same steps.
        """
        first, *others = self._actors
        for other in others:
            if _steps(answers[other]) != _steps(answers[first]):
                raise ActorFailed(
                    f"optimize: {other.name} has taken other gradient steps than {first.name}; "
                    "their machines compute differently, use machines of one kind"
                )
        return answers[first]

    def go_on_with_fewer(self, failure: ActorFailed) -> str:
        """Has the learners that are left go back to where the round began, after `update` has
        failed. What to tell of it, in one line.

        Raises:
            ActorFailed: `failure`, where the group is not elastic, none is lost, or the first is.
        """
        if not self._elastic:
            raise failure
        lost = [actor for actor in self._actors if self._death_of(actor, "optimize")]
        if not lost or self._actors[0] in lost:
            raise failure
        for actor in lost:
            actor.kill()
            self._watch.forget(actor)
        self._actors = [actor for actor in self._actors if actor not in lost]
        self._await_all("restore", "leave")
        place = self._watch.result(self._actors[0].submit("restore", "host"))
        size = len(self._actors)
        calls = [
            actor.submit("restore", "rejoin", rank, size, place)
            for rank, actor in enumerate(self._actors)
        ]
        for call in calls:
            self._watch.result(call)
        names = " and ".join(actor.name for actor in lost)
        return f"going on without {names} ({failure}); {plural(size, 'learner')} left"

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
        """What a checkpoint keeps of the learners, all of it in this process."""
        return self._await("checkpoint", "state")

    def write(self, directory: str, seen_by: str) -> list[LearnerFiles]:
        """Has each learner write what a checkpoint keeps of it, as `write_learner_files` does, and
        writes here what a learner cannot.

        Raises:
            OSError: one of an elastic group is lost, so that its part is, or this process cannot
                write.
        """
        try:
            found = self._await_all("checkpoint", "write", directory, seen_by)
            return [
                each if each.written else self._written_here(actor, each, directory)
                for actor, each in zip(self._actors, found, strict=True)
            ]
        except ActorLost as lost:
            if not self._elastic:
                raise
            raise OSError(str(lost)) from lost

    def _written_here(self, actor: Actor, files: LearnerFiles, directory: str) -> LearnerFiles:
        messages = iter(lambda: self._next_message(actor), None)
        return replace(files, digests=write_messages(directory, messages), written=True)

    def _next_message(self, actor: Actor) -> tuple[str, bytes] | None:
        with self.naming_the_lost("checkpoint"):
            return self._watch.result(actor.submit("checkpoint", "next_message"))

    def read_state(
        self, directory: Path, digests: Mapping[str, str], counters: dict[str, Any]
    ) -> None:
        """Has the learners go on from the files of a checkpoint, and sends them the content where
        one cannot read these, as on another machine. `digests`: SHA-256 by file.

        Raises:
            CheckpointError: a file has changed since it was verified.
        """
        if all(self._await_all("restore", "read_state", str(directory), digests, counters)):
            return
        policy = read_part(directory, digests, "policy")
        optimizer = read_part(directory, digests, "optimizer")
        self.load_state(LearnerState(policy=policy, optimizer=optimizer, counters=counters))

    def load_state(self, state: LearnerState) -> None:
        """Puts the learners where `state` was taken, by however many."""
        self._await("restore", "load_state", self._shared(state))

    @contextmanager
    def naming_the_lost(self, stage: str) -> Iterator[None]:
        """Blames the death of a learner for what another one fails with in this stage.

        Raises:
            ActorLost: of the learner that is dead.
        """
        try:
            yield
        except ActorFailed as failure:
            lost = None if isinstance(failure, ActorLost) else self._lost(stage)
            if lost is None:
                raise
            raise lost from failure

    def _lost(self, stage: str) -> ActorLost | None:
        """The first death among several learners; None where all live."""
        actors = self._actors if len(self._actors) > 1 else ()
        deaths = (self._death_of(actor, stage) for actor in actors)
        return next(filter(None, deaths), None)

    def _death_of(self, actor: Actor, stage: str) -> ActorLost | None:
        question = actor.submit(stage, "progress")
        try:
            if self._runtime.wait([question], LOOK_FOR_LOST_S):
                self._runtime.result(question)
        except ActorLost as lost:
            return lost
        return None

    def _shared(self, value: Any) -> Any:
        return value if len(self._actors) == 1 else self._runtime.share(value)

    def _submit(self, stage: str, method: str, *args: Any) -> list[Call]:
        return [actor.submit(stage, method, *args) for actor in self._actors]

    def _await(self, stage: str, method: str, *args: Any) -> Any:
        """What the first answers, once all have. The loss of another one shows in the next round
        at the latest, which an elastic group can take up again."""
        with self.naming_the_lost(stage):
            first, *others = self._submit(stage, method, *args)
            answer = self._watch.result(first)
            for call in others:
                with suppress(*((ActorLost,) if self._elastic else ())):
                    self._watch.result(call)
        return answer

    def _await_all(self, stage: str, method: str, *args: Any) -> list[Any]:
        with self.naming_the_lost(stage):
            return [self._watch.result(call) for call in self._submit(stage, method, *args)]


def _steps(updated: Updated) -> str:
    """The steps as text, in which a loss that is no number is like another."""
    return repr((updated.version, updated.skipped_steps, updated.steps))
