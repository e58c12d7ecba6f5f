"""FIFO, ASHA and PBT for GRPO trials: Tune's schedulers with limits that hold on a resume as well.

Tune gives the number of retries to each trial, and that of concurrent trials to the search, when
the experiment starts; what is restored keeps them. A scheduler is new in every command, so here it
sets both, once `limit` was called, and nothing else does.

In a `tune.Tuner` of your own they take the arguments of Tune's classes:

    PBT(time_attr="training_iteration", hyperparam_mutations={"optim": {"lr": ...}}, synch=True)
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from ray.tune import schedulers
from ray.tune.experiment import Trial
from ray.tune.schedulers import TrialScheduler

from grpo_trainable.config import GRPOConfig, flatten, set_dotted


class Limited(TrialScheduler):
    """A mixin that stands before a scheduler of Tune's. Without `limit` it changes no limit."""

    max_failures: int | None = None  # retries of a trial from now on, earlier ones not counted
    max_concurrent = 0  # trials at a time; 0: as many as fit

    def limit(self, max_failures: int, max_concurrent: int) -> None:
        """Sets how often a trial is tried again, and how many run at a time (0: as many as fit)."""
        self.max_failures, self.max_concurrent = max_failures, max_concurrent
        self._seen: set[str] = set()

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        super().on_trial_add(tune_controller, trial)
        if self.max_failures is None or trial.trial_id in self._seen:
            return  # Tune adds a trial again with every retry
        self._seen.add(trial.trial_id)
        # What was to happen after a save that failed, or was cut short, in an earlier command: Tune
        # keeps it, and would end the trial after the next checkpoint. The wrapper that we are given
        # warns of this attribute.
        tune_controller._tune_controller._cached_trial_decisions.pop(trial.trial_id, None)
        trial.max_failures = trial.num_failures + self.max_failures
        if self.max_concurrent and trial.status == Trial.PENDING:
            # Tune starts pending trials by itself, and paused ones when they are chosen below.
            trial.set_status(Trial.PAUSED)
            # Tune may end before that, and asks for the trial's directory, which has no name yet.
            trial.init_local_path()

    def choose_trial_to_run(self, tune_controller: Any) -> Any:
        if not self.max_concurrent:
            return super().choose_trial_to_run(tune_controller)
        trials = tune_controller.get_trials()
        active = [trial for trial in trials if trial.status in (Trial.PENDING, Trial.RUNNING)]
        if len(active) >= self.max_concurrent:
            return None
        # Pending trials are started without being chosen.
        others: Any = SimpleNamespace(get_trials=lambda: [t for t in trials if t not in active])
        return super().choose_trial_to_run(others)


class FIFO(Limited, schedulers.FIFOScheduler):
    """Runs all trials to their end."""


class ASHA(Limited, schedulers.ASHAScheduler):
    """Stops trials that learn less than the others."""


class PBT(Limited, schedulers.PopulationBasedTraining):
    """Lets the worse trials go on from the better ones' checkpoints."""

    def _exploit(self, tune_controller: Any, trial: Any, trial_to_clone: Any) -> None:
        # Tune would take the pause of a trial that is still saving for a stop, and would end the
        # trial at its next save.
        trial.temporary_state.saving_to = None
        super()._exploit(tune_controller, trial, trial_to_clone)


# ---- What population-based training varies -------------------------------------------------------


# Dotted key -> its least and greatest value; those of the clip range are multiples of its default.
MUTATIONS = {"optim.lr": (1e-5, 1e-3), "loss.clip": (0.25, 2.0)}

Bounds = Mapping[str, tuple[float, float]]


def pbt_bounds(trial: GRPOConfig) -> dict[str, tuple[float, float]]:
    """Dotted key -> least and greatest value, of the keys that such a trial reads."""
    bounds = {key: limits for key, limits in MUTATIONS.items() if trial.reads(key)}
    if "loss.clip" in bounds:
        low, high = bounds["loss.clip"]
        bounds["loss.clip"] = (low * trial.clip_low, high * trial.clip_low)
    return bounds


def within_bounds(bounds: Bounds, config: dict[str, Any]) -> dict[str, Any]:
    """The config that PBT explores next, each key moved into its bounds: Tune's factors of 0.8 and
    1.2 multiply from clone to clone, beyond what is valid."""
    for key, (low, high) in bounds.items():
        set_dotted(config, key, min(max(flatten(config)[key], low), high))
    return config
