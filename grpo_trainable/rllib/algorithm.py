"""GRPO as an RLlib `Algorithm`: a shell around `Trial`, as Tune's `GRPOTrainable` is."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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

from grpo_trainable.config import ConfigError, GRPOConfig, make_absolute, resources, shown
from grpo_trainable.pipeline import RoundReport
from grpo_trainable.rllib.module import LanguageModel, trained_language_model
from grpo_trainable.rllib.settings import refuse_unread, trial_data
from grpo_trainable.storage.checkpointing import CheckpointError
from grpo_trainable.storage.ray_private import TRAINING_ITERATION
from grpo_trainable.trial import Trial, resolved

NAME = "GRPO-RLlib"
TRIAL = "grpo"  # the part of RLlib's checkpoint that is ours

# RLlib's names of figures that a row has under ours, besides those of `metrics.RLLIB_NAMES`.
RLLIB_NAMES = {
    "env_runners/episode_len_mean": "response/length_mean",
    "env_runners/num_env_steps_sampled_lifetime": "num_env_steps_sampled_lifetime",
    "learners/default_policy/entropy": "policy/entropy_nats",
    "timers/env_runner_sampling_timer": "time/rollout_s",
    "timers/learner_update_timer": "time/optimize_s",
    "timers/synch_weights": "time/sync_s",
}


class GRPOAlgorithmConfig(AlgorithmConfig):
    """RLlib's config for GRPO. What RLlib has no name for is given by `training(grpo={…})`.

    0 env runners sample and train in one process; 1 or more are generators beside a learner.
    """

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class=algo_class or GRPO)
        self._is_online = False  # no EnvRunners of RLlib's, so nothing looks for their state
        self.grpo: dict[str, Any] = {}  # nested as in `GRPOConfig.from_dict`
        # None: the default of the trial, which its task may have a say in.
        self.lr = self.grad_clip = self.seed = None

    def training(self, *, grpo: Any = NotProvided, **settings: Any) -> Any:
        """RLlib's `lr` and `grad_clip`; and `grpo`, nested settings of a trial (docs/config.md),
        which are added to those of earlier calls. Relative paths in it mean the present directory.
        """
        super().training(**settings)
        if grpo is not NotProvided:
            if not isinstance(grpo, Mapping):
                raise ConfigError(f"grpo={shown(grpo)}: must be a mapping")
            self.grpo = _merged(self.grpo, make_absolute(grpo, os.getcwd()))
        return self

    def validate(self) -> None:
        """
        Raises:
            ConfigError: a setting is unknown, invalid, or not read by GRPO; in one line.
        """
        # RLlib's own checks are of settings that have their defaults once this has passed.
        refuse_unread(self, type(self)())
        trial_data(self)


class GRPO(Algorithm):
    """GRPO behind RLlib's interface: `build_algo`, `train`, `evaluate`, `save_to_path` and so on.

    One `train()` is one round. Results have RLlib's names and, beside them, those of
    docs/metrics.md.
    """

    trial: Trial | None = None
    _report: RoundReport | None = None

    def __repr__(self) -> str:
        # Algorithm's own needs `self.config`: after an error in `__init__` it would fail too, and
        # Ray could not tell the first one.
        return "GRPO()"

    @classmethod
    def get_default_config(cls) -> GRPOAlgorithmConfig:
        return GRPOAlgorithmConfig()

    @classmethod
    def default_resource_request(cls, config: Any) -> PlacementGroupFactory:
        """A bundle for the algorithm's own process and one for each actor."""
        given = cls.get_default_config().update_from_dict(config)
        trial = GRPOConfig.from_dict(trial_data(given))
        return PlacementGroupFactory(
            resources.bundles(trial), strategy=resources.placement_strategy(trial)
        )

    def setup(self, config: AlgorithmConfig) -> None:
        # Algorithm's own builds an environment, EnvRunners, a Learner and an RLModule.
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
        assert self.trial is not None
        self._report = self.trial.run_round()

    def step(self) -> dict[str, Any]:
        assert self.trial is not None
        if self.trial.pipeline.ended:
            # Tune restored the last checkpoint without knowing that it is; the last row stands.
            return {RESULT_DUPLICATE: True, "done": True}
        results = super().step()
        assert self._report is not None
        return _merged(results, _results(self._report))

    def evaluate(self, parallel_train_future: Any = None) -> dict[str, Any]:
        """The mean reward on the held-out prompts under the present weights. What a round has
        measured at its end, because it was due, is not measured again."""
        assert self.trial is not None
        self._call_back("on_evaluate_start")
        held_out, settings = self.trial.evaluate(), self.trial.config.eval
        episodes = (settings.prompts - held_out.unscored) * settings.samples
        results = {ENV_RUNNER_RESULTS: {EPISODE_RETURN_MEAN: held_out.mean, NUM_EPISODES: episodes}}
        self._call_back("on_evaluate_end", evaluation_metrics=results)
        return results

    # ---- Weights -----------------------------------------------------------------------------

    def get_module(self, module_id: str = DEFAULT_MODULE_ID) -> LanguageModel | None:
        """The policy with its present weights, in this process; a copy."""
        if module_id != DEFAULT_MODULE_ID:
            return None
        assert self.trial is not None
        return trained_language_model(self.trial.config, self.trial.learner_state().policy)

    def get_weights(self, policies: list[str] | None = None) -> dict[str, Any]:
        """Module id → name → array, of what is trained: all of the policy, or its adapters."""
        if policies is not None and DEFAULT_MODULE_ID not in policies:
            return {}
        assert self.trial is not None
        trained = self.trial.learner_state().policy
        return {DEFAULT_MODULE_ID: {name: tensor.numpy() for name, tensor in trained.items()}}

    def set_weights(self, weights: dict[str, Any]) -> None:
        raise NotImplementedError(
            "GRPO starts from a policy by training(grpo={'model': {'path': …}}), and goes on from "
            "a checkpoint by restore_from_path()"
        )

    # ---- Checkpoints: RLlib's files, and ours in a directory beside them ---------------------

    def save_to_path(self, path: Any = None, **options: Any) -> str:
        assert self.trial is not None
        with self.trial.checkpointing():
            return super().save_to_path(path, **options)

    def restore_from_path(self, path: Any, *args: Any, **options: Any) -> None:
        # Algorithm's own sends weights to its EnvRunners.
        super(Algorithm, self).restore_from_path(path, *args, **options)

    def get_checkpointable_components(self) -> list[tuple[str, Checkpointable]]:
        assert self.trial is not None
        return [(TRIAL, SavedTrial(self.trial))]

    def get_state(
        self, components: Any = None, *, not_components: Any = None, **options: Any
    ) -> dict[str, Any]:
        """What RLlib counts. The state of the trial is files, which only `save_to_path` writes."""
        state: dict[str, Any] = {
            COMPONENT_METRICS_LOGGER: self.metrics.get_state(),
            TRAINING_ITERATION: self.training_iteration,
        }
        if self._check_component(TRIAL, components, not_components):
            state[TRIAL] = {}
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        """
        Raises:
            CheckpointError: the trial is at another round than RLlib counted.
        """
        assert self.trial is not None
        super().set_state(state)
        if self.training_iteration != self.trial.rounds_trained:
            raise CheckpointError(
                f"RLlib's part of the checkpoint is of iteration {self.training_iteration}, but "
                f"{TRIAL}/ in it is missing or of round {self.trial.rounds_trained}"
            )

    def cleanup(self) -> None:
        if self.trial is not None:
            self.trial.end()
        super().cleanup()


