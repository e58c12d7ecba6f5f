"""One round over actor handles, synchronous and asynchronous alike.

Synchronous is `lag = 0`: the gate then admits a round's rollouts only once the weights of the
round before stand in the generators. With `lag >= 1` the generators are already at work on the
next rounds while the learner trains, across calls of `run_round`.

Nothing here imports Ray: actors, calls, waiting and the time come in from outside.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from grpo_trainable.calls import (
    Actor,
    ActorFailed,
    ActorLost,
    Runtime,
    no_answer,
)
from grpo_trainable.config import GRPOConfig, without_retired
from grpo_trainable.learner_group import LearnerGroup
from grpo_trainable.liveness import Watch
from grpo_trainable.messages import (
    Deposited,
    GradientStep,
    Loaded,
    SampledUnit,
    ScoredUnit,
    Updated,
)
from grpo_trainable.metrics import ActorSpan, rollout_metrics, stage_seconds
from grpo_trainable.replay_buffer import ReplayBuffer
from grpo_trainable.rollout import Request, RolloutGroup
from grpo_trainable.timers import Span, covered_seconds, now
from grpo_trainable.versions import StalenessGate, Sync, VersionChange

# Units at one generator at a time, until they are scored: while one runs another waits, so that the
# generator does not stand still, or is scored. More would only be sampled with older weights than
# necessary. Where a reward takes longer than sampling, generators wait for it.
UNITS_AHEAD = 2

# Ends the key of a draw from the replay buffer: numpy fills shorter keys up with zeros, so that no
# other draw has it.
REPLAY = 1

# Failed rewards are a share of the responses to at least so many prompts, though fewer be scored.
JUDGED_PROMPTS = 32

# Times that a generator is replaced without one unit of work in between; then the trial fails.
REPLACEMENTS_IN_A_ROW = 3


class RequestSource(Protocol):
    def request(self, stream: str, cursor: int) -> Request: ...


@dataclass(kw_only=True)
class Counts:
    """In groups, over the trial. requested = trained + dropped + waiting + in flight."""

    requested: int = 0
    redispatched: int = 0  # asked for once more, because their generator was lost
    trained: int = 0  # at least once
    dropped_stale: int = 0
    dropped_reward: int = 0
    dropped_lost: int = 0
    dropped_zero_advantage: int = 0
    reward_errors: int = 0  # responses
    scored_responses: int = 0
    checkpoint_failures: int = 0
    skipped_rounds: int = 0  # with nothing to train on
    sampled_responses: int = 0  # of training groups
    sampled_tokens: int = 0

    @property
    def dropped(self) -> int:
        return (
            self.dropped_stale
            + self.dropped_reward
            + self.dropped_lost
            + self.dropped_zero_advantage
        )


@dataclass(kw_only=True)
class Evaluation:
    """Held-out rewards: those of round 0, and the latest."""

    first: float
    mean: float  # over the prompts that could be scored
    round: int
    unscored: int = 0  # prompts that could not


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """The responses of one evaluation."""

    round: int  # rounds trained before it
    groups: list[RolloutGroup]  # by cursor


@dataclass(frozen=True, kw_only=True)
class RoundReport:
    """What `run_round` has to tell."""

    round: int  # rounds trained so far
    last: bool  # the trial is over
    start: float  # seconds since 1970
    end: float
    metrics: dict[str, float]
    groups: list[RolloutGroup]  # those trained on
    updated: Updated
    spans: list[ActorSpan]
    versions: list[VersionChange]
    evaluations: list[HeldOut]
    notes: list[str]  # what the user should hear of, in one line each


@dataclass(kw_only=True, eq=False)
class _Generator:
    actor: Actor
    units: int = 0  # submitted and not yet returned
    version: int = 0  # of the weights it last reported
    weights_round: int = 0  # of the weights that a unit submitted now will start with, or older
    fetching: int = 0  # loads and deposits submitted and not yet answered
    needs_from: int = 0  # round of the oldest weights that it may still use or fetch
    replaced: int = 0  # times since its last unit came back


@dataclass(frozen=True, kw_only=True)
class _Open:
    """A call that was submitted and not yet collected."""

    generator: _Generator | None  # None: the learner
    collect: Callable[[Any], None]  # takes its value
    again: Callable[[], None]  # asks for it once more, when its generator was lost
    beside: bool = False  # in a thread of its own


@dataclass(kw_only=True)
class _Round:
    """What accumulates while a round runs."""

    spans: list[ActorSpan] = field(default_factory=list)
    versions: list[VersionChange] = field(default_factory=list)
    evaluations: list[HeldOut] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    sync_bytes: int = 0


class Pipeline:
    """Decides what runs when.

    Units are numbered: unit u is a fixed slice of a rollout batch (`GRPOConfig.units`), the same in
    every run, whoever samples it. A unit is outstanding from its dispatch until its groups arrive.
    Unit 0 begins at a cursor and a round that are 0 unless the trial went on from a state of which
    other settings had numbered the units.
    """

    def __init__(
        self,
        config: GRPOConfig,
        requests: RequestSource,
        generators: Sequence[Actor],
        learners: LearnerGroup,
        runtime: Runtime,
        clock: Callable[[], float] = now,
        spawn: Callable[[str], Actor] | None = None,
    ) -> None:
        """`clock` tells the time of the actors' spans: seconds since 1970. `spawn` starts a
        generator in place of the one of that name, which was killed; without it, as where the
        learner is lost with it, the loss of one is the end."""
        self.config = config
        self.gate = StalenessGate(lag=config.lag, max_age=config.max_age)
        self.buffer = ReplayBuffer(config.buffer_sampling, config.buffer.fresh_fraction)
        self.counts = Counts()
        self._units = config.units  # of one rollout batch
        self.evaluation: Evaluation | None = None
        self._requests = requests
        self._generators = [_Generator(actor=actor) for actor in generators]
        self._learners = learners
        self._runtime = runtime
        self._watch = Watch(runtime, config.resources.deadline_s)
        self._clock = clock
        self._spawn = spawn
        self._started = False  # an actor that cannot even start is not replaced
        self._open: dict[Any, _Open] = {}
        self._published: Any = None  # the transport's handle of the newest weights
        self._publish_s: dict[int, float] = {}  # by round, of snapshots that are needed
        self._first_sync_s = 0.0  # what the first one took, with all that it sets up
        self._published_round = 0
        self._version = 0
        self._first_round = self._first_cursor = 0  # of unit 0
        self._next_unit = 0
        self._again: list[int] = []  # units to request again after a restore
        self._outstanding: set[int] = set()
        self._holding = True  # whether units that the gate would admit are held back
        # Mean (format, answer) rewards of the groups in the buffer, by cursor.
        self._partial_rewards: dict[int, tuple[float, float]] = {}
        self._round = _Round()
        self._stopped = False  # before its rounds were over

    def abandon(self) -> None:
        """Another takes over its actors: what was published and what is under way is let go. Only
        what runs beside their calls is waited for: it is not in order with what they do next."""
        for call, item in self._open.items():
            if item.beside:
                with contextlib.suppress(ActorFailed):
                    self._watch.result(call)
        self._open = {}
        self._published = None

    @property
    def ended(self) -> bool:
        """Whether no round follows."""
        return self._stopped or self.gate.learner_round >= self.config.rounds

    # ---- The round ---------------------------------------------------------------------------

    def start(self, set_up_s: float = 0.0) -> None:
        """Brings the learner's weights into every generator; before the first round. `set_up_s`:
        what it took to set the transport up."""
        self._publish()
        self._finish_everything()
        syncs = [change.sync for change in self._round.versions if change.sync is not None]
        self._first_sync_s = set_up_s + max(sync.seconds for sync in syncs)
        self._round = _Round(versions=self._round.versions, notes=self._round.notes)
        self._started = True

    def run_round(self) -> RoundReport:
        """Rollouts in, k gradient steps, weights out; and evaluation when it is due.

        Raises:
            ActorFailed: an actor died, raised, or did not answer in time.
        """
        start = self._clock()
        round_ = self.gate.learner_round
        if self.ended:
            raise RuntimeError(f"this trial ended after round {round_} of {self.config.rounds}")
        if self.evaluation is None:
            self._evaluate()
        # Not before: what is sampled beside an evaluation would be in no wall-clock.
        self._holding = False
        self._dispatch()
        self._work_until(lambda: self._arrived(round_))
        groups = self._take(round_)
        updated = self._update(groups)
        flat = [group for batch in groups for group in batch]
        row = {}
        if flat:
            row = rollout_metrics(flat, round_)
            row["version/gap_max"] = float(self._version - min(g.oldest_version for g in flat))
        self._version = updated.version
        self.gate.learner_round += 1
        self._age_buffer()
        self._publish()
        # In a synchronous run nothing outlives the round; in any, no rollout delays an evaluation
        # that is not under way already.
        self._holding = True
        if self.config.lag == 0:
            self._finish_everything()
        self._stopped = self._drifted(updated)
        last = self.ended
        if last or self.gate.learner_round % self.config.eval.every == 0:
            self._evaluate()
        if last:
            self._finish_everything()
        elif self.config.lag > 0:
            self._holding = False
            self._dispatch()
        return self._report(start, flat, row, updated, last=last)

    def _drifted(self, updated: Updated) -> bool:
        """Whether the policy is so far from the reference that the trial ends."""
        limit = self.config.callbacks.kl_stop
        drift = updated.kl.get("reference")  # a skipped round has none
        return limit is not None and drift is not None and drift.k1 > limit

    def _take(self, round_: int) -> list[list[RolloutGroup]]:
        """The rollout batches of a round, past the gate for the second time; without those of which
        no group is left. That may be all of them: only the error rate ends a trial."""
        batches = []
        count = self.config.buffer.sample_batches * self.config.rollout.prompts
        first = (round_ - self._first_round) * self._batches_per_round
        oldest = self._oldest_batch(round_)
        for lane in range(self._batches_per_round):
            fresh = self._batch_cursors(first + lane)
            # The rollout batches that had its place in the rounds before.
            older = [
                cursor
                for batch in range(oldest + lane, first + lane, self._batches_per_round)
                for cursor in self._batch_cursors(batch)
            ]
            rng = np.random.default_rng((self.config.seed, round_, lane, 0, REPLAY))
            drawn = self.buffer.draw(fresh, older, count, self.gate, rng)
            self.counts.dropped_stale += drawn.stale
            self.counts.trained += drawn.first_used
            if drawn.groups:
                batches.append(drawn.groups)
        if len(batches) < self._batches_per_round:
            self._note_missing(len(batches))
        return batches

    def _note_missing(self, batches: int) -> None:
        """`batches`: how many rollout batches of this round have a group to train on."""
        why = "had no group left to train on (rewards failed, or groups were stale)"
        if batches:
            count = self._batches_per_round
            note = f"{count - batches} of {count} rollout batches {why} and were left out"
        else:
            self.counts.skipped_rounds += 1
            note = f"the round {why} and took no gradient step"
        self._round.notes.append(note)

    def _oldest_batch(self, round_: int) -> int:
        """The first rollout batch that a round may still train on."""
        kept = round_ - self._first_round - (self.config.buffer_capacity - 1)
        return max(0, kept * self._batches_per_round)

    def _age_buffer(self) -> None:
        """What the next round may not train on goes."""
        before = self._batch_cursors(self._oldest_batch(self.gate.learner_round))[0]
        self.counts.dropped_stale += self.buffer.evict(before, self.gate)

    def _update(self, batches: list[list[RolloutGroup]]) -> Updated:
        """The learner's k steps; generators' answers are taken in meanwhile."""
        values: list[Updated] = []
        self._open[self._learners.update(batches)] = _Open(
            generator=None, collect=values.append, again=_never
        )
        self._work_until(lambda: bool(values))
        (updated,) = values
        self._add_spans("learner", self._learners.name, updated.spans)
        self._add_version("learner", self._learners.name, updated)
        return updated

    def _publish(self) -> None:
        """New weights are out; every generator takes them after the unit it is at."""
        needed_from = min(generator.needs_from for generator in self._generators)
        published = self._learners.publish(needed_from)
        self._publish_s = {r: s for r, s in self._publish_s.items() if r >= needed_from}
        syncs = [span.seconds for span in published.spans if span.stage == "sync"]
        self._publish_s[published.round] = sum(syncs)
        self._add_spans("learner", self._learners.name, published.spans)
        self._published_round, self._version = published.round, published.version
        self._published = published.handle
        for generator in self._generators:
            if self.config.in_mid_batch and self._started:
                self._deposit(generator)
            else:
                self._load(generator)

    def _deposit(self, generator: _Generator) -> None:
        """Weights for between two tokens. Not in order with the generator's other calls: only when
        they lie there, a unit submitted from then on starts with them."""

        def collect(deposited: Deposited) -> None:
            generator.fetching -= 1
            self._add_spans("generator", generator.actor.name, deposited.spans)
            generator.weights_round = max(generator.weights_round, deposited.round)
            self._round.sync_bytes += deposited.bytes
            self._rested(generator)

        self._fetch(generator, "deposit", collect)

    def _load(self, generator: _Generator) -> None:
        def collect(loaded: Loaded) -> None:
            generator.fetching -= 1
            self._add_spans("generator", generator.actor.name, loaded.spans)
            self._round.sync_bytes += loaded.bytes
            self._took(generator, loaded)
            self._rested(generator)

        generator.weights_round = self._published_round
        self._fetch(generator, "load", collect)

    def _fetch(self, generator: _Generator, method: str, collect: Callable[[Any], None]) -> None:
        generator.fetching += 1
        call = generator.actor.submit("sync", method, self._published)
        # Not asked for again: a replacement loads the newest weights first of all.
        self._open[call] = _Open(
            generator=generator, collect=collect, again=lambda: None, beside=method == "deposit"
        )

    def _took(self, generator: _Generator, loaded: Loaded) -> None:
        """These weights stand in it; it goes forward, though answers may overtake each other."""
        if loaded.round >= generator.needs_from:
            generator.version, generator.needs_from = loaded.version, loaded.round
        sync = Sync(
            transport=loaded.transport,
            bytes=loaded.bytes,
            publish_s=self._publish_s.get(loaded.round, 0.0),
            transfer_s=loaded.transfer_s,
            load_s=loaded.load_s,
        )
        self._add_version("generator", generator.actor.name, loaded, sync)

    @staticmethod
    def _rested(generator: _Generator) -> None:
        """With nothing to do it uses no weights, and it begins with those that it has by now."""
        if not generator.units and not generator.fetching:
            generator.needs_from = generator.weights_round

    # ---- Rollouts ----------------------------------------------------------------------------

    @property
    def _batches_per_round(self) -> int:
        return self.config.batches_per_round

    @property
    def _units_per_round(self) -> int:
        return self._batches_per_round * len(self._units)

    def _round_of(self, unit: int) -> int:
        return self._first_round + unit // self._units_per_round

    def _batch_cursors(self, batch: int) -> range:
        first = self._first_cursor + batch * self.config.rollout.prompts
        return range(first, first + self.config.rollout.prompts)

    def _cursors(self, unit: int) -> range:
        batch, place = divmod(unit, len(self._units))
        return self._batch_cursors(batch)[self._units[place]]

    def _arrived(self, round_: int) -> bool:
        """Whether every group of a round was sampled, or dropped on the way."""
        end = (round_ + 1 - self._first_round) * self._units_per_round
        asked = self._next_unit >= end and all(unit >= end for unit in self._again)
        return asked and all(unit >= end for unit in self._outstanding)

    def _dispatch(self) -> None:
        """Submits every unit that the gate admits and that a generator has room for."""
        while not self._holding:
            unit = self._again[0] if self._again else self._next_unit
            round_ = self._round_of(unit)
            ahead = round_ - self.gate.learner_round
            if round_ >= self.config.rounds:
                return
            able = [
                generator
                for generator in self._generators
                if generator.units < UNITS_AHEAD
                and self.gate.may_generate(generator.weights_round, ahead)
            ]
            if not able:
                return
            generator = _least_busy(able)
            if self._again:
                self._again.pop(0)
            else:
                self._next_unit += 1
                self.counts.requested += len(self._cursors(unit))
            self._outstanding.add(unit)
            requests = [self._requests.request("train", c) for c in self._cursors(unit)]
            self._generate(
                generator,
                "rollout",
                requests,
                done=lambda scored, unit=unit: self._sampled(unit, scored),
                again=lambda unit=unit: self._lost(unit),
            )

    def _generate(
        self,
        generator: _Generator,
        stage: str,
        requests: Sequence[Request],
        *,
        done: Callable[[ScoredUnit], None],
        again: Callable[[], None],
    ) -> None:
        generator.units += 1

        def collect(unit: SampledUnit | ScoredUnit) -> None:
            self._add_spans("generator", generator.actor.name, unit.spans)
            for loaded in unit.loaded:
                self._took(generator, loaded)
            if isinstance(unit, SampledUnit):
                submit("reward", "score", unit, beside=True)
                return
            # Until here the unit counts as its generator's, which samples the next meanwhile.
            generator.units -= 1
            generator.replaced = 0
            self._rested(generator)
            done(unit)

        def submit(stage: str, method: str, work: Any, *, beside: bool) -> None:
            call = generator.actor.submit(stage, method, work)
            self._open[call] = _Open(
                generator=generator, collect=collect, again=again, beside=beside
            )

        submit(stage, "generate", requests, beside=False)

    def _lost(self, unit: int) -> None:
        """A unit whose generator is gone is next in turn."""
        self._outstanding.remove(unit)
        self._again = sorted((*self._again, unit))
        self.counts.redispatched += len(self._cursors(unit))

    def _sampled(self, unit: int, scored: ScoredUnit) -> None:
        self._outstanding.remove(unit)
        self._count_reward_errors(scored, len(self._cursors(unit)))
        self.buffer.add(scored.groups)
        self.counts.dropped_reward += len(scored.unscored)
        self.counts.sampled_responses += sum(len(g.response_ids) for g in scored.groups)
        self.counts.sampled_tokens += sum(group.num_tokens for group in scored.groups)
        rewards = zip(scored.groups, scored.format_rewards, scored.answer_rewards, strict=True)
        self._partial_rewards.update(
            {g.prompt_index: (format_, answer) for g, format_, answer in rewards}
        )

    def _count_reward_errors(self, scored: ScoredUnit, prompts: int) -> None:
        """Of training; an evaluation is judged by itself."""
        group_size = self.config.rollout.group_size
        counts = self.counts
        counts.reward_errors += scored.reward_errors
        counts.scored_responses += prompts * group_size
        # A few failures among the first responses say nothing of the rate.
        least = max(JUDGED_PROMPTS, self.config.prompts_per_round) * group_size
        told = f"reward: the reward function failed on {counts.reward_errors} of "
        told += f"{counts.scored_responses} responses"
        total = max(counts.scored_responses, least)
        self._judge(told, counts.reward_errors, total, scored.unscored)

    def _judge(
        self, told: str, errors: int, total: int, unscored: Sequence[tuple[int, str]]
    ) -> None:
        """Ends the trial where more rewards failed than the task allows. `unscored`: the prompts
        that are new among them, and why."""
        task = self.config.task
        if not unscored:
            return
        if task.strict:
            limit = "task.strict allows none"
        elif errors > task.max_error_rate * total:
            limit = f"task.max_error_rate={task.max_error_rate:g}"
        else:
            return
        cursor, reason = unscored[0]
        raise ActorFailed(f"{told} ({limit}); last on prompt {cursor}: {reason}")

    # ---- Evaluation --------------------------------------------------------------------------

    def _evaluate(self) -> None:
        """The mean reward on the held-out prompts under the weights last published."""
        config = self.config
        rows = config.unit_prompts * config.rollout.group_size
        size = max(1, rows // config.eval.samples)
        prompts = range(config.eval.prompts)
        units = [prompts[i : i + size] for i in range(0, len(prompts), size)]
        done: list[ScoredUnit] = []
        # What is under way takes the newest weights in now; nothing arrives in mid-evaluation.
        self._work_until(lambda: not any(g.fetching for g in self._generators))

        def ask(unit: range) -> None:
            requests = [self._requests.request("eval", cursor) for cursor in unit]
            self._generate(
                _least_busy(self._generators),
                "eval",
                requests,
                done=done.append,
                again=lambda: ask(unit),
            )

        for unit in units:
            ask(unit)
        self._work_until(lambda: len(done) == len(units))
        groups = sorted((g for scored in done for g in scored.groups), key=lambda g: g.prompt_index)
        unscored = sorted(prompt for scored in done for prompt in scored.unscored)
        self._judge_evaluation(sum(scored.reward_errors for scored in done), unscored)
        rewards = [float(group.rewards.mean()) for group in groups]
        self._round.evaluations.append(HeldOut(round=self.gate.learner_round, groups=groups))
        # fsum is exact, so the order in which generators answered does not matter.
        mean = math.fsum(rewards) / len(rewards)
        first = mean if self.evaluation is None else self.evaluation.first
        self.evaluation = Evaluation(
            first=first, mean=mean, round=self.gate.learner_round, unscored=len(unscored)
        )

    def _judge_evaluation(self, errors: int, unscored: Sequence[tuple[int, str]]) -> None:
        """`errors`: responses of this evaluation on which the reward failed."""
        if not unscored:
            return
        prompts = self.config.eval.prompts
        total = prompts * self.config.eval.samples
        told = f"eval: the reward function failed on {errors} of {total} held-out responses"
        self._judge(told, errors, total, unscored)
        cursor, reason = unscored[0]
        if len(unscored) == prompts:
            raise ActorFailed(
                f"{told}, at least one of each prompt, so nothing could be scored; on prompt "
                f"{cursor}: {reason}"
            )
        self._round.notes.append(
            f"{len(unscored)} of {prompts} held-out prompts could not be scored; "
            f"reward/eval_mean is the mean of the others (prompt {cursor}: {reason})"
        )

    # ---- Waiting -----------------------------------------------------------------------------

    def _work_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._collect()

    def _finish_everything(self) -> None:
        while self._open:
            self._collect()

    def _collect(self) -> None:
        """Waits for the next answer, and hands out more work."""
        done, silent = self._watch.wait(list(self._open))
        for actor in silent:
            calls = [call for call in self._open if call.actor is actor]
            error = no_answer(calls, self.config.resources.deadline_s)
            self._give_up(self._open[calls[0]].generator, error)
        for call in done:
            # A generator that was replaced meanwhile took its other calls with it.
            if call in self._open:
                self._take_answer(call)
        self._dispatch()

    def _take_answer(self, call: Any) -> None:
        item = self._open[call]
        try:
            value = self._runtime.result(call)
        except ActorLost as error:
            self._give_up(item.generator, error)
            return
        del self._open[call]
        item.collect(value)

    def _give_up(self, generator: _Generator | None, error: ActorLost) -> None:
        """Replaces a generator. A lost learner is the trial's end: raises."""
        if generator is None or self._spawn is None or not self._started:
            raise error
        if generator.replaced >= REPLACEMENTS_IN_A_ROW:
            raise ActorFailed(
                f"{error}; {generator.actor.name} was replaced {generator.replaced} times "
                "without finishing any work"
            ) from error
        self._replace(generator, str(error))

    def _replace(self, generator: _Generator, reason: str) -> None:
        """Another actor, which loads the newest weights before it samples; what the old one had to
        do is asked for once more."""
        assert self._spawn is not None
        lost = [call for call, item in self._open.items() if item.generator is generator]
        again = [self._open.pop(call).again for call in lost]
        name = generator.actor.name
        generator.actor.kill()
        self._watch.forget(generator.actor)
        generator.actor, generator.units, generator.fetching = self._spawn(name), 0, 0
        generator.replaced += 1
        before = self.counts.redispatched
        self._load(generator)
        for ask in again:
            ask()
        self._round.notes.append(
            f"{name} was replaced ({reason}); {self.counts.redispatched - before} prompts are "
            "asked for again"
        )

    # ---- The report --------------------------------------------------------------------------

    def _add_spans(self, role: str, actor: str, spans: Sequence[Span]) -> None:
        self._round.spans += [ActorSpan(role, actor, span) for span in spans]

    def _add_version(
        self, role: str, actor: str, answer: Updated | Loaded, sync: Sync | None = None
    ) -> None:
        self._round.versions.append(
            VersionChange(
                at=answer.at,
                role=role,
                actor=actor,
                version=answer.version,
                weights_round=answer.round,
                sync=sync,
            )
        )

    def _report(
        self,
        start: float,
        groups: list[RolloutGroup],
        row: dict[str, float],
        updated: Updated,
        *,
        last: bool,
    ) -> RoundReport:
        this, self._round = self._round, _Round()
        evaluation = self.evaluation
        assert evaluation is not None
        partial = [self._partial_rewards[group.prompt_index] for group in groups]
        kept = (group.prompt_index for group in self.buffer.groups())
        self._partial_rewards = {cursor: self._partial_rewards[cursor] for cursor in kept}
        row.update(
            {
                "optim/skipped_steps": float(updated.skipped_steps),
                "reward/eval_mean": evaluation.mean,
                "reward/eval_first": evaluation.first,
                "eval/round": float(evaluation.round),
                "eval/unscored": float(evaluation.unscored),
                "version/learner": float(updated.version),
                "version/generator": float(min(g.version for g in self._generators)),
                "buffer/size": float(len(self.buffer)),
            }
        )
        if groups:
            row |= _trained_metrics(updated.steps, partial)
        if updated.reference_nll_nats is not None:
            row["response/reference_nll_nats"] = updated.reference_nll_nats
        for other, drift in updated.kl.items():
            row[f"kl/{other}_nats"] = drift.k1
            row[f"kl/{other}_k3_nats"] = drift.k3
        counts = self.counts
        for name in ("requested", "redispatched", "trained", "dropped", "reward_errors",
                     "checkpoint_failures", "skipped_rounds"):  # fmt: skip
            row[f"count/{name}"] = float(getattr(counts, name))
        for cause in ("stale", "reward", "lost", "zero_advantage"):
            row[f"count/dropped_{cause}"] = float(getattr(counts, f"dropped_{cause}"))
        row["count/waiting"] = float(self.buffer.waiting)
        row["count/in_flight"] = float(self.groups_in_flight)

        end = self._clock()
        row.update(stage_seconds(this.spans))
        busy = [item.span for item in this.spans if item.span.stage != "idle"]
        row["time/step_s"] = end - start
        row["time/other_s"] = end - start - covered_seconds(busy, start, end)
        row["sync/first_s"] = self._first_sync_s
        row["sync/bytes"] = float(this.sync_bytes)
        row["sync/gb_per_s"] = this.sync_bytes / 1e9 / max(row["time/sync_s"], 1e-9)
        return RoundReport(
            round=updated.round,
            last=last,
            start=start,
            end=end,
            metrics=row,
            groups=groups,
            updated=updated,
            spans=this.spans,
            versions=sorted(this.versions, key=lambda change: change.at),
            evaluations=this.evaluations,
            notes=this.notes,
        )

    @property
    def groups_in_flight(self) -> int:
        """Groups requested of which nothing was heard yet."""
        return sum(len(self._cursors(unit)) for unit in {*self._outstanding, *self._again})

    # ---- Checkpoints -------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything but the buffer's groups, as plain data; between two rounds."""
        return {
            "work": self._work(),
            "first_round": self._first_round,
            "first_cursor": self._first_cursor,
            "next_cursor": self._cursors(self._next_unit)[0],
            "learner_round": self.gate.learner_round,
            "stopped": self._stopped,
            "next_unit": self._next_unit,
            "in_flight_units": sorted({*self._outstanding, *self._again}),
            "counts": vars(self.counts).copy(),
            "evaluation": None if self.evaluation is None else vars(self.evaluation).copy(),
            "partial_rewards": [[c, *pair] for c, pair in sorted(self._partial_rewards.items())],
        }

    def load_state(self, state: dict[str, Any], groups: Sequence[RolloutGroup]) -> None:
        """Goes on from `state`; what was in flight then is requested again. Before `start`.

        Where the state's settings sampled other work than these would, as after PBT changed `k`,
        what was waiting or in flight is dropped and counted, and new prompts are asked for.
        """
        assert not self._open
        self.gate.learner_round = state["learner_round"]
        self._stopped = state["stopped"]
        self.counts = Counts(**state["counts"])
        if without_retired(state["work"]) == self._work():
            self._first_round, self._first_cursor = state["first_round"], state["first_cursor"]
            self._next_unit = state["next_unit"]
            self._again = list(state["in_flight_units"])
            self.buffer.add(groups)
        else:
            self._first_round, self._first_cursor = state["learner_round"], state["next_cursor"]
            counts = self.counts
            lost = counts.requested - counts.trained - counts.dropped
            counts.dropped_lost += lost
            if lost:
                self._round.notes.append(
                    f"{lost} prompts sampled under the checkpoint's settings were dropped; these "
                    "settings sample others"
                )
        if state["evaluation"] is not None:
            self.evaluation = Evaluation(**state["evaluation"])
        self._partial_rewards = {
            c: (format_, answer) for c, format_, answer in state["partial_rewards"]
        }

    def _work(self) -> dict[str, Any]:
        """The settings that decide which prompts a round trains on and how they are sampled."""
        config = self.config.to_dict()
        keys = ("seed", "lag", "weight_update", "task", "rollout", "buffer_capacity",
                "buffer_sampling", "buffer")  # fmt: skip
        return {
            "batches_per_round": self._batches_per_round,
            "units_per_batch": len(self._units),
            "groups_bring_reference": self.config.reference_role == "generator",
            **{key: config[key] for key in keys},
        }


