"""The generators of a trial: the work and weights of each, and replacements for lost ones."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from grpo_trainable.config import GRPOConfig
from grpo_trainable.pipeline.open_calls import OpenCalls
from grpo_trainable.pipeline.report import Recorder
from grpo_trainable.pipeline.rubric_buffers import RubricBuffers
from grpo_trainable.protocol.calls import Actor, ActorFailed, ActorLost
from grpo_trainable.protocol.messages import (
    Cancelled,
    Deposited,
    Loaded,
    Published,
    Sampled,
    Scored,
)
from grpo_trainable.protocol.rollout import Request
from grpo_trainable.protocol.versions import StalenessGate, Sync
from grpo_trainable.text import plural

# Maximum number of chunks per generator that are submitted but not yet scored. While one chunk is
# sampled, another waits or is scored. So a generator is idle only if scoring takes longer than
# sampling. If a third chunk were submitted this early, it would be sampled with needlessly old
# weights.
CHUNKS_AHEAD = 2

# Maximum number of times in a row that a generator is replaced without finishing a chunk. If that
# generator is then lost once more, the trial ends.
REPLACEMENTS_IN_A_ROW = 3

# A chunk may be given up only after a generator has sampled this number of chunks that began later.
# With a value of 1, a chunk of usual length would be given up whenever a short chunk overtakes it.
LAPS = 2

_BUSYNESS = operator.attrgetter("chunks")


class Spawn(Protocol):
    """Starts a new generator, under the same name, in place of a killed generator."""

    def __call__(self, name: str, patience_s: float) -> Actor | None:
        """Return the new actor, or None if no machine has room for it within `patience_s`."""
        ...


class RequestSource(Protocol):
    """Makes requests from prompt indices."""

    @property
    def train_size(self) -> int | None:
        """Number of training examples, or None if it is unknown."""
        ...

    def request(self, stream: str, prompt_index: int, example_index: int | None = None) -> Request:
        """Return the request for a prompt of a stream.

        Without `example_index`, `prompt_index` is also the index of the example.
        """
        ...


class Work(Protocol):
    """Prompts whose responses a generator samples in one call."""

    stream: ClassVar[str]  # "train" or "eval"
    stage: ClassVar[str]  # the call's name

    @property
    def prompt_indices(self) -> tuple[int, ...]:
        """Indices of the prompts in their stream."""
        ...

    @property
    def examples(self) -> tuple[int, ...] | None:
        """Indices of the prompts' examples. None: the same as `prompt_indices`."""
        ...


@dataclass(kw_only=True, eq=False)
class FleetGenerator:
    """A generator as the pipeline sees it. Its actor changes when the generator is replaced."""

    actor: Actor
    chunks: int = 0  # number of chunks submitted but not yet scored
    version: int = 0  # version of the weights that the generator last reported
    weights_round: int = 0  # a chunk submitted now starts with weights of this round or a later one
    fetching: int = 0  # number of `Load` and `Deposit` calls submitted but not yet answered
    needs_from: int = 0  # round of the oldest weights that the generator may still use or fetch
    replaced: int = 0  # number of replacements since the generator's last chunk came back
    joining: bool = False  # True if the actor is a replacement that has not answered yet
    sampling: Work | None = None  # the chunk that is being sampled
    began: int = 0  # number of chunks that the fleet had submitted when `sampling` began
    # The values of `began` for the last training chunks that the generator has sampled.
    laps: deque[int] = field(default_factory=lambda: deque([0] * LAPS, maxlen=LAPS))
    cancelled: Work | None = None  # the chunk for which the last `Cancel` call was submitted


# ---- Records of the calls of a generator ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Load:
    """A call that fetches published weights. The call runs after the generator's earlier calls."""

    generator: FleetGenerator


@dataclass(frozen=True, slots=True)
class Deposit:
    """A concurrent call that fetches published weights, for use from the next token on."""

    generator: FleetGenerator


@dataclass(frozen=True, slots=True)
class Sample:
    """A call that samples the responses to some prompts."""

    generator: FleetGenerator
    work: Work


@dataclass(frozen=True, slots=True)
class Score:
    """A concurrent call that scores sampled responses."""

    generator: FleetGenerator
    work: Work


