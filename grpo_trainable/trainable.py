"""GRPO as a Ray Tune Trainable. Each call of `step()` runs one round."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import ray
from ray import tune
from ray.tune.registry import register_trainable
from ray.tune.result import RESULT_DUPLICATE, TIME_TOTAL_S

from grpo_trainable.cluster.shipping import lay_down
from grpo_trainable.cluster.tune_trials import InvalidTrial, requested
from grpo_trainable.config import GRPOConfig, prepared
from grpo_trainable.protocol.round_records import Row
from grpo_trainable.protocol.stopping import RoundAbandoned, Stopped
from grpo_trainable.storage.checkpointing import DamagedCheckpoint, refuse_foreign_files
from grpo_trainable.storage.last_policy import PAUSES_S, PolicyNotSaved, save_persistently
from grpo_trainable.storage.object_store import reason
from grpo_trainable.storage.ray_private import TRAINING_ITERATION, _TrainingResult
from grpo_trainable.storage.stop_requests import TuneStopRequest
from grpo_trainable.telemetry.metrics import COPIED_FROM

if TYPE_CHECKING:
    from grpo_trainable.pipeline import RoundReport
    from grpo_trainable.protocol.round_records import RoundDetails
    from grpo_trainable.trial import Trial

NAME = "GRPO"


class GRPOTrainable(tune.Trainable):
    """The Tune Trainable that runs a `Trial`.

    Its config is the plain data that `GRPOConfig.from_dict` reads. Each row that `step()` returns
    contains the metrics of one round, keyed by the names in `metrics.NAMES`.
    """

    trial: Trial
    last_pauses_s: Sequence[float] = PAUSES_S  # seconds between attempts to save the last policy
    followed = False  # True if callbacks write the rows to files
    stops_on_request = True  # read by `callbacks.save_on_interrupt`

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory:
        """Return one bundle for the trial's own process, and one for each actor.

        If the config is invalid, return only the first of these bundles. The trial then fails at
        its first step.
        """
        return requested(lambda: GRPOConfig.from_dict(prepared(config, must_fetch=False)))

    def setup(
        self,
        config: dict[str, Any],
        inputs: Mapping[str, str] | None = None,
        files: Mapping[str, bytes] | None = None,
        replaced: Collection[str] = (),
    ) -> None:
        """Write the files that this machine lacks, and start the actors without waiting for them.

        Under Tune, if this fails, the first step raises the error. An error in `setup` would look
        like the death of the trial's process, and Tune's callbacks would not see that the trial had
        started.

        Pass all arguments except `config` with `tune.with_parameters`.

        Args:
            config: The trial's settings, as plain data.
            inputs: See `Trial`.
            files: The result of `shipping.contents`. Machines of the trial receive the files that
                they lack.
            replaced: See `Trial`.

        Raises:
            ConfigError: The config is invalid.
            PluginError: The user's task cannot be loaded.
            ValueError: A file that a setting names cannot be read.
            InputChanged: A file that the trial reads has changed.
            ShippingError: A file cannot be copied to a machine.
        """
        self._looked_for_checkpoint = False
        # Directory name of the trial whose checkpoint has just been restored; None after a round.
        self._copied: str | None = None
        shipped = None
        try:
            # This import is not at the top, because a command that starts trials imports this class
            # but does not need the libraries of a trial, such as torch.
            from grpo_trainable.trial import Trial, resolved

            if files:
                lay_down(files)
                shipped = ray.put(files)
            self.trial = Trial(
                *(resolved(config), self._storage, inputs, shipped, replaced),
                stop_request=self._stop_request(),
            )
        except Exception as error:
            self._fail_later(error)

    def _fail_later(self, error: Exception) -> None:
        """Let the next `step` or `restore` raise the error. Outside Tune, raise the error now."""
        if self._trial_info is None:
            raise error
        self.trial = cast("Trial", InvalidTrial(error))

    def _stop_request(self) -> TuneStopRequest | None:
        """Return the object through which the driver requests a stop, or None outside Tune."""
        return None if self._storage is None else TuneStopRequest(self.trial_id)

    def step(self) -> dict[str, Any]:
        """Run one round and return its row of metrics.

        The first call restores the trial's newest checkpoint, unless `restore` has been called.

        A call that abandons its round saves the last finished round. It waits until Tune's run has
        ended, and then returns without a row.

        Raises:
            RuntimeError: An earlier call returned the row of the last round.
        """
        if not self._looked_for_checkpoint:
            self._restore_newest()
        try:
            report = self.trial.run_round()
        except RoundAbandoned as abandoned:
            self._stop(abandoned.lost_s)
            return {RESULT_DUPLICATE: True}
        if report is None:
            if self._iterations_since_restore or self._ended:
                raise RuntimeError(
                    f"the trial ended after round {self._iteration}; restore an earlier "
                    "checkpoint, or create a Trainable with more rounds"
                )
            # The trial was restored from its final checkpoint, and no round follows. Tune keeps the
            # row of the last round and ignores this one. Outside Tune, this row says how far the
            # trial got.
            self._ended = True
            ended = {TRAINING_ITERATION: self._iteration, TIME_TOTAL_S: self._time_total}
            return {RESULT_DUPLICATE: True, "done": True, **ended}
        self._ran(report)
        copied, self._copied = self._copied, None
        donor = {} if copied is None else {COPIED_FROM: copied}
        last = {"done": report.last, "should_checkpoint": self.trial.due}
        return {**report.metrics, **donor, **last}

    def _ran(self, report: RoundReport) -> None:
        """Do nothing. A subclass may use the report of a round before `step` returns its row."""

    def _stop(self, lost_s: float) -> None:
        """Save the last finished round unless it is already saved, and wait for Tune's run to end.

        Tune cannot save a trial without a row, so the trial writes the checkpoint itself.

        Args:
            lost_s: Seconds spent on the round that was abandoned.
        """
        request = self._stop_request()
        assert request is not None
        checkpoint = self.save().checkpoint if self.trial.unsaved else None
        request.say(
            Stopped(
                round=self.trial.rounds_trained,
                saved=not self.trial.unsaved and self.trial.rounds_trained > 0,
                lost_s=lost_s,
                checkpoint=None if checkpoint is None else checkpoint.path,
                notes=self.trial.take_notes(),
            )
        )
        # If this call returned earlier, Tune would read the result and consider the trial finished.
        request.wait_until_released()

    # ---- Checkpoints -------------------------------------------------------------------------

    def save(self, checkpoint_dir: str | None = None) -> _TrainingResult:
        """Save a checkpoint, and record how long saving takes.

        The recorded time includes writing the checkpoint and copying it to the storage path. If a
        running trial cannot write its checkpoint to Tune's storage path, it continues with a
        warning.

        Args:
            checkpoint_dir: The directory to write to. None: Tune's storage path.

        Raises:
            PolicyNotSaved: The trial has ended, and its last policy could not be saved.
        """
        with self.trial.checkpointing():
            if checkpoint_dir is None and self._storage is not None:
                return self._save_to_storage()
            return super().save(checkpoint_dir)

    def _save_to_storage(self) -> _TrainingResult:
        trial, ended = self.trial, self.trial.pipeline.ended
        pauses_s = self.last_pauses_s if ended or trial.stoppable.stopped else ()
        try:
            result = save_persistently(self._write_to_storage, pauses_s)
        except OSError as error:
            # The disk is full, permission is missing, or an object store fails or does not answer.
            # A trial that can continue must survive such a failure. A trial that was stopped
            # reports the failure to the user. A trial that has run its last round would silently
            # lose its last policy, so it raises an error.
            if ended:
                raise PolicyNotSaved(
                    f"{trial.config.arm}/{trial.config.seed}: the last policy, of round "
                    f"{trial.rounds_trained}, was not saved ({reason(error)}); fix the storage and "
                    "resume (the rounds since the last checkpoint are repeated)"
                ) from error
            note = (
                f"the checkpoint could not be written ({reason(error)}); the previous one is kept"
            )
            trial.note_checkpoints([note], failed=True)
            return _TrainingResult(checkpoint=None, metrics={})
        trial.note_checkpoints(trial.stored.remove_older(rows_follow=self.followed))
        return result

    def _write_to_storage(self) -> _TrainingResult:
        with self.trial.stored.saving() as directory:
            return super().save(directory)

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Write the trial to a directory as safetensors and JSON."""
        self.trial.time_total_s = self._time_total
        self.trial.save(checkpoint_dir)

    def restore(self, checkpoint_path: Any) -> None:
        """Restore a checkpoint or, if it is damaged, the trial's newest intact checkpoint.

        In the next row, the count of rounds and the total time continue from those of the
        checkpoint.

        Args:
            checkpoint_path: A path, the URI of a directory in an object store, a `tune.Checkpoint`,
                the return value of `save`, or a `tune.Result` with a checkpoint.

        Raises:
            CheckpointError: The checkpoint cannot be read, has another format or, outside Tune, is
                damaged.
        """
        if isinstance(checkpoint_path, str | Path) and "://" not in str(checkpoint_path):
            checkpoint_path = os.path.abspath(checkpoint_path)  # Ray accepts no relative path
        self._go_on(checkpoint_path)

    def _restore_newest(self) -> None:
        """Restore the newest intact checkpoint of the trial, if there is one.

        If the driver was killed, Tune may not know of checkpoints that the trial has written.
        """
        self._go_on(None)

    def _go_on(self, noted: Any) -> None:
        """Restore a checkpoint with `TrialStorage.go_on`, and set Tune's counters to match."""
        notes = self.trial.stored.go_on(noted, self._restore, rows_follow=self.followed)
        self.trial.note_checkpoints(notes)
        self._follow_trial()

    def _follow_trial(self) -> None:
        """Set Tune's counters to the counters of a trial that has just begun or been restored."""
        self._looked_for_checkpoint = True
        self._ended = False  # True after a step has found that no round follows
        self._iteration, self._time_total = self.trial.rounds_trained, self.trial.time_total_s
        self._iterations_since_restore, self._time_since_restore = 0, 0.0

    def _restore(self, checkpoint_path: Any) -> int:
        """Restore this checkpoint and return its round.

        Reject a directory with a file that does not belong to a checkpoint, because Tune's own
        `restore` would unpickle such a file.
        """
        checkpoint = getattr(checkpoint_path, "checkpoint", checkpoint_path)
        if isinstance(checkpoint, str):
            checkpoint = tune.Checkpoint(checkpoint)
        with checkpoint.as_directory() as directory:
            try:
                refuse_foreign_files(directory)
                self.load_checkpoint(directory)
            except DamagedCheckpoint as error:
                # A checkpoint in an object store is read from a local copy. The message must name
                # the path of the checkpoint, not of the copy.
                raise type(error)(str(error).replace(str(directory), checkpoint.path)) from error
        self._copied = self.trial.stored.follow(checkpoint)
        return self.trial.rounds_trained

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Continue from a checkpoint. Raises the errors of `Trial.load`."""
        self.trial.load(checkpoint)
        self._follow_trial()

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Start over with another config, and return True.

        Under Tune, if the trial cannot start over, this method ends the actors, and the next step
        raises the error. Possible reasons are an invalid config, resources that the trial has not
        reserved, and a file that has changed.
        """
        from grpo_trainable.trial import resolved

        self._looked_for_checkpoint, self._copied = False, None
        trial = self.trial
        try:
            trial.reset(resolved(new_config), self._storage, self._stop_request())
        except Exception as error:
            # If this method raised the error or returned False, Tune would not retry the trial or
            # free its resources, and would report a different reason or none.
            self._fail_later(error)
            trial.end()
        return True

    def cleanup(self) -> None:
        """End every actor. Later steps raise an error."""
        self.trial.end()
        stopped = RuntimeError(
            "the Trainable was stopped; create a new one, and restore a checkpoint"
        )
        self.trial = cast("Trial", InvalidTrial(stopped))


