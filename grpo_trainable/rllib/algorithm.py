"""GRPO as an RLlib `Algorithm`: a wrapper around `Trial`, like `GRPOTrainable` for Tune."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from pyarrow.fs import FileSystem, LocalFileSystem, copy_files
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.callbacks.utils import make_callback
from ray.rllib.core import COMPONENT_METRICS_LOGGER, DEFAULT_MODULE_ID
from ray.rllib.utils import force_list
from ray.rllib.utils.checkpoints import Checkpointable
from ray.rllib.utils.from_config import NotProvided
from ray.rllib.utils.metrics import (
    ENV_RUNNER_RESULTS,
    EPISODE_RETURN_MEAN,
    NUM_EPISODES,
)
from ray.tune import Checkpoint, PlacementGroupFactory
from ray.tune.registry import register_trainable
from ray.tune.result import RESULT_DUPLICATE

from grpo_trainable.cluster.tune_trials import INVALID, InvalidTrial, requested
from grpo_trainable.config import ConfigError, GRPOConfig, make_absolute, schedule, shown
from grpo_trainable.pipeline import RoundReport
from grpo_trainable.rllib.module import LanguageModel, trained_language_model
from grpo_trainable.rllib.settings import refuse_unread, trial_data
from grpo_trainable.storage.checkpointing import CheckpointError
from grpo_trainable.storage.object_store import StoredPath
from grpo_trainable.storage.ray_private import TRAINING_ITERATION
from grpo_trainable.storage.trial_storage import verify_copy
from grpo_trainable.telemetry.metrics import is_named_by_user
from grpo_trainable.trial import Trial, resolved

NAME = "GRPO-RLlib"
TRIAL = "grpo"  # name of our part in RLlib's checkpoint

# RLlib's name -> our name for the same metric, in addition to `metrics.RLLIB_NAMES`.
RLLIB_NAMES = {
    "env_runners/episode_len_mean": "response/length_mean",
    "env_runners/num_env_steps_sampled_lifetime": "num_env_steps_sampled_lifetime",
    "learners/default_policy/entropy": "policy/entropy_nats",
    "timers/env_runner_sampling_timer": "time/rollout_s",
    "timers/learner_update_timer": "time/optimize_s",
    "timers/synch_weights": "time/sync_s",
}


class GRPOAlgorithmConfig(AlgorithmConfig):
    """RLlib's config for GRPO.

    Use `training(grpo={…})` for settings that have no name in RLlib. With 0 env runners, one
    process samples and trains. With 1 or more env runners, each env runner is a generator, separate
    from the learner.
    """

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class=algo_class or GRPO)
        self._is_online = False  # keeps RLlib from looking for the state of its EnvRunners
        self.grpo: dict[str, Any] = {}  # nested as in `GRPOConfig.from_dict`
        # None means the trial's default, which may depend on its task.
        self.lr = self.grad_clip = self.seed = None

    def training(self, *, grpo: Any = NotProvided, **settings: Any) -> Any:
        """Set training options.

        Args:
            grpo: Nested settings of a trial (docs/config.md), merged with the settings from earlier
                calls. Relative paths in `grpo` are relative to the current directory.
            settings: RLlib's settings. GRPO reads only `lr` and `grad_clip`.

        Raises:
            ConfigError: `grpo` is not a mapping.
        """
        super().training(**settings)
        if grpo is not NotProvided:
            if not isinstance(grpo, Mapping):
                raise ConfigError(f"grpo={shown(grpo)}: must be a mapping")
            self.grpo = _merged(self.grpo, make_absolute(grpo, os.getcwd()))
        return self

    def validate(self) -> None:
        """Check all settings.

        Raises:
            ConfigError: A setting is unknown or invalid, or has no effect with GRPO. The message is
                one line.
        """
        # RLlib's own checks are not needed, because they concern only settings for which
        # `refuse_unread` accepts nothing but the default.
        refuse_unread(self, type(self)())
        trial_data(self)


class GRPO(Algorithm):
    """GRPO behind RLlib's interface: `build_algo`, `train`, `evaluate`, `save_to_path` and so on.

    One call of `train()` runs one round. A result contains all metrics listed in docs/metrics.md,
    and repeats some of them under RLlib's names.
    """

    trial: Trial | None = None
    _report: RoundReport | None = None
    _invalid: Exception | None = None  # the error that the first step will raise

    def __init__(self, config: Any = None, env: Any = None, **options: Any) -> None:
        """Start the trial.

        Args:
            config: The settings.
            env: Must be None.
            options: Arguments of Tune's `Trainable`. Tune passes `storage`.

        Raises:
            ConfigError: The config is invalid. Under Tune, the first step raises this error. An
                error in the constructor would look like the death of the trial's process.
            PluginError: The user's task cannot be loaded. Under Tune, the first step raises this
                error.
        """
        try:
            super().__init__(config, env, **options)
        except INVALID as error:
            if options.get("storage") is None:
                raise
            self._invalid = error
            super().__init__(self.get_default_config(), **options)

    def __repr__(self) -> str:
        # Algorithm.__repr__ needs `self.config`. After an error in `__init__`, Algorithm.__repr__
        # would fail too, and Ray could not report the first error.
        return "GRPO()"

    @classmethod
    def get_default_config(cls) -> GRPOAlgorithmConfig:
        """Return a config with the default settings."""
        return GRPOAlgorithmConfig()

    @classmethod
    def default_resource_request(cls, config: Any) -> PlacementGroupFactory:
        """Request one bundle for the algorithm's process, and one for each actor.

        If the config is invalid, request only the bundle for the algorithm's process. The trial
        then fails at its first step.
        """

        def settings() -> GRPOConfig:
            given = cls.get_default_config().update_from_dict(config)
            return GRPOConfig.from_dict(trial_data(given, must_fetch=False))

        return requested(settings)

    def setup(self, config: AlgorithmConfig) -> None:
        """Start the trial, and call the callbacks' `on_algorithm_init`."""
        if self._invalid is not None:
            self.trial = cast("Trial", InvalidTrial(self._invalid))
            return
        # Algorithm.setup would build an environment, EnvRunners, a Learner and an RLModule.
        self.callbacks = [callback() for callback in force_list(config.callbacks_class)]
        self.trial = Trial(resolved(trial_data(config)))
        self._set_up_metrics()
        self._call_back("on_algorithm_init")

    def _call_back(self, hook: str, **values: Any) -> None:
        make_callback(
            hook,
            self.callbacks,
            getattr(self.config, f"callbacks_{hook}"),
            kwargs={"algorithm": self, "metrics_logger": self.metrics, **values},
        )

    # ---- Rounds ------------------------------------------------------------------------------

    def training_step(self) -> None:
        """Run one round."""
        assert self.trial is not None
        self._report = self.trial.run_round()

    def step(self) -> dict[str, Any]:
        """Run one round with RLlib's bookkeeping, and return the round's result.

        Raises:
            RuntimeError: An earlier call returned the result of the last round.
        """
        assert self.trial is not None
        if self.trial.pipeline.ended:
            if self._iterations_since_restore:
                raise RuntimeError(
                    f"the trial ended after round {self.iteration}; restore an earlier "
                    "checkpoint, or build an algorithm with more rounds"
                )
            # The checkpoint of the last round was restored. The result of the last round has
            # already been reported, and Tune ignores the result below.
            return {RESULT_DUPLICATE: True, "done": True, TRAINING_ITERATION: self.iteration}
        results = super().step()
        assert self._report is not None
        return _merged(results, _results(self._report))

    def evaluate(self, parallel_train_future: Any = None) -> dict[str, Any]:
        """Return the mean reward on the held-out prompts under the current weights.

        If the last round ended with an evaluation, return its result without sampling again.
        """
        assert self.trial is not None
        self._call_back("on_evaluate_start")
        held_out, config = self.trial.evaluate(), self.trial.config
        prompts = schedule.held_out_prompts(config, final=self.trial.pipeline.ended)
        episodes = (prompts - held_out.unscored) * config.eval.samples
        results = {ENV_RUNNER_RESULTS: {EPISODE_RETURN_MEAN: held_out.mean, NUM_EPISODES: episodes}}
        self._call_back("on_evaluate_end", evaluation_metrics=results)
        return results

    # ---- Weights -----------------------------------------------------------------------------

    def get_module(self, module_id: str = DEFAULT_MODULE_ID) -> LanguageModel | None:
        """Return a copy of the policy with its current weights, in this process."""
        if module_id != DEFAULT_MODULE_ID:
            return None
        assert self.trial is not None
        return trained_language_model(self.trial.config, self.trial.learner_state().policy)

    def get_weights(self, policies: list[str] | None = None) -> dict[str, Any]:
        """Return the trained weights (of the policy or its adapters): module id → name → array."""
        if policies is not None and DEFAULT_MODULE_ID not in policies:
            return {}
        assert self.trial is not None
        trained = self.trial.learner_state().policy
        return {DEFAULT_MODULE_ID: {name: tensor.numpy() for name, tensor in trained.items()}}

    def set_weights(self, weights: dict[str, Any]) -> None:
        """Refuse to set weights.

        Raises:
            NotImplementedError: Always. The message says what to use instead.
        """
        raise NotImplementedError(
            "GRPO does not set weights; use training(grpo={'model': {'path': …}}) to start from a "
            "policy, or restore_from_path() to continue from a checkpoint"
        )

    # ---- Checkpoints: RLlib's files, and ours in a directory beside them ---------------------

    def save_to_path(self, path: Any = None, **options: Any) -> str:
        """Write a checkpoint, and return its path."""
        assert self.trial is not None
        with self.trial.checkpointing():
            return super().save_to_path(path, **options)

    def restore_from_path(self, path: Any, *args: Any, **options: Any) -> None:
        """Continue from a checkpoint."""
        # Algorithm.restore_from_path would send weights to its EnvRunners.
        super(Algorithm, self).restore_from_path(path, *args, **options)
        self._iterations_since_restore = 0

    def get_checkpointable_components(self) -> list[tuple[str, Checkpointable]]:
        """Return the trial as the only component."""
        assert self.trial is not None
        return [(TRIAL, SavedTrial(self.trial))]

    def get_state(
        self, components: Any = None, *, not_components: Any = None, **options: Any
    ) -> dict[str, Any]:
        """Return RLlib's counters. Only `save_to_path` saves the state of the trial, in files."""
        state: dict[str, Any] = {
            COMPONENT_METRICS_LOGGER: self.metrics.get_state(),
            TRAINING_ITERATION: self.training_iteration,
        }
        if self._check_component(TRIAL, components, not_components):
            state[TRIAL] = {}
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore RLlib's counters.

        Raises:
            CheckpointError: The trial's round differs from RLlib's iteration.
        """
        assert self.trial is not None
        super().set_state(state)
        if self.training_iteration != self.trial.rounds_trained:
            raise CheckpointError(
                f"RLlib's part of the checkpoint is from iteration {self.training_iteration}, but "
                f"the checkpoint's folder {TRIAL}/ is missing or from round "
                f"{self.trial.rounds_trained}; use another checkpoint"
            )

    def cleanup(self) -> None:
        """End the trial."""
        if self.trial is not None:
            self.trial.end()
        super().cleanup()


class SavedTrial(Checkpointable):
    """A trial as a part of RLlib's checkpoint, in the same files that `GRPOTrainable` writes."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial

    def save_to_path(
        self,
        path: Any = None,
        *,
        state: Any = None,
        filesystem: FileSystem | None = None,
        use_msgpack: bool = False,
    ) -> str:
        """Write safetensors and JSON, regardless of the format of RLlib's other files."""
        if filesystem is None or isinstance(filesystem, LocalFileSystem):
            self._trial.save(str(path))
        else:
            with tempfile.TemporaryDirectory() as directory:
                self._trial.save(directory)
                filesystem.create_dir(str(path), recursive=True)
                copy_files(directory, str(path), destination_filesystem=filesystem)
                verify_copy(Path(directory), StoredPath(filesystem, str(path)))
        return str(path)

    def restore_from_path(
        self, path: Any, *, component: Any = None, filesystem: FileSystem | None = None, **_: Any
    ) -> None:
        """Load the trial. This method raises the same errors as `Trial.load`."""
        with Checkpoint(Path(path).as_posix(), filesystem).as_directory() as directory:
            self._trial.load(directory)

    def get_state(self, components: Any = None, **options: Any) -> dict[str, Any]:
        """Return an empty dictionary, because the state is in files."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Do nothing, because the state is in files."""

    def get_ctor_args_and_kwargs(self) -> tuple[tuple, dict[str, Any]]:
        """Return the arguments of the constructor."""
        return (self._trial,), {}


def _results(report: RoundReport) -> dict[str, Any]:
    """Return a round's metrics, nested like RLlib's own. Each slash in a name starts a level."""
    row = report.metrics
    named = {theirs: row[ours] for theirs, ours in RLLIB_NAMES.items() if ours in row}
    nested: dict[str, Any] = {"done": report.last}
    for name, value in {**row, **named}.items():
        # Split the name of an info metric only at its first slash. Any later slash is a part of the
        # name that the environment gave.
        *areas, leaf = name.split("/", 1 if is_named_by_user(name) else -1)
        inner = nested
        for area in areas:
            inner = inner.setdefault(area, {})
        inner[leaf] = value
    return nested


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested mappings. Values of `second` take precedence."""
    both = {**first, **second}
    for key in first.keys() & second.keys():
        if isinstance(first[key], Mapping) and isinstance(second[key], Mapping):
            both[key] = _merged(first[key], second[key])
    return both


def register() -> None:
    """Register GRPO with Tune as "GRPO-RLlib"."""
    register_trainable(NAME, GRPO)
