"""The loop that runs the rounds of a trial, which may be synchronous or asynchronous.

A trial with `lag = 0` is synchronous: the `StalenessGate` admits the rollouts of a round only when
the generators have the weights that the previous round produced. With `lag >= 1`, generators sample
the rollouts of later rounds while the learner trains, and continue between calls of `run_round`.
With `lag_mode = exact`, every round is synchronous, but the learner trains on the collected
rollouts `lag` rounds after their collection.

This module does not import Ray. Actors, runtime and clock are passed in as arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grpo_trainable.config import GRPOConfig, schedule
from grpo_trainable.pipeline.by_task import ByTask
from grpo_trainable.pipeline.collector import Collector
from grpo_trainable.pipeline.evaluation import (
    Evaluation,
    HeldOutChunk,
    held_out_chunks,
    held_out_rewards,
)
from grpo_trainable.pipeline.fleet import (
    Cancel,
    Deposit,
    Fleet,
    FleetCall,
    FleetGenerator,
    Load,
    RequestSource,
    Sample,
    Score,
    Spawn,
)
from grpo_trainable.pipeline.learner_group import LearnerGroup
from grpo_trainable.pipeline.ledger import Chunk
from grpo_trainable.pipeline.open_calls import OpenCalls
from grpo_trainable.pipeline.replay_buffer import ReplayBuffer
from grpo_trainable.pipeline.report import (
    Counts,
    Recorder,
    RoundReport,
    evaluation_metrics,
    time_metrics,
    update_metrics,
)
from grpo_trainable.pipeline.rollout_metrics import (
    info_means,
    interrupted_fraction,
    part_means,
    rollout_metrics,
)
from grpo_trainable.pipeline.sampling_settings import is_same_sampling, sampling_settings
from grpo_trainable.pipeline.standstill import Standstill
from grpo_trainable.protocol.calls import Actor, ActorFailed, ActorLost, Runtime
from grpo_trainable.protocol.messages import (
    Cancelled,
    Deposited,
    Loaded,
    Sampled,
    Scored,
    Updated,
)
from grpo_trainable.protocol.rollout import RolloutGroup
from grpo_trainable.protocol.versions import StalenessGate
from grpo_trainable.telemetry.metrics import INFO_MEAN, PART_MEAN, named_metrics
from grpo_trainable.telemetry.timers import now
from grpo_trainable.text import plural

# The pipeline's state as plain data, and the groups in the buffer.
Checkpoint = tuple[dict[str, Any], list[RolloutGroup]]


@dataclass(frozen=True, slots=True)
class Update:
    """The record of a call that takes a round's gradient steps."""

    learner: Actor


