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
class Member:
    """A generator, as far as the pipeline knows what it does and has."""

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

    member: Member


@dataclass(frozen=True, slots=True)
class Deposit:
    """Fetch published weights for the next token, concurrently with the other calls."""

    member: Member


@dataclass(frozen=True, slots=True)
class Sample:
    """Sample the responses to some prompts."""

    member: Member
    work: Work


@dataclass(frozen=True, slots=True)
class Score:
    """Score what was sampled, concurrently with the other calls."""

    member: Member
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
        """The loss of a generator ends the trial without `spawn`, and before `started` is set."""
        self.members = [Member(actor=actor) for actor in actors]
        self.absent: list[Member] = []  # lost, and no machine has room for others in their place
        self._deadline_s = config.resources.deadline_s
        self.started = False  # an actor that cannot even start is not replaced
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
        return any(member.fetching and not member.joining for member in self.members)

    @property
    def needs_from(self) -> int:
        """The round of the oldest snapshot that a generator may still use or fetch."""
        return min(member.needs_from for member in self.members)

    @property
    def version(self) -> int:
        """The oldest version that a generator last reported."""
        return min(member.version for member in self.members)

    def publish(self, published: Published) -> None:
        """Sends new weights to every generator, which takes them after its present chunk, or
        between two tokens of it. One that joins has no chunk, and takes them in turn: what it is
        asked next starts with them, though it is not waited for."""
        self._publish_s = {r: s for r, s in self._publish_s.items() if r >= self.needs_from}
        syncs = [span.seconds for span in published.spans if span.stage == "sync"]
        self._publish_s[published.round] = sum(syncs)
        self._published = published
        for member in self.members:
            if self._mid_batch and self.started and not member.joining:
                self._fetch(member, "deposit", Deposit(member))
            else:
                self._load(member)

    def forget_weights(self) -> None:
        """Lets go of the published weights, which their transport may keep as long as we do."""
        self._published = None

    def _load(self, member: Member) -> None:
        assert self._published is not None
        # Calls are worked through in order: whatever is submitted from now on starts with these.
        member.weights_round = self._published.round
        self._fetch(member, "load", Load(member))

    def _fetch(self, member: Member, method: str, record: Load | Deposit) -> None:
        assert self._published is not None
        member.fetching += 1
        handle = self._recorder.handle_for(member.actor.name, self._published.handle)
        self._calls.add(member.actor.submit("sync", method, handle), record)

    def loaded(self, member: Member, loaded: Loaded) -> None:
        """A generator has loaded weights."""
        self._fetched(member, loaded)
        self._uses(member, loaded)
        self._update_needs(member)

    def deposited(self, member: Member, deposited: Deposited) -> None:
        """A generator has weights in reach. A deposit overtakes other calls, so only chunks that
        are submitted from now on are known to start with them."""
        self._fetched(member, deposited)
        member.weights_round = max(member.weights_round, deposited.round)
        self._update_needs(member)

    def _fetched(self, member: Member, answer: Loaded | Deposited) -> None:
        member.fetching -= 1
        member.joining = False
        self._recorder.add_spans("generator", member.actor.name, answer.spans)
        self._recorder.add_sync_bytes(answer.bytes)

    def _uses(self, member: Member, loaded: Loaded) -> None:
        """A generator computes with these weights. Answers may overtake each other, weights do not:
        an older answer changes nothing."""
        if loaded.round >= member.needs_from:
            member.version, member.needs_from = loaded.version, loaded.round
        sync = Sync(
            transport=loaded.transport,
            bytes=loaded.bytes,
            publish_s=self._publish_s.get(loaded.round, 0.0),
            transfer_s=loaded.transfer_s,
            load_s=loaded.load_s,
        )
        self._recorder.add_version("generator", member.actor.name, loaded, sync)

    @staticmethod
    def _update_needs(member: Member) -> None:
        """An idle generator needs no older snapshot: its next chunk starts with the weights it
        has."""
        if not member.chunks and not member.fetching:
            member.needs_from = member.weights_round

    # ---- Work --------------------------------------------------------------------------------

    def least_busy(self) -> Member:
        """The least busy generator, of those that have joined if any has: the machine on which one
        joins may be dead."""
        return min(
            [member for member in self.members if not member.joining] or self.members,
            key=_BUSYNESS,
        )

    def free_member(self, gate: StalenessGate, rounds_ahead: int) -> Member | None:
        """The least busy generator that has room for a chunk and new enough weights for one that is
        trained on so many rounds ahead."""
        free = (
            member
            for member in self.members
            if member.chunks < CHUNKS_AHEAD
            and not member.joining
            and gate.may_generate(member.weights_round, rounds_ahead)
        )
        return min(free, key=_BUSYNESS, default=None)

    def sample(self, member: Member, work: Work) -> None:
        """Submits prompts to a generator. They are its work until they are scored."""
        member.chunks += 1
        indices = work.prompt_indices
        requests = [
            self._requests.request(work.stream, index, example)
            for index, example in zip(indices, work.examples or [None] * len(indices), strict=True)
        ]
        call = member.actor.submit(work.stage, "generate", requests)
        self._calls.add(call, Sample(member, work))

    def sampled(self, member: Member, work: Work, sampled: Sampled) -> None:
        """A generator has sampled its work, and has yet to score it."""
        self._answered(member, sampled)
        call = member.actor.submit("reward", "score", sampled.number)
        self._calls.add(call, Score(member, work))

    def scored(self, member: Member, scored: Scored) -> None:
        """A generator is done with a chunk."""
        self._answered(member, scored)
        member.chunks -= 1
        member.replaced = 0
        self._update_needs(member)

    def _answered(self, member: Member, answer: Sampled | Scored) -> None:
        self._recorder.add_spans("generator", member.actor.name, answer.spans)
        for loaded in answer.loaded:
            self._uses(member, loaded)

    # ---- Losses ------------------------------------------------------------------------------

    def replace(self, member: Member, lost: ActorLost) -> list[Work]:
        """Starts another generator, which loads the newest weights before anything else. Where no
        machine has room for it the member is absent, as long as others are left. Returns the work
        that the lost one had not finished.

        Raises:
            ActorFailed: nothing can take its place, or others have failed there as well.
        """
        if self._spawn is None or not self.started:
            raise lost
        name = member.actor.name
        if member.replaced >= REPLACEMENTS_IN_A_ROW:
            raise ActorFailed(
                f"{lost}; {name} was replaced {member.replaced} times without finishing any work"
            ) from lost
        member.actor.kill()
        unfinished = self._calls.drop(member.actor)
        member.replaced += 1
        alone = self.members == [member]
        if not self._join(member, self._deadline_s if alone else 0.0):
            if alone:
                raise ActorFailed(
                    f"{lost}; no machine has had room for another generator within "
                    f"resources.deadline_s={self._deadline_s:g} s"
                ) from lost
            self.members.remove(member)
            self.absent.append(member)
        return [call.work for call in unfinished if isinstance(call, Sample | Score)]

    def told_of(self, member: Member, lost: ActorLost) -> str:
        """What the user should hear once `replace` has replaced a generator."""
        name = member.actor.name
        if member not in self.absent:
            return f"{name} was replaced ({lost})"
        return (
            f"{name} is lost ({lost}) and no machine has room for another: "
            f"going on with {self._generators_left}"
        )

    def fill(self) -> None:
        """Starts generators in place of those that are absent, where there is room by now."""
        back = [member for member in self.absent if self._join(member, 0.0)]
        self.absent = [member for member in self.absent if member not in back]
        self.members += back
        for member in back:
            self._recorder.note(f"{member.actor.name} is back: {self._generators_left}")

    @property
    def _generators_left(self) -> str:
        return f"{len(self.members)} of {len(self.members) + len(self.absent)} generators"

    def _join(self, member: Member, patience_s: float) -> bool:
        """Starts an actor for a member that has none, and has it load the newest weights; False
        where no machine has had room for it for so long."""
        assert self._spawn is not None
        assert self._published is not None
        actor = self._spawn(member.actor.name, patience_s)
        if actor is None:
            return False
        member.actor, member.chunks, member.fetching, member.joining = actor, 0, 0, True
        # Weights under way need not be fetched again: these are the newest.
        member.needs_from = self._published.round
        self._load(member)
        return True
