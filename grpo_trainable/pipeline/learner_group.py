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

# Seconds to wait for the news that a learner has died. When a learner dies, the other learners may
# fail before its death is known.
LOOK_FOR_LOST_S = 5.0


class LearnerGroup:
    """Calls the learners and waits for their answers.

    The pipeline collects the answers to `update`; this class collects all other answers. All
    learners get the same calls in the same order, because their work is collective. The first
    learner publishes and answers on behalf of all.
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
        """Create a group of running actors.

        Args:
            actors: The learners, in the order of their ranks.
            runtime: Waits for calls.
            deadline_s: Maximum number of seconds for which a learner with an unanswered call may
                be silent.
            staged: Returns a reference to a round's published tensors. Needed only with transports
                in which the learner sends the tensors.
            elastic: True if the trial continues after the loss of a learner other than the first.
        """
        self._actors = list(actors)
        self._elastic = elastic
        self._runtime = runtime
        self._staged = staged
        self._watch = Watch(runtime, deadline_s)

    @property
    def name(self) -> str:
        """Name of the first learner, used for the whole group."""
        return self._actors[0].name

    def update(self, rollout_batches: Sequence[Sequence[RolloutGroup]]) -> list[Call]:
        """Submit the round's k gradient steps to every learner.

        The value of each call is an `Updated`. `agreed` combines these values.
        """
        return self._submit("optimize", "update", self._shared(rollout_batches))

    def agreed(self, answers: dict[Actor, Updated]) -> Updated:
        """Return the first learner's answer to `update`, after comparing all learners' answers.

        Raises:
            ActorFailed: Two learners have taken different steps.
        """
        first, *others = self._actors
        for other in others:
            if _steps(answers[other]) != _steps(answers[first]):
                raise ActorFailed(
                    f"optimize: {other.name} has taken different gradient steps from {first.name}; "
                    "their machines compute differently, so use machines of the same kind"
                )
        return answers[first]

    def go_on_with_fewer(self, failure: ActorFailed) -> str:
        """Have the remaining learners return to the start of the round, after `update` has failed.

        Returns:
            A note for the user.

        Raises:
            ActorFailed: The group is not elastic, no learner is lost, or the first learner is lost.
                The exception is the argument `failure`.
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
        return f"continuing without {names} ({failure}); {plural(size, 'learner')} left"

    def publish(self, needed_from: int) -> Published:
        """Publish a snapshot of the current weights, and return the handle for fetching it.

        Args:
            needed_from: Snapshots of rounds before this one are no longer needed.
        """
        published: Published = self._await("sync", "publish", needed_from)
        if self._staged is None:
            return published
        sent_at = published.spans[-1].end
        handle = OutOfBand(published.handle, self._staged(published.round), sent_at)
        return replace(published, handle=handle)

    def state(self) -> LearnerState:
        """Return the learners' part of a checkpoint, gathered in this process."""
        return self._await("checkpoint", "state")

    def write(self, directory: str, seen_by: str) -> list[LearnerFiles]:
        """Have each learner write its part of a checkpoint, as `write_learner_files` does.

        This process writes the parts of learners that cannot see the directory.

        Args:
            directory: The checkpoint's directory.
            seen_by: A file in the directory. A learner that finds this file can see the directory.

        Raises:
            OSError: This process cannot write, or an elastic group has lost a learner and, with it,
                the learner's part of the checkpoint.
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
        """Have the learners continue from the files of a checkpoint.

        If a learner cannot read the files, for example because the learner is on another machine,
        the content of the files is sent to all learners.

        Args:
            directory: The checkpoint's directory.
            digests: SHA-256 of each file.
            counters: The learners' counters in the checkpoint.

        Raises:
            CheckpointError: A file has changed since it was verified.
        """
        if all(self._await_all("restore", "read_state", str(directory), digests, counters)):
            return
        policy = read_part(directory, digests, "policy")
        optimizer = read_part(directory, digests, "optimizer")
        self.load_state(LearnerState(policy=policy, optimizer=optimizer, counters=counters))

    def load_state(self, state: LearnerState) -> None:
        """Have the learners continue from `state`, which a group of any size may have returned."""
        self._await("restore", "load_state", self._shared(state))

    @contextmanager
    def naming_the_lost(self, stage: str) -> Iterator[None]:
        """If a learner failed because another learner died, raise an `ActorLost` for the dead one.

        Raises:
            ActorLost: A learner died while another one failed in this stage.
        """
        try:
            yield
        except ActorFailed as failure:
            lost = None if isinstance(failure, ActorLost) else self._lost(stage)
            if lost is None:
                raise
            raise lost from failure

    def _lost(self, stage: str) -> ActorLost | None:
        """Return an `ActorLost` for the first dead learner, or None.

        If there is only one learner, it is not checked.
        """
        actors = self._actors if len(self._actors) > 1 else ()
        deaths = (self._death_of(actor, stage) for actor in actors)
        return next(filter(None, deaths), None)

    def _death_of(self, actor: Actor, stage: str) -> ActorLost | None:
        """Return an `ActorLost` if a learner is dead, or None if it answers or stays silent."""
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
        """Return the first learner's answer, once all have answered.

        In an elastic group, this method carries on if any learner except the first is lost. The
        loss is noticed in the next round at the latest, and the group can repeat that round.
        """
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
    """Return the steps as a string, so that NaN losses compare as equal."""
    return repr((updated.version, updated.skipped_steps, updated.steps))