def _trained_metrics(
    steps: Sequence[GradientStep], partial_rewards: Sequence[tuple[float, float]]
) -> dict[str, float]:
    """Of a round with at least one gradient step: means over its steps, but for the largest ratio
    and the counts. `partial_rewards`: (format, answer) of each group that it trained on."""
    return {
        "loss/policy": _mean([step.loss for step in steps]),
        "loss/clip_fraction": _mean([step.clip_fraction for step in steps]),
        "loss/ratio_max": max(step.ratio_max for step in steps),
        "loss/bounded_tokens": float(sum(step.bounded_tokens for step in steps)),
        "policy/entropy_nats": _mean([step.entropy_nats for step in steps]),
        "optim/grad_norm": _mean([step.grad_norm for step in steps]),
        "optim/lr": steps[-1].lr,
        "reward/format_mean": _mean([format_ for format_, _ in partial_rewards]),
        "reward/answer_mean": _mean([answer for _, answer in partial_rewards]),
    }


def _least_busy(generators: Sequence[_Generator]) -> _Generator:
    return min(generators, key=lambda generator: generator.units)


def _never() -> None:
    raise AssertionError("the learner's work is not asked for again")


def _mean(values: Sequence[float]) -> float:
    """Sorted: several generators answer in any order, and a sum of floats depends on it."""
    return sum(sorted(values)) / len(values)
