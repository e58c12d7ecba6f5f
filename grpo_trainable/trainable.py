"""GRPO as a Ray Tune Trainable. Each call of `step()` runs one round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import ray
from ray import tune
from ray.tune.registry import register_trainable
from ray.tune.result import RESULT_DUPLICATE

from grpo_trainable.cluster.invalid_trial import InvalidTrial, requested
from grpo_trainable.cluster.shipping import lay_down
from grpo_trainable.config import ConfigError, GRPOConfig
from grpo_trainable.protocol.round_records import DETAILS
from grpo_trainable.storage.checkpointing import DamagedCheckpoint, refuse_foreign_files
from grpo_trainable.storage.last_policy import PAUSES_S, PolicyNotSaved, save_persistently
from grpo_trainable.storage.object_store import reason
from grpo_trainable.storage.ray_private import _TrainingResult

if TYPE_CHECKING:
    from grpo_trainable.pipeline import RoundReport
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

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory:
        """Return one bundle for the trial's own process, and one for each actor.

        If the config is invalid, return only the first of these bundles. The trial then fails at
        its first step.
        """
        return requested(lambda: GRPOConfig.from_dict(config))

    def setup(
        self,
        config: dict[str, Any],
        inputs: Mapping[str, str] | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        """Write the files that this machine lacks, and start the actors without waiting for them.

        Pass `inputs` and `files` with `tune.with_parameters`.

        Args:
            config: The trial's settings, as plain data.
            inputs: See `Trial`.
            files: The result of `shipping.contents`. Machines of the trial receive the files that
                they lack.

        Raises:
            ConfigError: The config is invalid. Under Tune, the first step raises this error. An
                error of `setup` would look like the death of the trial's process.
            InputChanged: A file that the trial reads has changed.
            ShippingError: A file cannot be copied to a machine.
        """
        self._looked_for_checkpoint = False
        shipped = None
        if files:
            lay_down(files)
            shipped = ray.put(files)
        # This import is not at the top, because a command that starts trials imports this class but
        # does not need the libraries of a trial, such as torch.
        from grpo_trainable.trial import Trial, resolved

        try:
            self.trial = Trial(resolved(config), self._storage, inputs, shipped)
        except ConfigError as error:
            self._fail_later(error)

    def _fail_later(self, error: ConfigError) -> None:
        """Make the next step or restore raise the error, or raise it now if Tune runs no trial."""
        if self._trial_info is None:
            raise error
        self.trial = cast("Trial", InvalidTrial(error))

    def step(self) -> dict[str, Any]:
        """Run one round and return its row of metrics.

        The first call restores the trial's newest checkpoint, unless `restore` has been called.
        """
        if not self._looked_for_checkpoint:
            self._restore_newest()
        report = self.trial.run_round()
        if report is None:
            # Tune restored the trial from its final checkpoint without knowing that no round
            # follows. The row of the last round stays valid.
            return {RESULT_DUPLICATE: True, "done": True}
        return {
            **report.metrics,
            **self._extra(report),
            "done": report.last,
            "should_checkpoint": self.trial.due,
        }

    def _extra(self, report: RoundReport) -> dict[str, Any]:
        """Return the entries of a row that are not metrics."""
        return {}

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
                result = self._save_to_storage()
            else:
                result = super().save(checkpoint_dir)
        # Tune stores the last row with every checkpoint, in every snapshot of the experiment, so
        # the row must not contain the details.
        result.metrics.pop(DETAILS, None)
        return result

    def _save_to_storage(self) -> _TrainingResult:
        trial, ended = self.trial, self.trial.pipeline.ended
        try:
            result = save_persistently(self._write_to_storage, self.last_pauses_s if ended else ())
        except OSError as error:
            # The disk is full, permission is missing, or an object store fails or does not answer.
            # A trial that can continue must survive such a failure. A trial after its last round
            # would silently lose its last policy, so it raises an error.
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
        """Restore a checkpoint. If it is damaged, restore the trial's newest intact checkpoint.

        Raises:
            CheckpointError: The checkpoint cannot be read, has another format or, outside Tune, is
                damaged.
        """
        self._go_on(checkpoint_path)

    def _restore_newest(self) -> None:
        """Restore the newest intact checkpoint of the trial, if there is one.

        If the driver was killed, Tune may not know of checkpoints that the trial has written.
        """
        self._go_on(None)

    def _go_on(self, noted: Any) -> None:
        """Restore a checkpoint with `TrialStorage.go_on`, and set Tune's counters to match."""
        self._looked_for_checkpoint = True
        notes = self.trial.stored.go_on(noted, self._restore, rows_follow=self.followed)
        self.trial.note_checkpoints(notes)
        # Tune's counters may belong to another checkpoint, or to none.
        self._iteration, self._time_total = self.trial.rounds_trained, self.trial.time_total_s
        self._iterations_since_restore, self._time_since_restore = 0, 0.0

    def _restore(self, checkpoint_path: Any) -> int:
        """Restore this checkpoint, unless it contains a foreign file, and return its round.

        Tune's own `restore` would unpickle a foreign file.
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
        return self.trial.rounds_trained

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Continue from a checkpoint. Raises the errors of `Trial.load`."""
        self.trial.load(checkpoint)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Start over with another config, or return False if it needs other resources.

        Under Tune, a config that is invalid ends the actors, and the next step raises the reason.
        """
        from grpo_trainable.trial import resolved

        self._looked_for_checkpoint = False
        trial = self.trial
        try:
            return trial.reset(resolved(new_config), self._storage)
        except ConfigError as error:
            # If this method raised the error or returned False, Tune would report another reason,
            # or none, and would not free the trial's resources.
            self._fail_later(error)
            trial.end()
            return True

    def cleanup(self) -> None:
        """End every actor."""
        self.trial.end()


class DetailedGRPO(GRPOTrainable):
    """A GRPOTrainable whose rows contain, under `DETAILS`, the data that callbacks write to files.

    Run it with `callbacks.grpo_callbacks`. Without these callbacks, Tune logs each row with its
    details, and an object store keeps every checkpoint that is newer than the rows stored there.
    """

    followed = True

    def _extra(self, report: RoundReport) -> dict[str, Any]:
        return {DETAILS: self.trial.details(report)}


def register(
    inputs: Mapping[str, str] | None = None, files: Mapping[str, bytes] | None = None
) -> None:
    """Register the Trainable with Tune as "GRPO", with details for the callbacks.

    Args:
        inputs: The result of `inputs.digests_of_all` for the trials. A trial fails if a file that
            it would read has changed since the digests were computed; the error names the file.
            None: each trial reads the files as they are.
        files: The result of `shipping.contents`, for machines that lack the user's files.
    """
    trainable: type = DetailedGRPO
    if inputs is not None:
        trainable = tune.with_parameters(DetailedGRPO, inputs=inputs, files=dict(files or {}))
        # Ray names the trial's process after `__qualname__`.
        trainable.__qualname__ = DetailedGRPO.__qualname__
    register_trainable(NAME, trainable)