class DetailedGRPO(GRPOTrainable):
    """A GRPOTrainable whose rows also carry the data that callbacks write to files.

    Run it with `callbacks.grpo_callbacks`. Without these callbacks, an object store keeps every
    checkpoint that is newer than the rows stored there.
    """

    followed = True
    _details: RoundDetails | None = None

    def train(self) -> Row:
        """Run one round, and return its complete row with the details of the round."""
        row = super().train()
        details, self._details = self._details, None
        # `super().train` keeps the row. Tune stores the kept row with every checkpoint and in every
        # snapshot of the experiment, so the kept row must not contain details.
        return Row.of(row, details)

    def _ran(self, report: RoundReport) -> None:
        self._details = self.trial.details(report)


def register(
    inputs: Mapping[str, str] | None = None,
    files: Mapping[str, bytes] | None = None,
    replaced: Collection[str] = (),
) -> None:
    """Register `DetailedGRPO`, whose rows carry details for the callbacks, with Tune as "GRPO".

    Args:
        inputs: The result of `input_files.digests_of_all` for the trials. A trial fails if a file
            that it would read has changed since the digests were computed; the error names the
            file. None: nothing is compared.
        files: The result of `shipping.contents`, for machines that lack the user's files.
        replaced: SHA-256 of earlier versions of files. A trial continues from a checkpoint even if
            the checkpoint was written with one of these versions.
    """
    trainable: type = DetailedGRPO
    if inputs is not None:
        trainable = tune.with_parameters(
            DetailedGRPO, inputs=inputs, files=dict(files or {}), replaced=frozenset(replaced)
        )
        # Ray names the trial's process after `__qualname__`.
        trainable.__qualname__ = DetailedGRPO.__qualname__
    register_trainable(NAME, trainable)
