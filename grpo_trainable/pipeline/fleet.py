"""The generators of a trial: what work and weights each of them has, and how one is replaced."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from grpo_trainable.config import GRPOConfig
from grpo_trainable.pipeline.open_calls import OpenCalls
from grpo_trainable.pipeline.report import Recorder
from grpo_trainable.protocol.calls import Actor, ActorFailed, ActorLost
from grpo_trainable.protocol.messages import Deposited, Loaded, Published, Sampled, Scored
from grpo_trainable.protocol.rollout import Request
from grpo_trainable.protocol.versions import StalenessGate, Sync

# Chunks at one generator at a time, until they are scored: while one runs another waits or is
# scored, so that the generator does not stand still. A third would only be sampled with older
# weights than necessary. Where a reward takes longer than sampling, generators wait for it.
CHUNKS_AHEAD = 2

# A trial fails when a generator was replaced so many times without one chunk of work in between.
REPLACEMENTS_IN_A_ROW = 3

_BUSYNESS = operator.attrgetter("chunks")


class Spawn(Protocol):
    """Starts a generator in place of the one of this name, which was killed."""

    def __call__(self, name: str, patience_s: float) -> Actor | None:
        """None where no machine has had room for it for `patience_s`."""
        ...


class RequestSource(Protocol):
    @property
    def train_size(self) -> int | None:
        """How many training examples there are, where that is known."""
        ...

    def request(
        self, stream: str, prompt_index: int, example_index: int | None = None
    ) -> Request: ...


class Work(Protocol):
    """Prompts that one call of a generator samples."""

    stream: ClassVar[str]  # "train" or "eval"
    stage: ClassVar[str]  # the call's name

    @property
    def prompt_indices(self) -> tuple[int, ...]: ...

    @property
    def examples(self) -> tuple[int, ...] | None:
        """The examples that the prompts are; None: those of their indices."""
        ...


@dataclass(kw_only=True, eq=False)
class FleetGenerator:
    """A generator as the pipeline sees it: what it does and has, whichever actor it is now."""

    actor: Actor
    chunks: int = 0  # submitted and not yet returned
    version: int = 0  # version of the weights it last reported
    weights_round: int = 0  # a chunk submitted now starts with these weights, or older ones
    fetching: int = 0  # loads and deposits submitted and not yet answered
    needs_from: int = 0  # round of the oldest weights that it may still use or fetch
    replaced: int = 0  # times since its last chunk came back
    joining: bool = False  # takes the place of a lost one, and has not answered yet


# ---- What a generator was called for -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Load:
    """Fetch published weights, in turn with the generator's other calls."""

    generator: FleetGenerator


@dataclass(frozen=True, slots=True)
class Deposit:
    """Fetch published weights for the next token, concurrently with the other calls."""

    generator: FleetGenerator


@dataclass(frozen=True, slots=True)
class Sample:
    """Sample the responses to some prompts."""

    generator: FleetGenerator
    work: Work


@dataclass(frozen=True, slots=True)
class Score:
    """Score what was sampled, concurrently with the other calls."""

    generator: FleetGenerator
    work: Work


FleetCall = Load | Deposit | Sample | Score