class SavedTrial(Checkpointable):
    """A trial as a part of RLlib's checkpoint: the directory that `GRPOTrainable` would write."""

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
        """Writes safetensors and JSON, whatever RLlib writes the rest as."""
        if filesystem is None or isinstance(filesystem, LocalFileSystem):
            self._trial.save(str(path))
        else:
            with tempfile.TemporaryDirectory() as directory:
                self._trial.save(directory)
                filesystem.create_dir(str(path), recursive=True)
                copy_files(directory, str(path), destination_filesystem=filesystem)
        return str(path)

    def restore_from_path(
        self, path: Any, *, component: Any = None, filesystem: FileSystem | None = None, **_: Any
    ) -> None:
        """Raises as `Trial.load` does."""
        with Checkpoint(Path(path).as_posix(), filesystem).as_directory() as directory:
            self._trial.load(directory)

    def get_state(self, components: Any = None, **options: Any) -> dict[str, Any]:
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        pass

    def get_ctor_args_and_kwargs(self) -> tuple[tuple, dict[str, Any]]:
        return (self._trial,), {}


def _results(report: RoundReport) -> dict[str, Any]:
    """A round's metrics, nested at their slashes as RLlib's are."""
    row = report.metrics
    named = {theirs: row[ours] for theirs, ours in RLLIB_NAMES.items() if ours in row}
    nested: dict[str, Any] = {"done": report.last}
    for name, value in {**row, **named}.items():
        *areas, leaf = name.split("/")
        inner = nested
        for area in areas:
            inner = inner.setdefault(area, {})
        inner[leaf] = value
    return nested


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Nested data of both; where both have a value, that of `second`."""
    both = {**first, **second}
    for key in first.keys() & second.keys():
        if isinstance(first[key], Mapping) and isinstance(second[key], Mapping):
            both[key] = _merged(first[key], second[key])
    return both


def register() -> None:
    """Makes GRPO known to Tune as "GRPO-RLlib"."""
    register_trainable(NAME, GRPO)
