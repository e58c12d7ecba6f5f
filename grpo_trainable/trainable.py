"""GRPO as a Ray Tune Trainable: one `step()` is one round."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import ray
import ray.util
from pyarrow.fs import FileSelector, LocalFileSystem
from ray import tune
from ray.air.constants import TRAINING_ITERATION
from ray.train._internal.session import _TrainingResult
from ray.train._internal.storage import StorageContext
from ray.tune.registry import register_trainable
from ray.tune.result import RESULT_DUPLICATE

from grpo_trainable.actors.colocated import Colocated
from grpo_trainable.actors.generator import Generator
from grpo_trainable.actors.learner import Learner
from grpo_trainable.calls import Actor, ActorFailed, await_call
from grpo_trainable.checkpointing import (
    CHECKPOINT,
    CheckpointError,
    TrialState,
    newest_whole,
    read_checkpoint,
    refuse_foreign_files,
    remove_older,
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
from grpo_trainable.inputs import input_digests, refuse_changed_inputs
from grpo_trainable.learner_group import LearnerGroup
from grpo_trainable.liveness import Watch
from grpo_trainable.messages import LearnerState
from grpo_trainable.metrics import NAMES, ActorSpan, rllib_metrics
from grpo_trainable.models.store import read_tokenizer
from grpo_trainable.noise import DISTURBED_ABOVE, Meter, place
from grpo_trainable.pipeline import Pipeline, RoundReport
from grpo_trainable.prompts import Prompts, build_task
from grpo_trainable.remote import RayActor, RayCall, RayRuntime, driver_pid
from grpo_trainable.timers import Span, WallClock, now
from grpo_trainable.transports import (
    Group,
    InProcess,
    check_here,
    check_together,
    choose_transport,
    make_receiver,
    make_sender,
)

logger = logging.getLogger(__name__)

NAME = "GRPO"
CLOSE_DEADLINE_S = 2.0  # for all actors of a trial together

# Keys that an actor's process, its reservation and its transport are made from; for any other key
# it can begin anew.
BUILT_INTO_ACTORS = ("placement", "resources", "transport")
# Rounds whose checkpoints outlive `checkpoint.keep`: under synchronous PBT a clone may start from
# its donor's checkpoint of one perturbation until the donor has been through the next.
SHARED_ROUNDS = 2


class GRPOTrainable(tune.Trainable):
    """Owns the actors of one trial and runs the pipeline over them.

    `config` is `GRPOConfig.from_dict`'s. Each row that `step()` returns holds the metrics of one
    round, under the names of `metrics.NAMES`.
    """

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory:
        """A bundle for the trial's own process and one for each actor."""
        return tune.PlacementGroupFactory(GRPOConfig.from_dict(config).bundles())

    def setup(self, config: dict[str, Any]) -> None:
        self._actors: list[RayActor] = []
        self._group: Group | None = None
        self._warm_up_s: float | None = None  # None: not yet
        self.grpo = resolved(config)
        self._runtime = RayRuntime()
        self._meter = Meter(filter(None, [driver_pid()]))
        self._places: list[RayCall] = []  # of actors that have not said yet where they run
        self._transport = choose_transport(self.grpo, reserved_nodes())
        logger.info("transport=%s: %s", self._transport.name, self._transport.why)
        try:
            self._start_actors()
            self._begin()
        except BaseException:
            self.cleanup()
            raise

    def _begin(self) -> None:
        """The trial at round 0, over actors that have done nothing yet."""
        config = self.grpo
        learner, *generators = self._actors
        transport = self._transport
        learners = LearnerGroup(
            [learner],
            self._runtime,
            config.resources.deadline_s,
            partial(learner.tensors, transport.name, "staged") if transport.two_sided else None,
        )
        self._tokenizer = read_tokenizer(config.model.path)
        self._prompts = Prompts(config, build_task(config), self._tokenizer)
        self._inputs = input_digests(config)
        self._learners = learners
        self.pipeline = Pipeline(
            config,
            self._prompts,
            generators or [learner],  # a colocated worker is both
            learners,
            self._runtime,
            spawn=self._replacement if self._replaceable else None,
        )
        self._notes = self._keep_notes()  # since the last round
        self._news = [f"weights travel by {self._transport.name}: {self._transport.why}"]
        self._wall_clock = WallClock()
        self._checkpoints: list[Span] = []  # since the last round
        self._shared_rounds: list[int] = []
        self._saved_round: int | None = None
        self._due = False  # whether the trial itself has asked for a checkpoint of this round
        self._started = False
        self._disturbed = False  # whether the user has heard of it
        self._lost_actor = False  # since the meter was read

    def _start_actors(self) -> None:
        """The learner, or a colocated worker, first."""
        config = self.grpo
        r = config.resources
        if config.placement == "colocated":
            cpus = config.worker_cpus + r.reward_cpus
            worker = self._actor(0, Colocated, "worker", InProcess(), cpus=cpus, gpus=r.worker_gpus)
            self._actors = [worker]
            return
        learner = self._actor(
            0,
            Learner,
            "learner",
            make_sender(self._transport.name),
            cpus=r.learner_cpus,
            gpus=r.learner_gpus,
        )
        self._actors = [learner, *(self._generator(1 + i) for i in range(r.num_generators))]

    def _warm_up(self) -> None:
        """All actors at once, with the prompts of a unit. Actors that began anew are still warm.

        Raises:
            ActorFailed: one of them cannot do what a round asks of it.
        """
        if self._warm_up_s is not None:
            return
        start = now()
        prompts = range(self.grpo.unit_prompts)
        requests = [self._prompts.request("train", index) for index in prompts]
        longest = max(len(request.prompt_ids) for request in requests)
        learner, *generators = self._actors
        if generators:
            calls = [learner.submit("warm-up", "warm_up", longest)]
            calls += [generator.submit("warm-up", "warm_up", requests) for generator in generators]
        else:
            calls = [learner.submit("warm-up", "warm_up", requests, longest)]
        watch = Watch(self._runtime, self.grpo.resources.deadline_s)
        for call in calls:
            watch.result(call)
        self._warm_up_s = now() - start
        self._news.append(f"the actors were warmed up in {self._warm_up_s:.1f} s")

    def _set_up_transport(self) -> float:
        """Seconds that it took.

        Raises:
            ActorFailed: the transport cannot work in one of the actors.
            TransportError: it cannot work between them.
        """
        name, deadline_s = self._transport.name, self.grpo.resources.deadline_s
        calls = [actor.submit_function("sync", check_here, name) for actor in self._actors]
        found = [await_call(self._runtime, call, deadline_s) for call in calls]
        check_together(name, found)
        start = now()
        if self._transport.two_sided and self._group is None:
            self._group = Group(name, [actor.handle for actor in self._actors], deadline_s)
        return max(each.seconds for each in found) + now() - start

    @property
    def _replaceable(self) -> bool:
        """Whether another generator may take the place of a lost one. A colocated one was the
        learner as well, and a collective group takes nobody in."""
        return self.grpo.placement != "colocated" and not self._transport.two_sided

    def _generator(self, index: int) -> RayActor:
        r = self.grpo.resources
        return self._actor(
            index,
            Generator,
            f"generator-{index - 1}",
            make_receiver(
                self._transport.name, r.deadline_s, "cuda" if r.generator_gpus else "cpu"
            ),
            cpus=self.grpo.generator_cpus + r.reward_cpus,
            gpus=r.generator_gpus,
        )

    def _replacement(self, name: str) -> Actor:
        """A new generator in place of the one of this name, which was killed."""
        index = [actor.name for actor in self._actors].index(name)
        self._lost_actor = True
        self._actors[index] = self._generator(index)
        return self._actors[index]

    def _actor(
        self,
        index: int,
        cls: type,
        name: str,
        transport: Any,
        *,
        cpus: float,
        gpus: float,
    ) -> RayActor:
        """The actor at this index of `_actors`. Its bundle is the one after, since the trial's own
        process has the first: if actors shared the group at will, one could take the room of
        another, which would wait for ever where no machine has as much left."""
        actor = RayActor(
            cls,
            name,
            self.grpo,
            transport,
            num_cpus=cpus,
            num_gpus=gpus,
            bundle=1 + index,
            direct=self._transport.direct,
        )
        self._places.append(actor.submit_function("place", place))
        return actor

    def step(self) -> dict[str, Any]:
        if not self._started:
            # Not in setup: a checkpoint is loaded between the two, and its weights must travel.
            self._warm_up()
            self.pipeline.start(self._set_up_transport())
            self._started = True
            self._place_actors()
            self._meter.begin()
        if self.pipeline.ended:
            # Restored from its last checkpoint, before Tune knew that it was the last: nothing
            # follows, and the last row stands.
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
        """What a row holds that is no metric."""
        return {}

    def _disturbance(self, round_: int) -> dict[str, float]:
        """What others took of this machine since the round before; empty where nobody can say."""
        self._place_actors()
        taken = self._meter.take()
        if taken is None:
            return {}
        # What an actor that was killed had used is nobody's by now, and counts as others'.
        lost, self._lost_actor = self._lost_actor, False
        if taken.fraction > DISTURBED_ABOVE and not self._disturbed and not lost:
            self._disturbed = True
            self._notes.append(taken.note(round_))
        return {"time/disturbed_fraction": taken.fraction}

    def _place_actors(self) -> None:
        """Lets the meter know the processes of actors that have started meanwhile."""
        for call in self._runtime.wait(self._places, 0.0) if self._places else []:
            self._places.remove(call)
            with contextlib.suppress(ActorFailed):  # it has ended, which others notice
                self._meter.add(self._runtime.result(call))

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
        """Tune's save, timed whole: writing, and its own copy to the storage path."""
        start = now()
        try:
            if checkpoint_dir is None and self._storage is not None:
                result = self._save_to(self._storage)
            else:
                result = super().save(checkpoint_dir)
            # Tune keeps the last row with every checkpoint, in each snapshot that it takes.
            result.metrics.pop(DETAILS, None)
            return result
        finally:
            span = Span("checkpoint", start, now())
            self._checkpoints.append(span)
            self._wall_clock.checkpointed(span.seconds)

    def _save_to(self, storage: StorageContext) -> _TrainingResult:
        # Not Tune's temporary directory: nobody would remove that of a process that was killed.
        directory = Path(storage.trial_working_directory) / "saving"
        shutil.rmtree(directory, ignore_errors=True)
        # Tune counts on from the last checkpoint that it registered. One that it did not, because
        # it was killed or the copy failed, must not be written over: it may be the only whole one.
        storage.current_checkpoint_index = before = newest_index(storage)
        try:
            result = super().save(str(directory))
            self._remove_older()
            return result
        except OSError as error:
            # No space, or no permission: work that can go on must not end for it.
            reason = error if error.errno is None else os.strerror(error.errno)
            self._notes.append(
                f"the checkpoint could not be written ({reason}); the one before stays"
            )
            self.pipeline.counts.checkpoint_failures += 1
            if storage.current_checkpoint_index > before:
                # What was copied of it would hold the space that is missing.
                with contextlib.suppress(OSError):
                    storage.storage_filesystem.delete_dir(storage.checkpoint_fs_path)
            return _TrainingResult(checkpoint=None, metrics={})
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    @property
    def _local_directory(self) -> Path | None:
        """The trial's directory in the storage path, if that is of this machine."""
        storage = self._storage
        if storage is None or not isinstance(storage.storage_filesystem, LocalFileSystem):
            return None
        return Path(storage.trial_fs_path)

    def _keep_notes(self) -> list[str]:
        keep = self.grpo.checkpoint.keep
        if keep is None or self._storage is None or self._local_directory is not None:
            return []
        return [f"checkpoint.keep={keep} has no effect on a remote storage path: all stay"]

    def _remove_older(self) -> None:
        """What `checkpoint.keep` does not keep. On a remote storage path, where `restore` could
        not look for the newest one, all stay."""
        keep, directory = self.grpo.checkpoint.keep, self._local_directory
        if keep is None or directory is None:
            return
        try:
            remove_older(directory, keep, self._shared_rounds)
        except (CheckpointError, OSError) as error:
            self._notes.append(f"older checkpoints stay: {error}")

    def _share(self, round_: int) -> None:
        """Another trial may go on from this one's checkpoint of `round_`."""
        rounds = [*(other for other in self._shared_rounds if other != round_), round_]
        self._shared_rounds = rounds[-SHARED_ROUNDS:]

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Policy, optimizer, waiting groups and every counter; safetensors and JSON.

        Every random draw is keyed by (seed, prompt index, response, token), so the seed in the
        config and the prompt indices in the pipeline's state are the random state.
        """
        round_ = self.pipeline.gate.learner_round
        # Tune saves of its own accord, or once more, what PBT lets another trial start from.
        if not self._due or round_ == self._saved_round:
            self._share(round_)
        self._saved_round = round_
        learner = self._learners.state()
        state = {
            "config": self.grpo.to_dict(),
            "inputs": self._inputs,
            "shared_rounds": self._shared_rounds,
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
        """Tune's restore, once the directory is known to hold nothing that Ray would unpickle.

        Where it is gone, because `checkpoint.keep` removed it after the last snapshot that Tune
        took of the experiment, the trial goes on from its newest whole one.

        Raises:
            CheckpointError: it holds a file that no checkpoint of ours has.
        """
        checkpoint_path = self._instead_of_removed(checkpoint_path)
        checkpoint = getattr(checkpoint_path, "checkpoint", checkpoint_path)
        if isinstance(checkpoint, tune.Checkpoint):
            with checkpoint.as_directory() as directory:
                refuse_foreign_files(directory)
        else:
            refuse_foreign_files(checkpoint)
        super().restore(checkpoint_path)

    def _instead_of_removed(self, noted: Any) -> Any:
        checkpoint = getattr(noted, "checkpoint", None)
        directory = self._local_directory
        if checkpoint is None or directory is None or Path(checkpoint.path).exists():
            return noted
        whole = newest_whole(directory)
        if whole is None:
            return noted
        path, round_ = whole
        logger.warning("%s is gone; going on from %s", checkpoint.path, path)
        return _TrainingResult(
            checkpoint=tune.Checkpoint(str(path), LocalFileSystem()),
            metrics={**noted.metrics, TRAINING_ITERATION: round_},
        )

    def load_checkpoint(self, checkpoint: Any) -> None:
        """
        Raises:
            CheckpointError: the directory is damaged or none of ours.
            InputChanged: a file that the trial reads is not what it was.
            ActorFailed: the checkpoint is of another model.
        """
        trial = read_checkpoint(Path(checkpoint))
        if self._started:
            # The pipeline in place has work under way that belongs to another history.
            self.reset_config(self.config)
        # Checkpoints of before there were digests have none.
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
        self._shared_rounds = trial.state.get("shared_rounds", [])
        self._share(self.pipeline.gate.learner_round)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Starts over with another config, which must reserve the same resources.

        The actors stay and begin anew where it also shares them out alike and moves weights the
        same way; else others are started.
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
            for call in [actor.submit("reset", "reset", new) for actor in self._actors]:
                await_call(self._runtime, call, new.resources.deadline_s)
            self._begin()
        except ActorFailed as error:
            # Tune does not retry a trial whose reset fails.
            logger.warning("%s; starting other actors", error)
            self.cleanup()
            self.setup(new_config)
        return True

    def cleanup(self) -> None:
        """Ends every actor; what they hold outside their process is closed first."""
        closing = [actor.submit("close", "close") for actor in self._actors]
        end = now() + CLOSE_DEADLINE_S
        for call in closing:
            # The actor may be dead or busy for good: it is killed all the same.
            with contextlib.suppress(RuntimeError):
                await_call(self._runtime, call, deadline_s=max(0.0, end - now()))
        for actor in self._actors:
            actor.kill()
        if self._group is not None:
            self._group.forget()
        self._actors, self._group = [], None


def resolved(config: dict[str, Any]) -> GRPOConfig:
    """A trial's config; relative paths mean the directory in which Ray was started, not the one to
    which Tune moves a trial's process."""
    started = os.environ.get("TUNE_ORIG_WORKING_DIR", os.getcwd())
    return GRPOConfig.from_dict(make_absolute(config, started))


def reserved_nodes() -> list[str]:
    """The machines that a trial's actors may be on: of its placement group, or all there are."""
    group = ray.util.get_current_placement_group()
    if group is None:
        return [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    nodes = ray.util.placement_group_table(group)["bundles_to_node_id"]
    return sorted({node for bundle, node in nodes.items() if bundle != 0})  # 0: the trial's own


def newest_index(storage: StorageContext) -> int:
    """Of the checkpoints in a trial's directory, registered or not; -1 when there is none."""
    entries = storage.storage_filesystem.get_file_info(
        FileSelector(storage.trial_fs_path, allow_not_found=True)
    )
    matches = [CHECKPOINT.fullmatch(entry.base_name) for entry in entries]
    return max((int(match[1]) for match in matches if match), default=-1)


class DetailedGRPO(GRPOTrainable):
    """The same, and every row carries under `DETAILS` what `callbacks.grpo_callbacks` write down:
    responses, version changes and the spans of every actor. Run it with those callbacks, or each
    row is logged with the details in it."""

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


def register() -> None:
    """Makes the Trainable known to Tune as "GRPO", with details for the callbacks."""
    register_trainable(NAME, DetailedGRPO)