class Fleet:
    """Submits the calls of all generators, and takes note of their answers."""

    def __init__(
        self,
        config: GRPOConfig,
        requests: RequestSource,
        actors: Sequence[Actor],
        calls: OpenCalls[Any],
        recorder: Recorder,
        spawn: Spawn | None,
    ) -> None:
        """The loss of a generator ends the trial without `spawn` or before `has_first_weights`."""
        self.generators = [FleetGenerator(actor=actor) for actor in actors]
        # Lost, and no machine has room for others in their place.
        self.absent: list[FleetGenerator] = []
        self._deadline_s = config.resources.deadline_s
        self.has_first_weights = False  # an actor that cannot even start is not replaced
        self._mid_batch = config.in_mid_batch
        self._requests = requests
        self._calls = calls
        self._recorder = recorder
        self._spawn = spawn
        self._published: Published | None = None  # the newest weights
        self._publish_s: dict[int, float] = {}  # round of a needed snapshot -> seconds

    # ---- Weights -----------------------------------------------------------------------------

    @property
    def fetching(self) -> bool:
        """Whether a generator has yet to take in weights; one that joins has no work until then."""
        return any(generator.fetching and not generator.joining for generator in self.generators)

    @property
    def needs_from(self) -> int:
        """The round of the oldest snapshot that a generator may still use or fetch."""
        return min(generator.needs_from for generator in self.generators)

    @property
    def version(self) -> int:
        """The oldest version that a generator last reported."""
        return min(generator.version for generator in self.generators)

    def publish(self, published: Published) -> None:
        """Sends new weights to every generator, which takes them after its present chunk, or
        between two tokens of it. One that joins has no chunk, and takes them in turn: what it is
        asked next starts with them, though it is not waited for."""
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
        """Lets go of the published weights, which their transport may keep as long as we do."""
        self._published = None

    def _load(self, generator: FleetGenerator) -> None:
        assert self._published is not None
        # Calls are worked through in order: whatever is submitted from now on starts with these.
        generator.weights_round = self._published.round
        self._fetch(generator, "load", Load(generator))

    def _fetch(self, generator: FleetGenerator, method: str, record: Load | Deposit) -> None:
        assert self._published is not None
        generator.fetching += 1
        handle = self._recorder.handle_for(generator.actor.name, self._published.handle)
        self._calls.add(generator.actor.submit("sync", method, handle), record)

    def loaded(self, generator: FleetGenerator, loaded: Loaded) -> None:
        """A generator has loaded weights."""
        self._fetched(generator, loaded)
        self._uses(generator, loaded)
        self._update_needs(generator)

    def deposited(self, generator: FleetGenerator, deposited: Deposited) -> None:
        """A generator has weights in reach. A deposit overtakes other calls, so only chunks that
        are submitted from now on are known to start with them."""
        self._fetched(generator, deposited)
        generator.weights_round = max(generator.weights_round, deposited.round)
        self._update_needs(generator)

    def _fetched(self, generator: FleetGenerator, answer: Loaded | Deposited) -> None:
        generator.fetching -= 1
        generator.joining = False
        self._recorder.add_spans("generator", generator.actor.name, answer.spans)
        self._recorder.add_sync_bytes(answer.bytes)

    def _uses(self, generator: FleetGenerator, loaded: Loaded) -> None:
        """A generator computes with these weights. Answers may overtake each other, weights do not:
        an older answer changes nothing."""
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
        """An idle generator needs no older snapshot: its next chunk starts with the weights it
        has."""
        if not generator.chunks and not generator.fetching:
            generator.needs_from = generator.weights_round

    # ---- Work --------------------------------------------------------------------------------

    def least_busy(self) -> FleetGenerator:
        """The least busy generator, of those that have joined if any has: the machine on which one
        joins may be dead."""
        joined = [generator for generator in self.generators if not generator.joining]
        return min(joined or self.generators, key=_BUSYNESS)

    def free_generator(self, gate: StalenessGate, rounds_ahead: int) -> FleetGenerator | None:
        """The least busy generator that has room for a chunk and new enough weights for one that is
        trained on so many rounds ahead."""
        free = (
            generator
            for generator in self.generators
            if generator.chunks < CHUNKS_AHEAD
            and not generator.joining
            and gate.may_generate(generator.weights_round, rounds_ahead)
        )
        return min(free, key=_BUSYNESS, default=None)

    def sample(self, generator: FleetGenerator, work: Work) -> None:
        """Submits prompts to a generator. They are its work until they are scored."""
        generator.chunks += 1
        indices = work.prompt_indices
        requests = [
            self._requests.request(work.stream, index, example)
            for index, example in zip(indices, work.examples or [None] * len(indices), strict=True)
        ]
        call = generator.actor.submit(work.stage, "generate", requests)
        self._calls.add(call, Sample(generator, work))

    def sampled(self, generator: FleetGenerator, work: Work, sampled: Sampled) -> None:
        """A generator has sampled its work, and has yet to score it."""
        self._answered(generator, sampled)
        call = generator.actor.submit("reward", "score", sampled.number)
        self._calls.add(call, Score(generator, work))

    def scored(self, generator: FleetGenerator, scored: Scored) -> None:
        """A generator is done with a chunk."""
        self._answered(generator, scored)
        generator.chunks -= 1
        generator.replaced = 0
        self._update_needs(generator)

    def _answered(self, generator: FleetGenerator, answer: Sampled | Scored) -> None:
        self._recorder.add_spans("generator", generator.actor.name, answer.spans)
        for loaded in answer.loaded:
            self._uses(generator, loaded)

    # ---- Losses ------------------------------------------------------------------------------

    def replace(self, generator: FleetGenerator, lost: ActorLost) -> list[Work]:
        """Starts another generator, which loads the newest weights before anything else. Where no
        machine has room for it the generator is absent, as long as others are left. Returns the
        work that the lost one had not finished.

        Raises:
            ActorFailed: nothing can take its place, or others have failed there as well.
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
                    f"{lost}; no machine has had room for another generator within "
                    f"resources.deadline_s={self._deadline_s:g} s"
                ) from lost
            self.generators.remove(generator)
            self.absent.append(generator)
        return [call.work for call in unfinished if isinstance(call, Sample | Score)]

    def told_of(self, generator: FleetGenerator, lost: ActorLost) -> str:
        """What the user should hear once `replace` has replaced a generator."""
        name = generator.actor.name
        if generator not in self.absent:
            return f"{name} was replaced ({lost})"
        return (
            f"{name} is lost ({lost}) and no machine has room for another: "
            f"going on with {self._generators_left}"
        )

    def fill(self) -> None:
        """Starts generators in place of those that are absent, where there is room by now."""
        back = [generator for generator in self.absent if self._join(generator, 0.0)]
        self.absent = [generator for generator in self.absent if generator not in back]
        self.generators += back
        for generator in back:
            self._recorder.note(f"{generator.actor.name} is back: {self._generators_left}")

    @property
    def _generators_left(self) -> str:
        return f"{len(self.generators)} of {len(self.generators) + len(self.absent)} generators"

    def _join(self, generator: FleetGenerator, patience_s: float) -> bool:
        """Starts an actor for a generator that has none, and has it load the newest weights; False
        where no machine has had room for it for so long."""
        assert self._spawn is not None
        assert self._published is not None
        actor = self._spawn(generator.actor.name, patience_s)
        if actor is None:
            return False
        generator.actor, generator.chunks, generator.fetching, generator.joining = actor, 0, 0, True
        # Weights under way need not be fetched again: these are the newest.
        generator.needs_from = self._published.round
        self._load(generator)
        return True
