"""One trial: its actors and the pipeline that runs its rounds.

Tune's Trainable and RLlib's Algorithm are thin wrappers around `Trial`.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from grpo_trainable.cluster.bundles import refuse_other_bundles
from grpo_trainable.cluster.ray_actors import RayRuntime, driver_pid
from grpo_trainable.cluster.trial_actors import TrialActors
from grpo_trainable.config import ConfigError, GRPOConfig, prepared, resources, schedule, started_in
from grpo_trainable.engines.selection import chosen_engine
from grpo_trainable.models.directory import policy_shape, policy_tokenizer
from grpo_trainable.pipeline import Evaluation, Pipeline, RoundReport
from grpo_trainable.plugins import PluginError
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
from grpo_trainable.protocol.stopping import StoppableRounds, StopRequest
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
from grpo_trainable.telemetry.metrics import (
    ActorSpan,
    is_named_by_user,
    names_with,
    rllib_metrics,
)
from grpo_trainable.telemetry.timers import Span, WallClock, now

logger = logging.getLogger(__name__)

# An actor's process, reservation and transport are built from the settings under these keys. If
# only other settings change, the actor can be reset instead of replaced.
BUILT_INTO_ACTORS = ("placement", "resources", "transport")


class Trial:
    """Owns the actors of one trial and the pipeline that uses them."""

    def __init__(
        self,
        config: GRPOConfig,
        storage: StorageContext | None = None,
        inputs: Mapping[str, str] | None = None,
        files: Any = None,
        replaced: Collection[str] = (),
        stop_request: StopRequest | None = None,
    ) -> None:
        """Start the actors without waiting for them.

        Args:
            config: The settings, with absolute paths, as `resolved` returns them.
            storage: Tune's storage for the trial's checkpoints. None: Tune stores none.
            inputs: The result of `digests_of_all`, computed for all trials at the start of the
                experiment. The files that this trial reads must still have these digests. None:
                nothing is compared.
            files: A reference to the result of `shipping.contents`, for the machines of a cluster.
            replaced: SHA-256 of earlier versions of files. A checkpoint may have been written with
                these versions.
            stop_request: A request that the trial obeys. None: the trial cannot be stopped.

        Raises:
            ConfigError: The trial's placement group lacks bundles for the trial's actors; the task
                or the tokenizer refuses a setting or the content of a file; or one of the first
                prompts does not fit into the policy's context.
            InputChanged: A file that the trial reads has changed.
            ShippingError: A file cannot be copied to a machine.
        """
        self.stoppable = StoppableRounds(stop_request)
        self._storage = storage
        self._files = files
        self._inputs_at_start = inputs
        self._replaced = replaced
        self._start_actors(config)

    def _start_actors(self, config: GRPOConfig) -> None:
        """Start the actors and put the trial at round 0."""
        refuse_other_bundles(config)
        self.config = config
        # The lambda looks up `stoppable` at each call, because `reset` replaces it.
        self.runtime = RayRuntime(config.resources.deadline_s, lambda: self.stoppable.look())
        self.meter = Meter(filter(None, [driver_pid()]))
        self._niceness = 0  # the largest niceness of the trial's processes so far
        self.actors = TrialActors(config, self.runtime, self._files)
        try:
            self.actors.start()
            self._new_pipeline()
        except BaseException:
            self.end()
            raise

    def _new_pipeline(self) -> None:
        """Create a pipeline at round 0, for actors that are new or have been reset."""
        config, choice = self.config, self.actors.choice
        self._inputs = input_digests(config, self._inputs_at_start)
        self._tokenizer = policy_tokenizer(config.model)
        try:
            self._prompts = Prompts(config, build_task(config), self._tokenizer)
            context_length = policy_shape(config.model).context_length
            self._prompts.check_lengths("train", schedule.unit_prompts(config), context_length)
        except ValueError as error:
            if isinstance(error, PluginError) or isinstance(error.__context__, OSError):
                raise
            # The files could be read, so the error is in their content or in the settings.
            raise ConfigError(str(error)) from error
        self._learners = self.actors.learner_group()
        self.pipeline = Pipeline(
            config,
            self._prompts,
            self.actors.generators,
            self._learners,
            self.runtime,
            spawn=self.replace_generator if self.actors.replaceable else None,
        )
        self.stored = TrialStorage(self._storage, config.checkpoint.keep, self._has_settings)
        self.time_total_s = 0.0  # seconds counted by Tune up to the last checkpoint
        self._notes: list[str] = []  # warnings since the last round
        engine = chosen_engine(config)
        self._news = [
            f"weights are sent by {choice.key}: {choice.why}",
            f"engine {engine.name}: {engine.promise}",
        ]
        self._warm_up_s = 0.0
        self._wall_clock = WallClock()
        self._checkpoints: list[Span] = []  # spans of the checkpoints since the last round
        self._saved_round = 0  # round of the last checkpoint; 0 if there is none
        self._failures = 0  # number of consecutive checkpoints that could not be written
        self._retry_at = math.inf  # round after which writing a checkpoint is tried again
        self.due = False  # True if the trial requests a checkpoint of this round
        self._has_first_weights = False
        self._disturbed = False  # True once the user has been warned about a disturbed round
        self._lost_actor = False  # True if an actor was replaced since the meter was read

    def _send_first_weights(self) -> None:
        """Warm up the actors and send the first weights to the generators, once per pipeline.

        The first round or evaluation calls this method. If a checkpoint was loaded earlier, the
        generators get the weights of the checkpoint.
        """
        if self._has_first_weights:
            return
        self._warm_up()
        for actor in self.actors:
            self.pipeline.clock_offsets[actor.name] = self.actors.clock_offset(actor.name)
        self.pipeline.send_first_weights(self.actors.set_up_transport())
        self._has_first_weights = True
        self._add_processes_to_meter()
        self.meter.start_measuring()

    def _warm_up(self) -> None:
        """Warm up the actors.

        Actors that were reset are warmed up too, because the new config may need larger tensors or
        another model. The first round therefore takes as long with reset actors as with new ones.

        Raises:
            ActorFailed: An actor cannot do the work of a round.
        """
        start = now()
        chunk = range(schedule.unit_prompts(self.config))
        # With difficulty pools, each request of a round names its example, so the requests of the
        # warm-up do too.
        pools = self.config.pools.enabled
        requests = [self._prompts.request("train", i, i if pools else None) for i in chunk]
        self.actors.warm_up(requests)
        self._warm_up_s = now() - start
        self._news.append(f"the actors were warmed up in {self._warm_up_s:.1f} s")

    def replace_generator(self, name: str, patience_s: float) -> Actor | None:
        """Start a generator in place of a killed one, or return None if there is no room for it.

        Args:
            name: The name of the killed generator.
            patience_s: Seconds to wait for a machine with room.

        Raises:
            InputChanged: A file that the new generator would read has changed.
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
        """Number of training rounds so far."""
        return self.pipeline.gate.learner_round

    def run_round(self) -> RoundReport | None:
        """Run one round and return its report, or None if the trial has ended.

        Raises:
            ActorFailed: An actor failed in a way that ends the trial.
            RoundAbandoned: A request to stop came before the round's gradient steps. The trial can
                still be saved as it was after its last finished round, but it runs no more rounds.
        """
        round_ = self.rounds_trained + 1
        evaluates = round_ % self.config.eval.every == 0 or round_ == self.config.rounds
        with self.stoppable.round(round_):
            self._send_first_weights()
            if self.pipeline.ended:
                return None
            report = self.pipeline.run_round(
                partial(self.stoppable.training_begins, evaluates=evaluates)
            )
            eval_s = report.metrics["time/eval_s"]
            self.stoppable.training_ended(len(report.evaluations), eval_s)
        report = self._completed(report)
        regular = report.round % self.config.checkpoint.every == 0
        self.due = report.last or regular or report.round >= self._retry_at
        return report

    def _completed(self, report: RoundReport) -> RoundReport:
        """Complete the pipeline's report of a round with values that only the trial measures.

        These values are the share of CPU time taken by other work, the times and costs, the
        checkpoints and the warnings. Warnings are also logged.
        """
        row = {**report.metrics, **self._disturbance(report.round), **self._time_and_cost(report)}
        row["fleet/niceness"] = float(self._niceness)
        counts = self.pipeline.counts
        row.update(rllib_metrics(row, counts.sampled_responses, counts.sampled_tokens))
        unknown = row.keys() - names_with(self.config.parts)
        assert all(map(is_named_by_user, unknown)), unknown
        warnings = self._notes + report.notes
        for note in warnings:
            logger.warning("%s", note)
        own = [Span("round", report.start, report.end), *self._checkpoints]
        spans = [*report.spans, *(ActorSpan("trial", "trial", span) for span in own)]
        report = replace(report, metrics=row, spans=spans, notes=self._news + warnings)
        self._checkpoints, self._notes, self._news = [], [], []
        return report

    def evaluate(self) -> Evaluation:
        """Return the held-out rewards under the current weights.

        Call this method between two rounds. The trial's wall clock does not count the evaluation.
        """
        self._send_first_weights()
        start = now()
        evaluation = self.pipeline.evaluate()
        self._wall_clock.leave_out(now() - start)
        return evaluation

    def learner_state(self) -> LearnerState:
        """Return a copy of the trained tensors and of the learner's counters."""
        return self._learners.state()

    def _disturbance(self, round_: int) -> dict[str, float]:
        """Return the share of this machine's CPU time that other work took from the trial.

        The share covers the time since the end of the previous round. The result is empty if the
        share is unknown.
        """
        self._add_processes_to_meter()
        taken = self.meter.take()
        if taken is None:
            return {}
        # Once an actor is killed, its CPU time cannot be told apart from the CPU time of other
        # processes.
        lost, self._lost_actor = self._lost_actor, False
        if taken.fraction > DISTURBED_ABOVE and not lost and not self._disturbed:
            self._disturbed = True
            counts = not self.config.callbacks.leave_out_disturbed
            self._notes.append(taken.note(round_, counts=counts))
        return {"time/disturbed_fraction": taken.fraction}

    def _add_processes_to_meter(self) -> None:
        """Add the processes of newly started actors to the meter of CPU time."""
        for process in self.actors.new_processes():
            self.meter.add(process)
            if process.niceness > self._niceness:
                self._niceness = process.niceness
                self._news.append(
                    f"actors run at niceness {process.niceness}, so any ordinary process on their "
                    "machine has priority; to change that, start Ray with RAY_worker_niceness=0 "
                    "and without `nice`"
                )

    def _time_and_cost(self, report: RoundReport) -> dict[str, float]:
        """Return the round's times, throughput and cost.

        Throughput counts only the groups that this round trained on for the first time.
        """
        eval_s = report.metrics["time/eval_s"]
        seconds = self._wall_clock.round_ended(report.start, report.end, eval_s)
        new = [group for group in report.groups if group.uses == 1]
        responses = sum(len(group.response_ids) for group in new)
        tokens = sum(group.num_tokens for group in new)
        return {
            "time/wall_clock_s": self._wall_clock.seconds,
            "time/warm_up_s": self._warm_up_s,
            "time/checkpoint_s": sum((span.seconds for span in self._checkpoints), 0.0),
            "throughput/samples_per_s": responses / seconds,
            "throughput/tokens_per_s": tokens / seconds,
            "cost/device_hours": self._wall_clock.seconds / 3600 * resources.devices(self.config),
        }

    def details(self, report: RoundReport) -> RoundDetails:
        """Return the data that callbacks write: responses, steps, version changes and all spans."""
        updated, decode = report.updated, self._tokenizer.decode
        evaluations: Columns = {}
        for held_out in report.evaluations:
            told = partial(self._prompts.told, "eval")
            columns = response_columns(held_out.groups, held_out.round, told, decode)
            for name, values in columns.items():
                evaluations.setdefault(name, []).extend(values)
        return RoundDetails(
            round=report.round,
            config=self.config.to_dict(),
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

    @property
    def unsaved(self) -> bool:
        """True if no checkpoint contains the latest round."""
        return self.rounds_trained != self._saved_round or self._failures > 0

    @contextlib.contextmanager
    def checkpointing(self) -> Iterator[None]:
        """Count the time of the `with` block as checkpoint time, not as wall-clock time.

        The block must include both writing a checkpoint and copying it to the storage.
        """
        start = now()
        try:
            yield
        finally:
            span = Span("checkpoint", start, now())
            self._checkpoints.append(span)
            self._wall_clock.leave_out(span.seconds)

    def take_notes(self) -> list[str]:
        """Return the warnings since the last round, and leave them out of the next row."""
        notes, self._notes = self._notes, []
        return notes

    def note_checkpoints(self, notes: list[str], *, failed: bool = False) -> None:
        """Report problems with checkpoints, and schedule the next attempt after a failure.

        The next attempt comes 1 round after the first consecutive failure, 2 rounds after the
        second, 4 rounds after the third, and so on, unless a checkpoint is due earlier.

        Args:
            notes: One line for each problem.
            failed: True if a checkpoint could not be written.
        """
        self._notes += notes
        self.pipeline.counts.checkpoint_failures += failed
        self._failures = self._failures + 1 if failed else 0
        self._retry_at = self.rounds_trained + 2 ** (self._failures - 1) if failed else math.inf

    def save(self, directory: str | Path) -> None:
        """Write the policy, optimizer, buffered groups and all counters as safetensors and JSON.

        The learners write their own tensors. Every random draw is a function of (seed, prompt
        index, response, token). So the seed in the config and the prompt indices in the pipeline's
        state make up the entire random state.

        If the round in progress was abandoned, the checkpoint is the same as one written before
        that round.
        """
        # If the trial did not request this checkpoint, or has already saved this round, then Tune
        # requested the checkpoint. Under PBT, another trial may start from such a checkpoint.
        if not self.due or self.rounds_trained == self._saved_round:
            self.stored.share(self.rounds_trained)
        pipeline, groups = self.pipeline.checkpoint()
        with begun(directory) as seen_by:
            learners = self._learners.write(str(directory), seen_by)
        state = {
            "config": self.config.to_dict(),
            "inputs": self._inputs,
            "shared_rounds": self.stored.shared_rounds,
            "origin": self.stored.origin,
            "learner": learners[0].counters,
            "pipeline": pipeline,
            "wall_clock_s": self._wall_clock.seconds,
            "time_total_s": self.time_total_s,
        }
        finish_checkpoint(directory, learners, state, groups)
        self._saved_round = self.rounds_trained

    def load(self, directory: str | Path) -> None:
        """Continue from a checkpoint.

        Raises:
            CheckpointError: The directory is damaged or is not a grpo_trainable checkpoint.
            InputChanged: A file that the trial reads has changed.
            ActorFailed: The checkpoint contains a different model.
        """
        directory = Path(directory).absolute()
        digests = verified_digests(directory)
        state, groups = read_state(directory, digests)
        if self._has_first_weights:
            # The current pipeline has calls in flight that do not belong to the checkpoint.
            self.reset(self.config, self._storage, self.stoppable.request)
        self._compare_inputs(state["inputs"])
        self._learners.read_state(directory, digests, state["learner"])
        self.pipeline.load_state(state["pipeline"], groups)
        self._wall_clock = WallClock(state["wall_clock_s"])
        self.time_total_s = state["time_total_s"]
        self.stored.shared_rounds = state["shared_rounds"]
        self.stored.origin = state.get("origin")
        self.stored.share(self.rounds_trained)
        self._saved_round = self.rounds_trained

    def _has_settings(self, other: Mapping[str, Any]) -> bool:
        """Return True if a checkpoint's config has the trial's present settings.

        A setting with a default may be missing from an old checkpoint.
        """
        with contextlib.suppress(ConfigError):
            return GRPOConfig.from_dict(other) == self.config
        return False

    def _compare_inputs(self, before: Mapping[str, str]) -> None:
        """Compare the digests of the trial's files with those in a checkpoint.

        If the user has deliberately replaced a file, add a note.

        Raises:
            InputChanged: A file has changed, and the user has not replaced it deliberately.
        """
        replaced = {key for key, digest in before.items() if digest in self._replaced}
        kept = {key: digest for key, digest in before.items() if key not in replaced}
        refuse_changed_inputs(self.config, self._inputs, kept)
        self._notes += [
            f"{key} has changed since the checkpoint from which this trial continues"
            for key in sorted(replaced)
            if self._inputs.get(key) != before[key]
        ]

    # ---- Starting over -----------------------------------------------------------------------

    def reset(
        self,
        new: GRPOConfig,
        storage: StorageContext | None,
        stop_request: StopRequest | None,
    ) -> None:
        """Start over with another config.

        The actors are kept if the new config has the same placement, resources and transport as the
        old one. Otherwise new actors are started. `storage` and `stop_request` belong to the new
        trial.

        Raises:
            ConfigError: The trial runs under Tune, and has not reserved resources for the new
                actors.
        """
        old = self.config
        self._storage, self.stoppable = storage, StoppableRounds(stop_request)
        if any(new[key] != old[key] for key in BUILT_INTO_ACTORS):
            self.end()
            self._start_actors(new)
            return
        self.config = new
        self.pipeline.abandon()
        try:
            self.actors.reset(new)
            self._new_pipeline()
        except ActorFailed as error:
            # Tune does not retry a trial whose reset fails.
            logger.warning("%s; starting new actors", error)
            self.end()
            self._start_actors(new)

    def end(self) -> None:
        """End every actor."""
        self.actors.end()


def resolved(config: Mapping[str, Any]) -> GRPOConfig:
    """Return a trial's config with absolute paths and with the defaults of its model and task.

    Raises:
        ConfigError: The settings are invalid, or the small files of the model, on which defaults
            depend, cannot be downloaded. The message is one line.
        PluginError: The user's task cannot be loaded.
    """
    return with_task_settings(GRPOConfig.from_dict(prepared(config)), started_in())