class Pipeline:
    """Runs the rounds of a trial.

    The pipeline decides what is sampled, trained on and evaluated, and when.
    """

    def __init__(
        self,
        config: GRPOConfig,
        requests: RequestSource,
        generators: Sequence[Actor],
        learners: LearnerGroup,
        runtime: Runtime,
        clock: Callable[[], float] = now,
        spawn: Spawn | None = None,
    ) -> None:
        """Create a pipeline at round 0.

        Args:
            config: The trial's settings.
            requests: Makes requests from prompt indices.
            generators: The actors that sample.
            learners: The actors that train.
            runtime: Waits for calls.
            clock: Returns seconds since 1970, by the clock of the trial's process.
            spawn: Starts a generator in place of a lost one. None: any loss of a generator ends the
                trial. Pass None if the loss of a generator always means the loss of the learner.
        """
        self.config = config
        self.gate = StalenessGate(lag=config.lag, max_age=schedule.max_age(config))
        self.evaluation: Evaluation | None = None
        # Actor -> seconds by which the clock of its machine is ahead of this machine's clock.
        # For an actor without an entry, the value is 0.
        self.clock_offsets: dict[str, float] = {}
        self._recorder = Recorder(self.clock_offsets)
        self._by_task = ByTask(config)
        self._standstill = Standstill(config)
        self._collector = Collector(
            config, self.gate, self._recorder, self._by_task, requests.train_size
        )
        self._calls: OpenCalls[Update | FleetCall] = OpenCalls(runtime, config.resources.deadline_s)
        self._fleet = Fleet(
            config,
            requests,
            generators,
            self._calls,
            self._recorder,
            spawn,
            self._collector.rubrics,
        )
        self._learners = learners
        self._clock = clock
        self._first_sync_s = 0.0  # seconds that the first sync took, including transport set-up
        self._version = 0  # version of the newest weights
        self._dispatching = False  # True: submit more work after every answer
        self._last_due = -1  # the last round whose chunks may be submitted
        self._updated: dict[Actor, Updated] = {}  # the learners' answers in this round
        self._held_out: list[Scored] = []  # answers of the current evaluation
        self._stopped = False  # True if the trial ended before its last round
        self._info_names: set[str] = set()  # names of numbers that environments report in `info`
        # While rollouts are collected, the checkpoint of the last finished round; otherwise None.
        self._last_finished: Checkpoint | None = None

    @property
    def buffer(self) -> ReplayBuffer:
        """The groups that wait to be trained on, and those that may be used again."""
        return self._collector.buffer

    @property
    def counts(self) -> Counts:
        """Counts over the whole trial: prompts requested, trained on, dropped and so on."""
        return self._collector.counts

    def abandon(self) -> None:
        """Forget all calls in flight, because another pipeline takes over the actors.

        Only calls that run concurrently with others are waited for, because these calls could
        otherwise end after the actor's next calls.
        """
        self._calls.abandon(lambda call: isinstance(call, Deposit | Score | Cancel))
        self._fleet.forget_weights()

    @property
    def ended(self) -> bool:
        """True if no round follows."""
        return self._stopped or self.gate.learner_round >= self.config.rounds

    # ---- The round ---------------------------------------------------------------------------

    def send_first_weights(self, set_up_s: float = 0.0) -> None:
        """Send the learner's weights to every generator, before the first round.

        Args:
            set_up_s: Seconds that setting up the transport took.
        """
        self._publish()
        self._finish_everything()
        syncs = [change.sync for change in self._recorder.versions if change.sync is not None]
        self._first_sync_s = set_up_s + max(sync.seconds for sync in syncs)
        # The first round reports the first weights, but not the time of their transfer.
        self._recorder.forget_transfers()
        self._fleet.has_first_weights = True

    def run_round(self, training_begins: Callable[[], None] = lambda: None) -> RoundReport:
        """Run a round: collect rollouts, take k gradient steps, publish weights, evaluate if due.

        Args:
            training_begins: Called before the gradient steps. If it raises an exception, the round
                is abandoned: `checkpoint` still returns the state of the last finished round, and
                the pipeline runs no further round.

        Raises:
            ActorFailed: An actor died, raised an exception or did not answer in time.
        """
        start = self._clock()
        round_ = self.gate.learner_round
        if self.ended:
            raise RuntimeError(f"this trial ended after round {round_} of {self.config.rounds}")
        self._last_finished = (self.state(), self.buffer.groups())
        self._fleet.fill()
        if self.evaluation is None:
            self._evaluate()
        # Submit no chunks before this point: the wall clock excludes evaluations, so it would not
        # count the time of chunks that are sampled during an evaluation. From here on, chunks are
        # submitted after every answer, even while the learner trains.
        for due_round in range(round_, schedule.last_collected(self.config, round_) + 1):
            self._collect(due_round)
        training_begins()
        self._last_finished = None
        batches = self._collector.make_batches(round_)
        updated = self._update(batches)
        groups = [group for batch in batches for group in batch]
        row = self._group_metrics(groups, round_)
        self._version = updated.version
        self.gate.learner_round += 1
        self._collector.evict()
        self._publish()
        # If sampling and training take turns, there are no calls in flight between two rounds. In
        # any case, an evaluation is submitted before further rollouts.
        self._dispatching = False
        if self.config.in_turns:
            self._finish_everything()
        self._stopped = self._drifted(updated)
        last = self.ended
        if last or self.gate.learner_round % self.config.eval.every == 0:
            self._evaluate()
        if last:
            self._finish_everything()
        elif not self.config.in_turns:
            self._start_dispatching()
        return self._report(start, groups, row, updated, last=last)

    def _group_metrics(self, groups: list[RolloutGroup], round_: int) -> dict[str, float]:
        """Return the metrics of the groups that the round trained on, or {} without groups."""
        if not groups:
            return {}
        oldest_version = min(group.oldest_version for group in groups)
        gap = float(self._version - oldest_version)
        row = {**rollout_metrics(groups, round_), "version/gap_max": gap}
        if self.config.rollout.overlong == "interrupt":
            row["response/interrupted_fraction"] = interrupted_fraction(groups)
        self._info_names.update(*(group.info or () for group in groups))
        row |= named_metrics(INFO_MEAN, info_means(groups, sorted(self._info_names)))
        return row | named_metrics(PART_MEAN, part_means(groups))

    def _drifted(self, updated: Updated) -> bool:
        """Return True if the policy is so far from the reference that the trial must end."""
        limit = self.config.callbacks.kl_stop
        drift = updated.kl.get("reference")  # None in a skipped round
        return limit is not None and drift is not None and drift.k1 > limit

    # ---- Training ----------------------------------------------------------------------------

    def _update(self, batches: list[list[RolloutGroup]]) -> Updated:
        """Have the learners take k gradient steps.

        Meanwhile, give more work to generators that answer (`_wait`).
        """
        while (answers := self._answers_to_update(batches)) is None:
            pass
        updated = self._learners.agreed(answers)
        for learner, answer in answers.items():
            self._recorder.add_spans("learner", learner.name, answer.spans)
        self._recorder.add_version("learner", self._learners.name, updated)
        return updated

    def _answers_to_update(self, batches: list[list[RolloutGroup]]) -> dict[Actor, Updated] | None:
        """Return each learner's answer, or None if a learner was lost and the others can retry."""
        self._updated = {}
        calls = self._learners.update(batches)
        for call in calls:
            self._calls.add(call, Update(call.actor))
        try:
            with self._learners.naming_the_lost("optimize"):
                self._work_until(lambda: len(self._updated) == len(calls))
        except ActorFailed as failure:
            for call in calls:
                self._calls.drop(call.actor)
            self._recorder.note(self._learners.go_on_with_fewer(failure))
            return None
        return self._updated

    def _publish(self) -> None:
        """Publish the learner's weights to every generator."""
        published = self._learners.publish(self._fleet.needs_from)
        name = self._learners.name
        self._recorder.add_spans("learner", name, published.spans)
        self._version = published.version
        handle = self._recorder.handle_of(name, published.handle)
        self._fleet.publish(replace(published, handle=handle))

    # ---- Rollouts ----------------------------------------------------------------------------

    def _collect(self, round_: int) -> None:
        """Sample until the rollouts of a round are complete.

        If sampling and training take turns, no chunk of a later round is submitted. So the chunks
        that replace this round's left-out prompts do not depend on timing.
        """
        self._last_due = round_ if self.config.in_turns else self.config.rounds - 1
        self._start_dispatching()
        while not self._collector.ledger.complete(round_):
            self._cancel_stragglers(round_)
            self._wait()

    def _cancel_stragglers(self, round_: int) -> None:
        """Cancel the chunks of `round_` that a generator without work has passed (`Fleet.passed`).

        A chunk is cancelled only if the generator has no work because the lag allows no further
        chunk before the learner trains on `round_`. A chunk is never cancelled in the last `lag`
        rounds, in which generators have no work for other reasons.
        """
        if self.config.rollout.stragglers == "wait":
            return
        ledger = self._collector.ledger
        if not round_ + self.config.lag < ledger.due_round <= self._last_due:
            return
        given_up = self.counts.dropped_straggler + self.counts.requeued
        for generator, chunk in self._fleet.passed():
            assert isinstance(chunk, Chunk), "no evaluation runs while rollouts are collected"
            if not ledger.is_due(chunk, round_) or not self._collector.may_give_up(chunk):
                continue
            given_up += len(chunk.prompt_indices)
            if given_up <= schedule.most_given_up(self.config):
                self._fleet.cancel(generator, chunk)

    def _start_dispatching(self) -> None:
        """Submit chunks now and, from now on, after every answer (`_wait`)."""
        self._dispatching = True
        self._dispatch()

    def _dispatch(self) -> None:
        """Submit every chunk that the gate admits and that a generator has room for."""
        ledger = self._collector.ledger
        while ledger.due_round <= self._last_due:
            rounds_ahead = ledger.due_round - self.gate.learner_round
            generator = self._fleet.free_generator(self.gate, rounds_ahead)
            if generator is None:
                return
            self._fleet.sample(generator, self._collector.take())

    # ---- Evaluation --------------------------------------------------------------------------

    def evaluate(self) -> Evaluation:
        """Return the held-out rewards under the current weights.

        Call this method between two rounds. If the rewards have already been measured since the
        last round, nothing is sampled again.

        Raises:
            ActorFailed: As in `run_round`.
        """
        if self.evaluation is None or self.evaluation.round != self.gate.learner_round:
            was_dispatching, self._dispatching = self._dispatching, False
            self._evaluate()
            self._recorder.forget_spans(HeldOutChunk.stage)  # these spans belong to no round
            if was_dispatching:
                self._start_dispatching()
        assert self.evaluation is not None
        return self.evaluation

    def _evaluate(self) -> None:
        """Score the held-out prompts under the weights that were last published."""
        # Every generator loads the newest weights first, so no weights arrive during the
        # evaluation.
        self._work_until(lambda: not self._fleet.fetching)
        chunks = held_out_chunks(self.config, final=self.ended)
        for chunk in chunks:
            self._fleet.sample(self._fleet.least_busy(), chunk)
        self._work_until(lambda: len(self._held_out) == len(chunks))
        answers, self._held_out = self._held_out, []
        for answer in answers:
            self.counts.add_usage(answer.usage)
        self.evaluation, held_out, notes = held_out_rewards(
            self.config, self.gate.learner_round, self.evaluation, answers, self._by_task
        )
        self._recorder.evaluations.append(held_out)
        self._recorder.notes += notes

    # ---- Waiting -----------------------------------------------------------------------------

    def _work_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._wait()

    def _finish_everything(self) -> None:
        while self._calls:
            self._wait()

    def _wait(self) -> None:
        """Wait for the next answers. Then submit more work if `_dispatching` is True."""
        for call, answer in self._calls.arrivals():
            self._arrived(call, answer)
        if self._dispatching:
            self._dispatch()

    def _arrived(self, call: Update | FleetCall, answer: Any) -> None:
        """Pass an answer to the component that waits for it, or raise a learner's `ActorLost`."""
        match call, answer:
            case Update(), ActorLost():
                raise answer
            case Load() | Deposit() | Sample() | Score() | Cancel(), ActorLost():
                self._replace(call.generator, answer)
            case Update(learner), Updated():
                self._updated[learner] = answer
            case Load(generator), Loaded():
                self._fleet.loaded(generator, answer)
            case Deposit(generator), Deposited():
                self._fleet.deposited(generator, answer)
            case Sample(generator, Chunk() as chunk), Cancelled():
                self._fleet.ended_early(generator, answer)
                self._collector.give_up(chunk)
            case Cancel(), None:
                pass  # only the answer to the `Sample` call says if sampling ended early
            case Sample(generator, work), Sampled():
                self._fleet.sampled(generator, work, answer)
            case Sample(generator, Chunk() as chunk) | Score(generator, Chunk() as chunk), Scored():
                self._fleet.scored(generator, answer)
                self._collector.accept(chunk, answer)
            case Sample(generator, HeldOutChunk()) | Score(generator, HeldOutChunk()), Scored():
                self._fleet.scored(generator, answer)
                self._held_out.append(answer)
            case _:
                raise AssertionError(f"{call} was answered by {answer}")

    def _replace(self, generator: FleetGenerator, lost: ActorLost) -> None:
        """Replace a generator, and submit its unfinished work again.

        Training chunks return to the ledger. Held-out chunks are submitted to the least busy
        generators.
        """
        before = self.counts.redispatched
        for work in self._fleet.replace(generator, lost):
            if isinstance(work, Chunk):
                self._collector.put_back(work)
            else:
                self._fleet.sample(self._fleet.least_busy(), work)
        redispatched = self.counts.redispatched - before
        told = self._fleet.told_of(generator, lost)
        self._recorder.note(f"{told}; sampling {plural(redispatched, 'prompt')} again")

    # ---- The report --------------------------------------------------------------------------

    def _report(
        self,
        start: float,
        groups: list[RolloutGroup],
        row: dict[str, float],
        updated: Updated,
        *,
        last: bool,
    ) -> RoundReport:
        """Complete the round's metrics, and return the round's report.

        Args:
            start: When the round began, in seconds since 1970.
            groups: The groups that the round trained on.
            row: Metrics of these groups. This method adds further metrics to the dictionary.
            updated: The learners' answer.
            last: True if no round follows.
        """
        recorder, end = self._recorder, self._clock()
        assert self.evaluation is not None
        row |= update_metrics(updated, groups)
        row |= self._by_task.trained(groups, updated.round - 1)
        row |= evaluation_metrics(self.evaluation) | self._collector.metrics()
        row |= time_metrics(recorder.spans, recorder.sync_bytes, start, end)
        row["version/generator"] = float(self._fleet.version)
        row["fleet/generators"] = float(len(self._fleet.generators))
        row["sync/first_s"] = self._first_sync_s
        self._collector.note_failed_rewards()
        note = self._standstill.note(row)
        recorder.notes += [] if note is None else [note]
        return recorder.report(updated, groups, row, start=start, end=end, last=last)

    # ---- Checkpoints -------------------------------------------------------------------------

    def checkpoint(self) -> Checkpoint:
        """Return the state and the buffered groups as they were after the last finished round.

        Call this method between two rounds, or after a round was abandoned before its gradient
        steps. In either case, the learner has not changed since the last finished round.
        """
        return self._last_finished or (self.state(), self.buffer.groups())

    def state(self) -> dict[str, Any]:
        """Return the pipeline's state as plain data, without the groups in the buffer.

        Call this method between two rounds.
        """
        return {
            "work": sampling_settings(self.config),
            **self._collector.state(),
            "learner_round": self.gate.learner_round,
            "stopped": self._stopped,
            "rounds_without_signal": self._standstill.rounds,
            "info_names": sorted(self._info_names),
            "evaluation": None if self.evaluation is None else vars(self.evaluation).copy(),
        }

    def load_state(self, state: dict[str, Any], groups: Sequence[RolloutGroup]) -> None:
        """Continue from a saved state. Call this method before `send_first_weights`.

        Prompts that were in flight are requested again.

        The settings in `state` may lead to different rollouts than the current settings, for
        example after PBT has changed `k`. In that case, groups that waited or were in flight are
        dropped and counted, and new prompts are requested.

        Args:
            state: The result of `state`.
            groups: The buffer's groups.
        """
        assert not self._calls
        self.gate.learner_round = state["learner_round"]
        self._stopped = state["stopped"]
        self._standstill.rounds = state["rounds_without_signal"]
        # Checkpoints of earlier package versions lack this key.
        self._info_names = set(state.get("info_names", ()))
        if state["evaluation"] is not None:
            self.evaluation = Evaluation(**state["evaluation"])
        same_sampling = is_same_sampling(state["work"], sampling_settings(self.config))
        self._collector.load_state(state, groups, same_sampling=same_sampling)
