"""One trial: its actors, and the pipeline over them, round by round.

Tune's Trainable and RLlib's Algorithm are thin shells around it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from grpo_trainable.cluster.ray_actors import RayRuntime, driver_pid
from grpo_trainable.cluster.trial_actors import TrialActors
from grpo_trainable.config import GRPOConfig, make_absolute, resources, schedule
from grpo_trainable.engines.selection import chosen_engine
from grpo_trainable.models.directory import policy_tokenizer
from grpo_trainable.pipeline import Evaluation, Pipeline, RoundReport
from grpo_trainable.protocol.calls import Actor, ActorFailed
from grpo_trainable.protocol.messages import LearnerState
from grpo_trainable.protocol.round_records import (
    Columns,
    RoundDetails,
    first_use_lags,
    response_columns,
    rollout_columns,
    step_columns,
)
from grpo_trainable.storage.checkpointing import (
    begun,
    finish_checkpoint,
    read_state,
    verified_digests,
)
from grpo_trainable.storage.ray_private import StorageContext
from grpo_trainable.storage.trial_storage import TrialStorage
from grpo_trainable.tasks.custom import with_task_settings
from grpo_trainable.tasks.input_files import input_digests, refuse_changed_inputs
from grpo_trainable.tasks.prompts import Prompts, build_task
from grpo_trainable.telemetry.machine_load import DISTURBED_ABOVE, Meter
from grpo_trainable.telemetry.metrics import ActorSpan, names_with, rllib_metrics
from grpo_trainable.telemetry.timers import Span, WallClock, now

logger = logging.getLogger(__name__)

# An actor's process, its reservation and its transport are made from these keys. With other values
# of any other key it can begin anew.
BUILT_INTO_ACTORS = ("placement", "resources", "transport")


class Trial:
    """Owns the actors of one trial and runs the pipeline over them."""

    def __init__(
        self,
        config: GRPOConfig,
        storage: StorageContext | None = None,
        inputs: Mapping[str, str] | None = None,
        files: Any = None,
    ) -> None:
        """Starts the actors, without waiting for them. `config`: with absolute paths, as `resolved`
        gives it. `storage`: where Tune keeps the trial's checkpoints; None where it keeps none.

        `inputs`: what `digests_of_all` said of the trials when the experiment started. The files
        that this trial reads must still be so; None compares nothing. `files`: a reference to what
        `shipping.contents` gives, for the machines of a cluster.

        Raises:
            InputChanged: a file that the trial reads has changed.
            ShippingError: a machine cannot have one.
        """
        self._storage = storage
        self._files = files
        self._inputs_at_start = inputs
        self._open(config)

    def _open(self, config: GRPOConfig) -> None:
        """Starts the actors and puts the trial at round 0."""
        self._warm_up_s: float | None = None  # None: the actors are not warm yet
        self.config = config
        self.runtime = RayRuntime(config.resources.deadline_s)
        self.meter = Meter(filter(None, [driver_pid()]))
        self.actors = TrialActors(config, self.runtime, self._files)
        try:
            self.actors.start()
            self._begin()
        except BaseException:
            self.end()
            raise

    def _begin(self) -> None:
        """Puts the trial at round 0, over actors that have done nothing yet."""
        config, choice = self.config, self.actors.choice
        self._inputs = input_digests(config, self._inputs_at_start)
        self._tokenizer = policy_tokenizer(config.model)
        self._prompts = Prompts(config, build_task(config), self._tokenizer)
        self._learners = self.actors.learner_group()
        self.pipeline = Pipeline(
            config,
            self._prompts,
            self.actors.generators,
            self._learners,
            self.runtime,
            spawn=self.replace_generator if self.actors.replaceable else None,
        )
        self.stored = TrialStorage(self._storage, config.checkpoint.keep)
        self.time_total_s = 0.0  # seconds that Tune counted up to the last checkpoint
        self._notes: list[str] = []  # warnings since the last round
        engine = chosen_engine(config)
        self._news = [
            f"weights travel by {choice.key}: {choice.why}",
            f"engine {engine.name}: {engine.promise}",
        ]
        self._wall_clock = WallClock()
        self._checkpoints: list[Span] = []  # written since the last round
        self._saved_round: int | None = None
        self._failures = 0  # checkpoints in a row that could not be written
        self._retry_at = math.inf  # the round after which the next of them is tried again
        self.due = False  # whether the trial itself asks for a checkpoint of this round
        self._started = False
        self._disturbed = False  # whether the user was told of a disturbed round
        self._lost_actor = False  # whether one was replaced since the meter was read
        self._niceness = 0  # the largest of its processes

    def _start(self) -> None:
        """Brings the first weights into the generators, once.

        This cannot be done earlier: a checkpoint may be loaded first, whose weights then travel.
        """
        if self._started:
            return
        self._warm_up()
        for actor in self.actors:
            self.pipeline.clock_offsets[actor.name] = self.actors.clock_offset(actor.name)
        self.pipeline.start(self.actors.set_up_transport())
        self._started = True
        self._place_actors()
        self.meter.begin()

    def _warm_up(self) -> None:
        """Warms the actors up, unless they began anew and are warm still.

        Raises:
            ActorFailed: one of them cannot do what a round asks of it.
        """
        if self._warm_up_s is not None:
            return
        start = now()
        chunk = range(schedule.unit_prompts(self.config))
        # With difficulty pools every request names its example, as those of the rounds will.
        example = (lambda index: index) if self.config.pools.enabled else (lambda _: None)
        self.actors.warm_up([self._prompts.request("train", i, example(i)) for i in chunk])
        self._warm_up_s = now() - start
        self._news.append(f"the actors were warmed up in {self._warm_up_s:.1f} s")

    def replace_generator(self, name: str, patience_s: float) -> Actor | None:
        """A new generator in place of the one of this name, which was killed; None where no machine
        has had room for it for `patience_s`.

        Raises:
            InputChanged: a file that it would read has changed.
        """
        self._lost_actor = True
        input_digests(self.config, self._inputs)  # the new actor reads the files again
        actor = self.actors.replace(name, patience_s)
        if actor is not None:
            self.pipeline.clock_offsets[name] = self.actors.clock_offset(name)
        return actor

    # ---- Rounds ------------------------------------------------------------------------------

    @property
    def rounds_trained(self) -> int:
        return self.pipeline.gate.learner_round

    def run_round(self) -> RoundReport | None:
        """One round; None where the trial has ended.

        Raises:
            ActorFailed: an actor failed in a way that ends the trial.
        """
        self._start()
        if self.pipeline.ended:
            return None
        report = self.pipeline.run_round()
        row = {**report.metrics, **self._disturbance(report.round), **self._time_and_cost(report)}
        row["fleet/niceness"] = float(self._niceness)
        counts = self.pipeline.counts
        row.update(rllib_metrics(row, counts.sampled_responses, counts.sampled_tokens))
        names = names_with(self.config.parts)
        assert row.keys() <= names, row.keys() - names
        regular = report.round % self.config.checkpoint.every == 0
        self.due = report.last or regular or report.round >= self._retry_at
        warnings = self._notes + report.notes
        for note in warnings:
            logger.warning("%s", note)
        own = [Span("round", report.start, report.end), *self._checkpoints]
        spans = [*report.spans, *(ActorSpan("trial", "trial", span) for span in own)]
        report = replace(report, metrics=row, spans=spans, notes=self._news + warnings)
        self._checkpoints, self._notes, self._news = [], [], []
        return report

    def evaluate(self) -> Evaluation:
        """The held-out rewards under the present weights, between two rounds."""
        self._start()
        start = now()
        evaluation = self.pipeline.evaluate()
        self._wall_clock.leave_out(now() - start)
        return evaluation

    def learner_state(self) -> LearnerState:
        """A copy of what is trained, and of the learner's counters."""
        return self._learners.state()

    def _disturbance(self, round_: int) -> dict[str, float]:
        """The share of this machine that others took since the round before; empty if unknown."""
        self._place_actors()
        taken = self.meter.take()
        if taken is None:
            return {}
        # The CPU time of an actor that was killed can no longer be told from that of others.
        lost, self._lost_actor = self._lost_actor, False
        if taken.fraction > DISTURBED_ABOVE and not lost and not self._disturbed:
            self._disturbed = True
            counts = not self.config.callbacks.leave_out_disturbed
            self._notes.append(taken.note(round_, counts=counts))
        return {"time/disturbed_fraction": taken.fraction}

    def _place_actors(self) -> None:
        """Tells the meter the processes of actors that have started meanwhile."""
        for place in self.actors.newly_placed():
            self.meter.add(place)
            if place.niceness > self._niceness:
                self._niceness = place.niceness
                self._news.append(
                    f"actors run at niceness {place.niceness}, behind every ordinary process of "
                    "their machine; RAY_worker_niceness=0 before `ray start` changes that"
                )

    def _time_and_cost(self, report: RoundReport) -> dict[str, float]:
        eval_s = report.metrics["time/eval_s"]
        seconds = self._wall_clock.round_ended(report.start, report.end, eval_s)
        new = [group for group in report.groups if group.uses == 1]
        responses = sum(len(group.response_ids) for group in new)
        tokens = sum(group.num_tokens for group in new)
        return {
            "time/wall_clock_s": self._wall_clock.seconds,
            "time/warm_up_s": self._warm_up_s or 0.0,
            "time/checkpoint_s": sum((span.seconds for span in self._checkpoints), 0.0),
            "throughput/samples_per_s": responses / seconds,
            "throughput/tokens_per_s": tokens / seconds,
            "cost/device_hours": self._wall_clock.seconds / 3600 * resources.devices(self.config),
        }

    def details(self, report: RoundReport) -> RoundDetails:
        """What the callbacks write down of a round: responses, version changes and every span."""
        updated, decode = report.updated, self._tokenizer.decode
        evaluations: Columns = {}
        for held_out in report.evaluations:
            told = partial(self._prompts.told, "eval")
            columns = response_columns(held_out.groups, held_out.round, told, decode)
            for name, values in columns.items():
                evaluations.setdefault(name, []).extend(values)
        return RoundDetails(
            round=report.round,
            rollouts=rollout_columns(
                report.groups,
                report.round - 1,
                partial(self._prompts.told, "train"),
                decode,
                advantages=updated.responses.advantages,
                policy_log_probs=updated.responses.policy_log_probs,
                reference_log_probs=updated.responses.reference_log_probs,
            ),
            evaluations=evaluations,
            steps=step_columns(updated),
            versions=report.versions,
            spans=report.spans,
            notes=report.notes,
            lags=first_use_lags(report.groups, report.round - 1),
            ratio_counts=[
                sum(counts)
                for counts in zip(*(step.ratio_counts for step in updated.steps), strict=True)
            ],
        )

    # ---- Checkpoints -------------------------------------------------------------------------

    @contextlib.contextmanager
    def checkpointing(self) -> Iterator[None]:
        """Surrounds all that a checkpoint takes: writing it, and copying it to where it stays."""
        start = now()
        try:
            yield
        finally:
            span = Span("checkpoint", start, now())
            self._checkpoints.append(span)
            self._wall_clock.leave_out(span.seconds)

    def note_checkpoints(self, notes: list[str], *, failed: bool = False) -> None:
        """Tells the user of trouble with checkpoints, and counts one that could not be written. The
        next is tried after one round, then two, four and so on, where none is due before."""
        self._notes += notes
        self.pipeline.counts.checkpoint_failures += failed
        self._failures = self._failures + 1 if failed else 0
        self._retry_at = self.rounds_trained + 2 ** (self._failures - 1) if failed else math.inf

    def save(self, directory: str | Path) -> None:
        """Writes policy, optimizer, waiting groups and every counter as safetensors and JSON. What
        the learners hold they write themselves.

        Every random draw is keyed by (seed, prompt index, response, token), so the seed in the
        config and the prompt indices in the pipeline's state are the random state.
        """
        # A checkpoint that the trial did not ask for, or a second one, is Tune's: under PBT another
        # trial may start from it.
        if not self.due or self.rounds_trained == self._saved_round:
            self.stored.share(self.rounds_trained)
        with begun(directory) as seen_by:
            learners = self._learners.write(str(directory), seen_by)
        state = {
            "config": self.config.to_dict(),
            "inputs": self._inputs,
            "shared_rounds": self.stored.shared_rounds,
            "learner": learners[0].counters,
            "pipeline": self.pipeline.state(),
            "wall_clock_s": self._wall_clock.seconds,
            "time_total_s": self.time_total_s,
        }
        finish_checkpoint(directory, learners, state, self.pipeline.buffer.groups())
        self._saved_round = self.rounds_trained

    def load(self, directory: str | Path) -> None:
        """Goes on from a checkpoint.

        Raises:
            CheckpointError: the directory is damaged or is not a grpo_trainable checkpoint.
            InputChanged: a file that the trial reads has changed.
            ActorFailed: the checkpoint holds another model.
        """
        directory = Path(directory).absolute()
        digests = verified_digests(directory)
        state, groups = read_state(directory, digests)
        if self._started:
            # The present pipeline has work under way that does not belong to the checkpoint.
            self.reset(self.config, self._storage)
        refuse_changed_inputs(self.config, self._inputs, state["inputs"])
        self._learners.read_state(directory, digests, state["learner"])
        self.pipeline.load_state(state["pipeline"], groups)
        self._wall_clock = WallClock(state["wall_clock_s"])
        self.time_total_s = state["time_total_s"]
        self.stored.shared_rounds = state["shared_rounds"]
        self.stored.share(self.rounds_trained)

    # ---- Beginning anew ----------------------------------------------------------------------

    def reset(self, new: GRPOConfig, storage: StorageContext | None = None) -> bool:
        """Starts over with another config; False where it reserves other resources.

        The actors stay where the config also has the same placement, resources and transport.
        Otherwise others are started.
        """
        old = self.config
        if (resources.bundles(new), resources.placement_strategy(new)) != (
            resources.bundles(old),
            resources.placement_strategy(old),
        ):
            return False
        self._storage = storage
        if any(new[key] != old[key] for key in BUILT_INTO_ACTORS):
            self.end()
            self._open(new)
            return True
        self.config = new
        self.pipeline.abandon()
        try:
            self.actors.reset(new)
            self._begin()
        except ActorFailed as error:
            # Tune does not retry a trial whose reset fails.
            logger.warning("%s; starting other actors", error)
            self.end()
            self._open(new)
        return True

    def end(self) -> None:
        """Ends every actor."""
        self.actors.end()


def resolved(config: Mapping[str, Any]) -> GRPOConfig:
    """A trial's config, with absolute paths.

    Relative ones mean the directory in which Ray was started, not the one to which Tune moves the
    process of a trial.
    """
    started = os.environ.get("TUNE_ORIG_WORKING_DIR", os.getcwd())
    return with_task_settings(GRPOConfig.from_dict(make_absolute(config, started)), started)