@dataclass(frozen=True, slots=True)
class Cancel:
    """A concurrent call that ends the sampling of a chunk early."""

    generator: FleetGenerator


FleetCall = Load | Deposit | Sample | Score | Cancel


class Fleet:
    """Submits the calls of all generators and processes their answers."""

    def __init__(
        self,
        config: GRPOConfig,
        requests: RequestSource,
        actors: Sequence[Actor],
        calls: OpenCalls[Any],
        recorder: Recorder,
        spawn: Spawn | None,
        rubrics: RubricBuffers,
    ) -> None:
        """Create a fleet whose generators have no weights yet.

        Args:
            config: The trial's settings.
            requests: Makes requests from prompt indices.
            actors: The generators.
            calls: Receives every call that is submitted.
            recorder: Receives spans, changes of weights and notes.
            spawn: Starts a generator in place of a lost one. The loss of a generator ends the trial
                if `spawn` is None, or if the loss happens before `has_first_weights` is True.
            rubrics: The rubrics that requests carry.
        """
        self.generators = [FleetGenerator(actor=actor) for actor in actors]
        # Lost generators that have not been replaced yet, because no machine has room.
        self.absent: list[FleetGenerator] = []
        self._deadline_s = config.resources.deadline_s
        self.has_first_weights = False  # while this is False, a lost generator is not replaced
        self._mid_batch = config.in_mid_batch
        self._requests = requests
        self._calls = calls
        self._recorder = recorder
        self._spawn = spawn
        self._rubrics = rubrics
        self._submitted = 0  # number of chunks submitted so far
        self._published: Published | None = None  # the newest weights
        # Round of each snapshot that is still in use -> seconds that its publication took.
        self._publish_s: dict[int, float] = {}

    # ---- Weights -----------------------------------------------------------------------------

    @property
    def fetching(self) -> bool:
        """True if a generator has not yet fetched weights that were sent to it.

        Joining generators (replacements that have not answered yet) do not count, because they load
        weights before they do any work.
        """
        return any(generator.fetching and not generator.joining for generator in self.generators)

    @property
    def needs_from(self) -> int:
        """Round of the oldest snapshot that a generator may still use or fetch."""
        return min(generator.needs_from for generator in self.generators)

    @property
    def version(self) -> int:
        """The oldest of the versions that the generators last reported."""
        return min(generator.version for generator in self.generators)

    def publish(self, published: Published) -> None:
        """Send new weights to every generator.

        A generator switches to the new weights after its current chunk or, with a mid-batch
        `weight_update`, between two tokens. A joining generator (a replacement that has not
        answered yet) has no chunk, so it always loads the weights with an ordinary call. The
        generator's next call starts with the new weights, but the pipeline does not wait until the
        weights are loaded.
        """
        self._publish_s = {r: s for r, s in self._publish_s.items() if r >= self.needs_from}
        syncs = [span.seconds for span in published.spans if span.stage == "sync"]
        self._publish_s[published.round] = sum(syncs)
        self._published = published
        for generator in self.generators:
            if self._mid_batch and self.has_first_weights and not generator.joining:
                self._fetch(generator, "deposit", Deposit(generator))
            else:
                self._load(generator)

    def forget_weights(self) -> None:
        """Release the published weights.

        A transport may keep the snapshot in memory for as long as the fleet refers to it.
        """
        self._published = None

    def _load(self, generator: FleetGenerator) -> None:
        assert self._published is not None
        # A generator works through its calls in order, so every call submitted from now on starts
        # with these weights.
        generator.weights_round = self._published.round
        self._fetch(generator, "load", Load(generator))

    def _fetch(self, generator: FleetGenerator, method: str, record: Load | Deposit) -> None:
        assert self._published is not None
        generator.fetching += 1
        handle = self._recorder.handle_for(generator.actor.name, self._published.handle)
        self._calls.add(generator.actor.submit("sync", method, handle), record)

    def loaded(self, generator: FleetGenerator, loaded: Loaded) -> None:
        """Record that a generator has loaded weights."""
        self._fetched(generator, loaded)
        self._uses(generator, loaded)
        self._update_needs(generator)
        self._note_sampling(generator)

    def deposited(self, generator: FleetGenerator, deposited: Deposited) -> None:
        """Record that a deposit has put new weights into a generator's mailbox.

        A deposit may overtake other calls. So only chunks submitted from now on are sure to start
        with the new weights.
        """
        self._fetched(generator, deposited)
        generator.weights_round = max(generator.weights_round, deposited.round)
        self._update_needs(generator)

    def _fetched(self, generator: FleetGenerator, answer: Loaded | Deposited) -> None:
        generator.fetching -= 1
        generator.joining = False
        self._recorder.add_spans("generator", generator.actor.name, answer.spans)
        self._recorder.add_sync_bytes(answer.bytes)

    def _uses(self, generator: FleetGenerator, loaded: Loaded) -> None:
        """Record that a generator now computes with the weights that it has loaded.

        Answers may arrive out of order, although weights never do. So an answer about older weights
        leaves the version unchanged.
        """
        if loaded.round >= generator.needs_from:
            generator.version, generator.needs_from = loaded.version, loaded.round
        sync = Sync(
            transport=loaded.transport,
            bytes=loaded.bytes,
            publish_s=self._publish_s.get(loaded.round, 0.0),
            transfer_s=loaded.transfer_s,
            load_s=loaded.load_s,
        )
        self._recorder.add_version("generator", generator.actor.name, loaded, sync)

    @staticmethod
    def _update_needs(generator: FleetGenerator) -> None:
        """If the generator is idle, set `needs_from` to the round of the weights it will use."""
        if not generator.chunks and not generator.fetching:
            generator.needs_from = generator.weights_round

    # ---- Work --------------------------------------------------------------------------------

    def least_busy(self) -> FleetGenerator:
        """Return the least busy generator.

        A joining generator, whose machine may be dead, is returned only if all generators are
        joining.
        """
        joined = [generator for generator in self.generators if not generator.joining]
        return min(joined or self.generators, key=_BUSYNESS)

    def free_generator(self, gate: StalenessGate, rounds_ahead: int) -> FleetGenerator | None:
        """Return the least busy generator that may sample another chunk, or None.

        Args:
            gate: Decides whether a generator's weights are recent enough.
            rounds_ahead: Number of rounds still to be run before the round that trains on the
                chunk.
        """
        free = (
            generator
            for generator in self.generators
            if generator.chunks < CHUNKS_AHEAD
            and not generator.joining
            and gate.may_generate(generator.weights_round, rounds_ahead)
        )
        return min(free, key=_BUSYNESS, default=None)

    def sample(self, generator: FleetGenerator, work: Work) -> None:
        """Submit a chunk to a generator. The chunk is the generator's work until it is scored."""
        generator.chunks += 1
        self._submitted += 1
        indices = work.prompt_indices
        requests = [
            self._rubrics.attach(self._requests.request(work.stream, index, example))
            for index, example in zip(indices, work.examples or [None] * len(indices), strict=True)
        ]
        call = generator.actor.submit(work.stage, "generate", requests)
        self._calls.add(call, Sample(generator, work))
        self._note_sampling(generator)

    def sampled(self, generator: FleetGenerator, work: Work, sampled: Sampled) -> None:
        """Submit a call that scores the responses that a generator has sampled."""
        self._answered(generator, sampled)
        call = generator.actor.submit("reward", "score", sampled.number)
        self._calls.add(call, Score(generator, work))

    def scored(self, generator: FleetGenerator, scored: Scored) -> None:
        """Record that a generator has finished a chunk."""
        self._answered(generator, scored)
        generator.chunks -= 1
        generator.replaced = 0
        self._update_needs(generator)

    def passed(self) -> list[tuple[FleetGenerator, Work]]:
        """Return the chunks that are being sampled and that a generator without work has passed.

        A generator has passed a chunk if the last `LAPS` chunks that it sampled began after that
        chunk. The number of submitted chunks serves as the clock: if no chunk was submitted between
        the beginnings of two chunks, neither began after the other.
        """
        idle = [g for g in self.generators if not g.chunks and not g.joining]
        before = max((generator.laps[0] for generator in idle), default=0)
        return [
            (generator, generator.sampling)
            for generator in self.generators
            if generator.sampling is not None and generator.began < before
        ]

    def cancel(self, generator: FleetGenerator, work: Work) -> None:
        """Ask a generator, once, to end the sampling of a chunk.

        The generator answers the call that samples the chunk with a `Cancelled`, unless the
        responses were complete before it learned of the cancellation.
        """
        if generator.cancelled is work:
            return
        generator.cancelled = work
        call = generator.actor.submit("cancel", "cancel", work.prompt_indices[0])
        self._calls.add(call, Cancel(generator))

    def ended_early(self, generator: FleetGenerator, cancelled: Cancelled) -> None:
        """Record that a generator has ended the sampling of a chunk without a result."""
        self._answered(generator, cancelled)
        generator.chunks -= 1
        self._update_needs(generator)

    def _answered(self, generator: FleetGenerator, answer: Sampled | Scored | Cancelled) -> None:
        self._recorder.add_spans("generator", generator.actor.name, answer.spans)
        for loaded in answer.loaded:
            self._uses(generator, loaded)
        ended, began = generator.sampling, generator.began
        self._note_sampling(generator)
        if ended is None or ended is generator.sampling or isinstance(answer, Cancelled):
            return
        if ended.stream == "train":
            generator.laps.append(began)

    def _note_sampling(self, generator: FleetGenerator) -> None:
        """Record which chunk a generator samples now, and when that chunk began."""
        # A generator works through its calls in order, except for concurrent ones.
        calls = self._calls.records_of(generator.actor)
        first = next((call for call in calls if isinstance(call, Load | Sample)), None)
        work = first.work if isinstance(first, Sample) else None
        if work is not generator.sampling:
            generator.sampling, generator.began = work, self._submitted

    # ---- Losses ------------------------------------------------------------------------------

    def replace(self, generator: FleetGenerator, lost: ActorLost) -> list[Work]:
        """Replace a generator, and return the work that the lost actor had not finished.

        The new actor loads the newest weights before anything else. If no machine has room for the
        new actor, but other generators are left, the lost generator is absent until there is room.

        Args:
            generator: The generator whose actor was lost.
            lost: The error that reports the loss. Error messages quote it.

        Raises:
            ActorFailed: The generator cannot be replaced, or its replacements have failed
                repeatedly.
        """
        if self._spawn is None or not self.has_first_weights:
            raise lost
        name = generator.actor.name
        if generator.replaced >= REPLACEMENTS_IN_A_ROW:
            raise ActorFailed(
                f"{lost}; {name} was replaced {generator.replaced} times without finishing any work"
            ) from lost
        generator.actor.kill()
        unfinished = self._calls.drop(generator.actor)
        generator.replaced += 1
        alone = self.generators == [generator]
        if not self._join(generator, self._deadline_s if alone else 0.0):
            if alone:
                raise ActorFailed(
                    f"{lost}; no machine had room for another generator within "
                    f"resources.deadline_s={self._deadline_s:g} s"
                ) from lost
            self.generators.remove(generator)
            self.absent.append(generator)
        return [call.work for call in unfinished if isinstance(call, Sample | Score)]

    def told_of(self, generator: FleetGenerator, lost: ActorLost) -> str:
        """Return a note about the loss of a generator. Call this after `replace`."""
        name = generator.actor.name
        if generator not in self.absent:
            return f"{name} was replaced ({lost})"
        return (
            f"{name} is lost ({lost}) and no machine has room for another: "
            f"continuing with {self._generators_left}"
        )

    def fill(self) -> None:
        """Start actors for absent generators if machines now have room for them."""
        back = [generator for generator in self.absent if self._join(generator, 0.0)]
        self.absent = [generator for generator in self.absent if generator not in back]
        self.generators += back
        for generator in back:
            self._recorder.note(f"{generator.actor.name} is back: {self._generators_left}")

    @property
    def _generators_left(self) -> str:
        wanted = len(self.generators) + len(self.absent)
        return f"{len(self.generators)} of {plural(wanted, 'generator')}"

    def _join(self, generator: FleetGenerator, patience_s: float) -> bool:
        """Start an actor for a generator, and have the actor load the newest weights.

        Return False if no machine has room for the actor within `patience_s`.
        """
        assert self._spawn is not None
        assert self._published is not None
        actor = self._spawn(generator.actor.name, patience_s)
        if actor is None:
            return False
        generator.actor, generator.chunks, generator.fetching, generator.joining = actor, 0, 0, True
        generator.sampling = None
        # The new actor loads the newest weights, so it needs no older weights.
        generator.needs_from = self._published.round
        self._load(generator)
        return True
