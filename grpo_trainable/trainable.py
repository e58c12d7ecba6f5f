"""GRPO as a Ray Tune Trainable: one `step()` is one round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray import tune
from ray.tune.registry import register_trainable
from ray.tune.result import RESULT_DUPLICATE

from grpo_trainable.cluster.shipping import lay_down
from grpo_trainable.config import GRPOConfig, resources
from grpo_trainable.protocol.round_records import DETAILS
from grpo_trainable.storage.checkpointing import DamagedCheckpoint, refuse_foreign_files
from grpo_trainable.storage.last_policy import PAUSES_S, PolicyNotSaved, save_persistently
from grpo_trainable.storage.object_store import reason
from grpo_trainable.storage.ray_private import _TrainingResult

if TYPE_CHECKING:
    from grpo_trainable.pipeline import RoundReport

NAME = "GRPO"


class GRPOTrainable(tune.Trainable):
    """A `Trial` as Tune runs it.

    Its config is the plain data that `GRPOConfig.from_dict` reads. Each row that `step()` returns
    holds the metrics of one round, under the names of `metrics.NAMES`.
    """

    last_pauses_s: Sequence[float] = PAUSES_S  # between the attempts to save the last policy
    followed = False  # by callbacks, which write the rows down

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory:
        """A bundle for the trial's own process and one for each actor."""
        trial = GRPOConfig.from_dict(config)
        return tune.PlacementGroupFactory(
            resources.bundles(trial), strategy=resources.placement_strategy(trial)
        )

    def setup(
        self,
        config: dict[str, Any],
        inputs: Mapping[str, str] | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        """`inputs`: as `Trial` takes them. `files`: as `shipping.contents` gives them; the machines
        of the trial get those that they lack. Hand both over by `tune.with_parameters`.

        Raises:
            InputChanged: a file that the trial reads has changed.
            ShippingError: a machine cannot have one.
        """
        shipped = None
        if files:
            lay_down(files)
            shipped = ray.put(files)
        # Here and not above: the command knows this class, and needs none of the libraries that a
        # trial needs, torch first among them.
        from grpo_trainable.trial import Trial, resolved

        self.trial = Trial(resolved(config), self._storage, inputs, shipped)
        self._looked_for_checkpoint = False

    def step(self) -> dict[str, Any]:
        if not self._looked_for_checkpoint:
            self._restore_newest()
        report = self.trial.run_round()
        if report is None:
            # The trial was restored from its last checkpoint, which Tune did not know to be the
            # last. Nothing follows, and the last row stands.
            return {RESULT_DUPLICATE: True, "done": True}
        return {
            **report.metrics,
            **self._extra(report),
            "done": report.last,
            "should_checkpoint": self.trial.due,
        }

    def _extra(self, report: RoundReport) -> dict[str, Any]:
        """Entries of a row that are no metrics."""
        return {}

    # ---- Checkpoints -------------------------------------------------------------------------

    def save(self, checkpoint_dir: str | None = None) -> _TrainingResult:
        """Times Tune's save as a whole: writing, and its copy to the storage path.

        Raises:
            PolicyNotSaved: the trial has ended, and its last policy could not be saved.
        """
        with self.trial.checkpointing():
            if checkpoint_dir is None and self._storage is not None:
                result = self._save_to_storage()
            else:
                result = super().save(checkpoint_dir)
        # Tune keeps the last row with every checkpoint, in each snapshot that it takes.
        result.metrics.pop(DETAILS, None)
        return result

    def _save_to_storage(self) -> _TrainingResult:
        trial, ended = self.trial, self.trial.pipeline.ended
        try:
            result = save_persistently(self._write_to_storage, self.last_pauses_s if ended else ())
        except OSError as error:
            # No space, no permission, a store that fails or is silent: work that can go on must not
            # end because of it. What has ended would be lost without a word.
            if ended:
                raise PolicyNotSaved(
                    f"{trial.config.arm}/{trial.config.seed}: its last policy, of round "
                    f"{trial.rounds_trained}, is not saved ({reason(error)}); once the storage "
                    "takes it, a resume trains the rounds after its last checkpoint again"
                ) from error
            note = f"the checkpoint could not be written ({reason(error)}); the one before stays"
            trial.note_checkpoints([note], failed=True)
            return _TrainingResult(checkpoint=None, metrics={})
        trial.note_checkpoints(trial.stored.remove_older(rows_follow=self.followed))
        return result

    def _write_to_storage(self) -> _TrainingResult:
        with self.trial.stored.saving() as directory:
            return super().save(directory)

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Writes the trial as safetensors and JSON."""
        self.trial.time_total_s = self._time_total
        self.trial.save(checkpoint_dir)

    def restore(self, checkpoint_path: Any) -> None:
        """Restore a checkpoint, or the newest whole one of the trial where that one is damaged.

        Raises:
            CheckpointError: It cannot be read, is of another format, or, outside of Tune, damaged.
        """
        self._go_on(checkpoint_path)

    def _restore_newest(self) -> None:
        """Restore the newest whole checkpoint of the trial, if it has one.

        A killed driver may not have noted the checkpoints that the trial has written.
        """
        self._go_on(None)

    def _go_on(self, noted: Any) -> None:
        """Restore a checkpoint as `TrialStorage.go_on` does, and set Tune's counters by it."""
        self._looked_for_checkpoint = True
        notes = self.trial.stored.go_on(noted, self._restore, rows_follow=self.followed)
        self.trial.note_checkpoints(notes)
        # Tune may have noted another checkpoint, or none.
        self._iteration, self._time_total = self.trial.rounds_trained, self.trial.time_total_s
        self._iterations_since_restore, self._time_since_restore = 0, 0.0

    def _restore(self, checkpoint_path: Any) -> int:
        """Restore this checkpoint, unless it holds a foreign file. Return its round.

        Tune's own `restore` would unpickle such a file.
        """
        checkpoint = getattr(checkpoint_path, "checkpoint", checkpoint_path)
        if isinstance(checkpoint, str):
            checkpoint = tune.Checkpoint(checkpoint)
        with checkpoint.as_directory() as directory:
            try:
                refuse_foreign_files(directory)
                self.load_checkpoint(directory)
            except DamagedCheckpoint as error:
                # A checkpoint in a store is read from a copy here, which has another name.
                raise type(error)(str(error).replace(str(directory), checkpoint.path)) from error
        return self.trial.rounds_trained

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Goes on from a checkpoint; raises as `Trial.load` does."""
        self.trial.load(checkpoint)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Starts over with another config; False where it reserves other resources."""
        from grpo_trainable.trial import resolved

        self._looked_for_checkpoint = False
        return self.trial.reset(resolved(new_config), self._storage)

    def cleanup(self) -> None:
        """Ends every actor."""
        self.trial.end()


class DetailedGRPO(GRPOTrainable):
    """A GRPOTrainable whose rows also carry what the callbacks write down, under `DETAILS`.

    Run it with `callbacks.grpo_callbacks`, or each row is logged with the details in it, and an
    object store keeps every checkpoint that is newer than the rows there.
    """

    followed = True

    def _extra(self, report: RoundReport) -> dict[str, Any]:
        return {DETAILS: self.trial.details(report)}


def register(
    inputs: Mapping[str, str] | None = None, files: Mapping[str, bytes] | None = None
) -> None:
    """Makes the Trainable known to Tune as "GRPO", with details for the callbacks.

    `inputs`: what `inputs.digests_of_all` says of the trials. A trial that would then read a file
    with another content fails and names it; without them each trial reads what it finds.
    `files`: what `shipping.contents` gives, for machines that lack files of the user's.
    """
    trainable: type = DetailedGRPO
    if inputs is not None:
        trainable = tune.with_parameters(DetailedGRPO, inputs=inputs, files=dict(files or {}))
        trainable.__qualname__ = DetailedGRPO.__qualname__  # which Ray names the process by
    register_trainable(NAME, trainable)
