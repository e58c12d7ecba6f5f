"""Tune's schedulers, told how often a trial is tried again and how many run at a time.

Tune hands both to each trial, or to its search, when the experiment starts, and a restored trial
comes with what it was given then. A scheduler is new in every command.

Apart from `launch.tune`, because Ray is imported here: the launcher answers bad usage without it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ray.tune import schedulers
from ray.tune.experiment import Trial
from ray.tune.schedulers import TrialScheduler


class Limited(TrialScheduler):
    """Mixed in before a scheduler of Tune's."""

    max_failures = 0  # retries of a trial from now on, whatever happened before
    max_concurrent = 0  # trials at a time; 0: as many as fit

    def limit(self, max_failures: int, max_concurrent: int) -> None:
        self.max_failures, self.max_concurrent = max_failures, max_concurrent
        self._seen: set[str] = set()

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        super().on_trial_add(tune_controller, trial)
        if trial.trial_id in self._seen:
            return  # it comes again with every retry
        self._seen.add(trial.trial_id)
        trial.max_failures = trial.num_failures + self.max_failures
        if self.max_concurrent and trial.status == Trial.PENDING:
            # Tune starts what is pending by itself, and what is paused when we choose it.
            trial.set_status(Trial.PAUSED)

    def choose_trial_to_run(self, tune_controller: Any) -> Any:
        if not self.max_concurrent:
            return super().choose_trial_to_run(tune_controller)
        trials = tune_controller.get_trials()
        active = [trial for trial in trials if trial.status in (Trial.PENDING, Trial.RUNNING)]
        if len(active) >= self.max_concurrent:
            return None
        # Those that are pending start already.
        others: Any = SimpleNamespace(get_trials=lambda: [t for t in trials if t not in active])
        return super().choose_trial_to_run(others)


class FIFO(Limited, schedulers.FIFOScheduler):
    """All trials to their end."""


class ASHA(Limited, schedulers.ASHAScheduler):
    """Stops trials that learn less than the others."""


class PBT(Limited, schedulers.PopulationBasedTraining):
    """Lets the worse trials go on from the better ones' checkpoints."""

    def _exploit(self, tune_controller: Any, trial: Any, trial_to_clone: Any) -> None:
        # A trial that is still saving what it is about to give up: Tune pauses it, but takes
        # that for a stop and ends it at its next save.
        trial.temporary_state.saving_to = None
        super()._exploit(tune_controller, trial, trial_to_clone)
