"""GRPO as a Ray Tune Trainable: one `step()` is one round."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray import tune
from ray.train._internal.session import _TrainingResult
from ray.tune.registry import register_trainable
from ray.tune.result import RESULT_DUPLICATE

from grpo_trainable.calls import Actor, ActorFailed
from grpo_trainable.checkpointing import (
    TrialState,
    read_checkpoint,
    refuse_foreign_files,
    write_checkpoint,
)
from grpo_trainable.config import GRPOConfig, make_absolute
from grpo_trainable.details import (
    DETAILS,
    Columns,
    RoundDetails,
    first_use_lags,
    response_columns,
    rollout_columns,
)
from grpo_trainable.engines.choice import chosen_engine
from grpo_trainable.inputs import input_digests, refuse_changed_inputs
from grpo_trainable.messages import LearnerState
from grpo_trainable.metrics import NAMES, ActorSpan, rllib_metrics
from grpo_trainable.models.store import policy_tokenizer
from grpo_trainable.noise import DISTURBED_ABOVE, Meter
from grpo_trainable.pipeline import Pipeline, RoundReport
from grpo_trainable.prompts import Prompts, build_task
from grpo_trainable.remote import RayRuntime, driver_pid
from grpo_trainable.tasks.custom import with_task_settings
from grpo_trainable.timers import Span, WallClock, now
from grpo_trainable.trial_actors import TrialActors
from grpo_trainable.trial_storage import TrialStorage

logger = logging.getLogger(__name__)

NAME = "GRPO"

# An actor's process, its reservation and its transport are made from these keys. With other values
# of any other key it can begin anew.
BUILT_INTO_ACTORS = ("placement", "resources", "transport")


class GRPOTrainable(tune.Trainable):
    """Owns the actors of one trial and runs the pipeline over them.

    Its config is the plain data that `GRPOConfig.from_dict` reads. Each row that `step()` returns
    holds the metrics of one round, under the names of `metrics.NAMES`.
    """

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory:
        """A bundle for the trial's own process and one for each actor."""
        return tune.PlacementGroupFactory(GRPOConfig.from_dict(config).bundles())

    def setup(self, config: dict[str, Any], inputs: Mapping[str, str] | None = None) -> None:
        """`inputs`: what `digests_of_all` said of the trials when the experiment started. The files
        that this trial reads must still be so; None compares nothing. Hand it over by
        `tune.with_parameters`.

        Raises:
            InputChanged: a file that the trial reads has changed.
        """
        self._inputs_at_start = inputs
        self._warm_up_s: float | None = None  # None: the actors are not warm yet
        self.grpo = resolved(config)
        self._runtime = RayRuntime()
        self._meter = Meter(filter(None, [driver_pid()]))
        self._actors = TrialActors(self.grpo, self._runtime)
        try:
            self._actors.start()
            self._begin()
        except BaseException:
            self.cleanup()
            raise

    def _begin(self) -> None:
        """Puts the trial at round 0, over actors that have done nothing yet."""
        config, choice = self.grpo, self._actors.choice
        self._inputs = input_digests(config, self._inputs_at_start)
        self._tokenizer = policy_tokenizer(config.model)
        self._prompts = Prompts(config, build_task(config), self._tokenizer)
        self._learners = self._actors.learner_group()
        self.pipeline = Pipeline(
            config,
            self._prompts,
            self._actors.generators,
            self._learners,
            self._runtime,
            spawn=self._replace_generator if self._actors.replaceable else None,
        )
        self._stored = TrialStorage(self._storage, config.checkpoint.keep)
        self._notes = self._stored.notes()  # warnings since the last round
        engine = chosen_engine(config)
        self._news = [
            f"weights travel by {choice.key}: {choice.why}",
            f"engine {engine.name}: {engine.promise}",
        ]
        self._wall_clock = WallClock()
        self._checkpoints: list[Span] = []  # written since the last round
        self._saved_round: int | None = None
        self._due = False  # whether the trial itself has asked for a checkpoint of this round
        self._started = False
        self._disturbed = False  # whether the user was told of a disturbed round
        self._lost_actor = False  # whether one was replaced since the meter was read

    def _warm_up(self) -> None:
        """Warms the actors up, unless they began anew and are warm still.

        Raises:
            ActorFailed: one of them cannot do what a round asks of it.
        """
        if self._warm_up_s is not None:
            return
        start = now()
        chunk = range(self.grpo.unit_prompts)
        self._actors.warm_up([self._prompts.request("train", index) for index in chunk])
        self._warm_up_s = now() - start
        self._news.append(f"the actors were warmed up in {self._warm_up_s:.1f} s")

    def _replace_generator(self, name: str) -> Actor:
        self._lost_actor = True
        input_digests(self.grpo, self._inputs)  # the new actor reads the files again
        return self._actors.replace(name)

    def step(self) -> dict[str, Any]:
        if not self._started:
            # This cannot be done in setup: Tune loads a checkpoint after it, whose weights travel.
            self._warm_up()
            self.pipeline.start(self._actors.set_up_transport())
            self._started = True
            self._place_actors()
            self._meter.begin()
        if self.pipeline.ended:
            # The trial was restored from its last checkpoint, which Tune did not know to be the
            # last. Nothing follows, and the last row stands.
            return {RESULT_DUPLICATE: True, "done": True}
        report = self.pipeline.run_round()
        row = {**report.metrics, **self._disturbance(report.round), **self._time_and_cost(report)}
        counts = self.pipeline.counts
        row.update(rllib_metrics(row, counts.sampled_responses, counts.sampled_tokens))
        assert row.keys() <= NAMES, row.keys() - NAMES
        self._due = report.last or report.round % self.grpo.checkpoint.every == 0
        self._notes += report.notes
        for note in self._notes:
            logger.warning("%s", note)
        extra = self._extra(report)
        self._checkpoints, self._notes, self._news = [], [], []
        return {**row, **extra, "done": report.last, "should_checkpoint": self._due}

    def _extra(self, report: RoundReport) -> dict[str, Any]:
        """Entries of a row that are no metrics."""
        return {}

    def _disturbance(self, round_: int) -> dict[str, float]:
        """The share of this machine that others took since the round before; empty if unknown."""
        self._place_actors()
        taken = self._meter.take()
        if taken is None:
            return {}
        # The CPU time of an actor that was killed can no longer be told from that of others.
        lost, self._lost_actor = self._lost_actor, False
        if taken.fraction > DISTURBED_ABOVE and not self._disturbed and not lost:
            self._disturbed = True
            self._notes.append(taken.note(round_))
        return {"time/disturbed_fraction": taken.fraction}

    def _place_actors(self) -> None:
        """Tells the meter the processes of actors that have started meanwhile."""
        for place in self._actors.newly_placed():
            self._meter.add(place)

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
            "cost/device_hours": self._wall_clock.seconds / 3600 * self.grpo.devices,
        }

    # ---- Checkpoints -------------------------------------------------------------------------

    def save(self, checkpoint_dir: str | None = None) -> _TrainingResult:
        """Times Tune's save as a whole: writing, and its copy to the storage path."""
        start = now()
        try:
            if checkpoint_dir is None and self._storage is not None:
                result = self._save_to_storage()
            else:
                result = super().save(checkpoint_dir)
            # Tune keeps the last row with every checkpoint, in each snapshot that it takes.
            result.metrics.pop(DETAILS, None)
            return result
        finally:
            span = Span("checkpoint", start, now())
            self._checkpoints.append(span)
            self._wall_clock.checkpointed(span.seconds)

    def _save_to_storage(self) -> _TrainingResult:
        try:
            with self._stored.saving() as directory:
                result = super().save(directory)
            self._notes += self._stored.remove_older()
            return result
        except OSError as error:
            # No space, or no permission: work that can go on must not end because of it.
            reason = error if error.errno is None else os.strerror(error.errno)
            self._notes.append(
                f"the checkpoint could not be written ({reason}); the one before stays"
            )
            self.pipeline.counts.checkpoint_failures += 1
            return _TrainingResult(checkpoint=None, metrics={})

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Writes policy, optimizer, waiting groups and every counter as safetensors and JSON.

        Every random draw is keyed by (seed, prompt index, response, token), so the seed in the
        config and the prompt indices in the pipeline's state are the random state.
        """
        round_ = self.pipeline.gate.learner_round
        # A checkpoint that the trial did not ask for, or a second one, is Tune's: under PBT another
        # trial may start from it.
        if not self._due or round_ == self._saved_round:
            self._stored.share(round_)
        self._saved_round = round_
        learner = self._learners.state()
        state = {
            "config": self.grpo.to_dict(),
            "inputs": self._inputs,
            "shared_rounds": self._stored.shared_rounds,
            "learner": learner.counters,
            "pipeline": self.pipeline.state(),
            "wall_clock_s": self._wall_clock.seconds,
        }
        trial = TrialState(
            state=state,
            policy=learner.policy,
            optimizer=learner.optimizer,
            groups=self.pipeline.buffer.groups(),
        )
        write_checkpoint(checkpoint_dir, trial)

    def restore(self, checkpoint_path: Any) -> None:
        """Restores a checkpoint that holds nothing that Ray would unpickle.

        Where it is gone, because `checkpoint.keep` removed it after the last snapshot that Tune
        took of the experiment, the trial goes on from its newest whole checkpoint.

        Raises:
            CheckpointError: the directory holds a file that does not belong to a checkpoint.
        """
        checkpoint_path = self._stored.instead_of_removed(checkpoint_path)
        checkpoint = getattr(checkpoint_path, "checkpoint", checkpoint_path)
        if isinstance(checkpoint, tune.Checkpoint):
            with checkpoint.as_directory() as directory:
                refuse_foreign_files(directory)
        else:
            refuse_foreign_files(checkpoint)
        super().restore(checkpoint_path)

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Goes on from a checkpoint.

        Raises:
            CheckpointError: the directory is damaged or is not a grpo_trainable checkpoint.
            InputChanged: a file that the trial reads has changed.
            ActorFailed: the checkpoint holds another model.
        """
        trial = read_checkpoint(Path(checkpoint))
        if self._started:
            # The present pipeline has work under way that does not belong to the checkpoint.
            self.reset_config(self.config)
        # Checkpoints of older versions hold no digests.
        refuse_changed_inputs(self.grpo, self._inputs, trial.state.get("inputs", {}))
        self._learners.load_state(
            LearnerState(
                policy=trial.policy,
                optimizer=trial.optimizer,
                counters=trial.state["learner"],
            )
        )
        self.pipeline.load_state(trial.state["pipeline"], trial.groups)
        self._wall_clock = WallClock(trial.state["wall_clock_s"])
        self._stored.shared_rounds = trial.state.get("shared_rounds", [])
        self._stored.share(self.pipeline.gate.learner_round)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Starts over with another config; False where it reserves other resources.

        The actors stay where the config also has the same placement, resources and transport.
        Otherwise others are started.
        """
        new, old = resolved(new_config), self.grpo
        if new.bundles() != old.bundles():
            return False
        if any(new[key] != old[key] for key in BUILT_INTO_ACTORS):
            self.cleanup()
            self.setup(new_config)
            return True
        self.grpo = new
        self.pipeline.abandon()
        try:
            self._actors.reset(new)
            self._begin()
        except ActorFailed as error:
            # Tune does not retry a trial whose reset fails.
            logger.warning("%s; starting other actors", error)
            self.cleanup()
            self.setup(new_config)
        return True

    def cleanup(self) -> None:
        """Ends every actor."""
        self._actors.end()


def resolved(config: dict[str, Any]) -> GRPOConfig:
    """A trial's config, with absolute paths.

    Relative ones mean the directory in which Ray was started, not the one to which Tune moves the
    process of a trial.
    """
    started = os.environ.get("TUNE_ORIG_WORKING_DIR", os.getcwd())
    return with_task_settings(GRPOConfig.from_dict(make_absolute(config, started)), started)


class DetailedGRPO(GRPOTrainable):
    """A GRPOTrainable whose rows also carry what the callbacks write down, under `DETAILS`.

    These are responses, version changes and the spans of every actor. Run it with
    `callbacks.grpo_callbacks`, or each row is logged with the details in it.
    """

    def _extra(self, report: RoundReport) -> dict[str, Any]:
        updated, decode = report.updated, self._tokenizer.decode
        evaluations: Columns = {}
        for held_out in report.evaluations:
            columns = response_columns(
                held_out.groups, lambda index: self._prompts.text("eval", index), decode
            )
            columns = {"round": [held_out.round] * len(columns["reward"]), **columns}
            for name, values in columns.items():
                evaluations.setdefault(name, []).extend(values)
        trial = [Span("round", report.start, report.end), *self._checkpoints]
        details = RoundDetails(
            round=report.round,
            rollouts=rollout_columns(
                report.groups,
                report.round - 1,
                lambda index: self._prompts.text("train", index),
                decode,
                advantages=updated.responses.advantages,
                policy_log_probs=updated.responses.policy_log_probs,
                reference_log_probs=updated.responses.reference_log_probs,
            ),
            evaluations=evaluations,
            steps=updated.step_columns(),
            versions=report.versions,
            spans=[*report.spans, *(ActorSpan("trial", "trial", span) for span in trial)],
            notes=self._news + self._notes,
            lags=first_use_lags(report.groups, report.round - 1),
            ratio_counts=[
                sum(counts)
                for counts in zip(*(step.ratio_counts for step in updated.steps), strict=True)
            ],
        )
        return {DETAILS: details}


def register(inputs: Mapping[str, str] | None = None) -> None:
    """Makes the Trainable known to Tune as "GRPO", with details for the callbacks.

    `inputs`: what `inputs.digests_of_all` says of the trials. A trial that would then read a file
    with another content fails and names it; without them each trial reads what it finds.
    """
    trainable: type = DetailedGRPO
    if inputs is not None:
        trainable = tune.with_parameters(DetailedGRPO, inputs=inputs)
        trainable.__qualname__ = DetailedGRPO.__qualname__  # which Ray names the process by
    register_trainable(NAME, trainable)
