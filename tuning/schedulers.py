"""FIFO, ASHA and PBT for GRPO trials: Tune's schedulers with limits that a resume can change.

When an experiment starts, Tune stores two limits: each trial stores its number of retries, and the
search stores the number of concurrent trials. A resume restores both limits, so a later command
could not change them. But every command creates a new scheduler. So these schedulers set both
limits once `limit` has been called, and nothing else sets them.

If you build a `tune.Tuner` yourself, create these schedulers with the arguments of Tune's classes:

    PBT(time_attr="training_iteration", hyperparam_mutations={"optim": {"lr": ...}}, synch=True)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from ray.tune import schedulers
from ray.tune.experiment import Trial
from ray.tune.schedulers import TrialScheduler

from grpo_trainable.command_line import UsageError
from grpo_trainable.config import GRPOConfig, flatten, schedule, set_dotted
from grpo_trainable.models.hf.json_files import facts_of


class Limited(TrialScheduler):
    """Mixin that a class lists before Tune's scheduler. Inactive until `limit` is called."""

    max_failures: int | None = None  # retries of a trial from now on, not counting earlier retries
    max_concurrent = 0  # number of trials that run at the same time; 0 means as many as fit

    def limit(self, max_failures: int, max_concurrent: int) -> None:
        """Set the retries of each trial and the number of concurrent trials (0: as many as fit)."""
        self.max_failures, self.max_concurrent = max_failures, max_concurrent
        self._trials: dict[str, Any] = {}  # every trial that Tune has added, by its id

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        """Set the limits of a trial when Tune first adds it."""
        super().on_trial_add(tune_controller, trial)
        if self.max_failures is None or trial.trial_id in self._trials:
            return  # Tune adds a trial again with every retry
        self._trials[trial.trial_id] = trial
        # If a save failed or was cut short in an earlier command, Tune still keeps the decision
        # that was to follow that save. Tune would then end the trial after the next checkpoint.
        # We take the controller out of its wrapper, because the wrapper warns about this attribute.
        tune_controller._tune_controller._cached_trial_decisions.pop(trial.trial_id, None)
        trial.max_failures = trial.num_failures + self.max_failures
        if self.max_concurrent and trial.status == Trial.PENDING:
            # Tune starts pending trials without asking this scheduler, but it starts paused trials
            # only if `choose_trial_to_run` returns them.
            trial.set_status(Trial.PAUSED)
            # Name the trial's directory now, because Tune needs the name if Tune ends before the
            # trial starts.
            trial.init_local_path()

    def is_any_waiting(self) -> bool:
        """Return True if a trial waits for its turn."""
        waiting = (Trial.PENDING, Trial.PAUSED)
        return any(trial.status in waiting for trial in self._trials.values())

    def choose_trial_to_run(self, tune_controller: Any) -> Any:
        """Return the next trial, or None if `max_concurrent` trials are already running."""
        if not self.max_concurrent:
            return super().choose_trial_to_run(tune_controller)
        trials = tune_controller.get_trials()
        active = [trial for trial in trials if trial.status in (Trial.PENDING, Trial.RUNNING)]
        if len(active) >= self.max_concurrent:
            return None
        # Tune starts pending trials without calling this method.
        others: Any = SimpleNamespace(get_trials=lambda: [t for t in trials if t not in active])
        return super().choose_trial_to_run(others)


class FIFO(Limited, schedulers.FIFOScheduler):
    """Scheduler that runs all trials to their end."""


# Time attribute of `ASHA`: number of groups that a trial's rounds so far were meant to train on.
GROUPS = "groups"


class ASHA(Limited, schedulers.ASHAScheduler):
    """Scheduler that stops trials that do worse than other trials at the same point in training.

    Rows between two evaluations repeat the held-out reward of the latest evaluation. So if the
    metric is measured in evaluations, a trial is judged only by rows with a new evaluation.
    """

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """Return the decision to continue or to stop a trial."""
        of_evaluation = str(self._metric).startswith(("reward/eval_", "eval/"))
        evaluated = result.get("eval/round", result["training_iteration"])
        if of_evaluation and evaluated != result["training_iteration"]:
            return self.CONTINUE
        return super().on_trial_result(tune_controller, trial, self._with_time(trial, result))

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        """Record the result of a trial that has ended."""
        super().on_trial_complete(tune_controller, trial, self._with_time(trial, result))

    def _with_time(self, trial: Any, result: dict[str, Any]) -> dict[str, Any]:
        """Add the number of groups to a row. If a trial ends without a row, add nothing."""
        if self._time_attr != GROUPS or "training_iteration" not in result:
            return result
        size = schedule.prompts_per_round(GRPOConfig.from_dict(trial.config))
        return {**result, GROUPS: size * result["training_iteration"]}


class PBT(Limited, schedulers.PopulationBasedTraining):
    """Scheduler in which worse trials continue from the checkpoints of better trials.

    In synchronous mode, Tune compares the trials when all have reached `_next_perturbation_sync`.
    Until then, Tune pauses each trial that has reached this point. A restored experiment has a new
    scheduler, and the trials may be far past the round of its first comparison. Tune's class would
    then compare trials at different rounds, choose a next comparison that all trials have already
    reached, and never continue any of them.
    """

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """Return the decision to continue a trial or to pause it."""
        if self._synch and self._time_attr in result:
            if result.get("iterations_since_restore") == 1:  # the experiment may be a restored one
                while self._next_perturbation_sync < result[self._time_attr]:
                    self._next_perturbation_sync += self._perturbation_interval
            # Tune pauses a trial that is `_perturbation_interval` past this time.
            state: Any = self._trial_state[trial]
            state.last_perturbation_time = (
                self._next_perturbation_sync - self._perturbation_interval
            )
        return super().on_trial_result(tune_controller, trial, result)

    def choose_trial_to_run(self, tune_controller: Any) -> Any:
        """Return the next trial, or None if no trial can run now."""
        live = [trial for trial in tune_controller.get_live_trials() if not trial.is_finished()]
        reached = [self._trial_state[trial].last_train_time for trial in live]
        if self._synch and reached and min(reached) >= self._next_perturbation_sync:
            # The others waited only for a trial that has ended, so Tune will not compare them.
            while self._next_perturbation_sync <= max(reached):
                self._next_perturbation_sync += self._perturbation_interval
        return super().choose_trial_to_run(tune_controller)

    def _exploit(self, tune_controller: Any, trial: Any, trial_to_clone: Any) -> None:
        # Otherwise, if a trial is paused during a save, Tune would mistake the pause for a stop,
        # and would end the trial at its next save.
        trial.temporary_state.saving_to = None
        super()._exploit(tune_controller, trial, trial_to_clone)
        # Tune's class changes the trial's checkpoint without dropping the cached state. A snapshot
        # would combine the settings of the copy with the checkpoint from before the copy.
        trial.run_metadata.invalidate_cache()


# ---- Keys that population-based training varies --------------------------------------------------


# Dotted key -> minimum and maximum. For the clip range, these are factors of the trial's own value.
MUTATIONS = {"optim.lr": (1e-5, 1e-3), "loss.clip": (0.25, 2.0)}
HUGGING_FACE_LR = (0.2, 2.0)  # factors of a Hugging Face model's initial learning rate

Bounds = Mapping[str, tuple[float, float]]


def pbt_bounds(trial: GRPOConfig) -> dict[str, tuple[float, float]]:
    """Return the minimum and the maximum of each varied key that the trial reads."""
    bounds = {key: limits for key, limits in MUTATIONS.items() if trial.reads(key)}
    if "loss.clip" in bounds:
        low, high = bounds["loss.clip"]
        bounds["loss.clip"] = (low * trial.clip_low, high * trial.clip_low)
    if trial.model.path is not None and facts_of(trial.model.path) is not None:
        low, high = HUGGING_FACE_LR
        bounds["optim.lr"] = (low * trial.optim.lr, high * trial.optim.lr)
    return bounds


def within_bounds(bounds: Bounds, config: dict[str, Any]) -> dict[str, Any]:
    """Clip the varied settings to their bounds, in a config that PBT explores.

    Tune multiplies a value by 0.8 or 1.2 with each clone, so without bounds the value can become
    invalid.

    Raises:
        ValueError: If a key is not a setting of the trial, or if its bounds are in the wrong order.
    """
    settings = flatten(config)
    for key, (low, high) in bounds.items():
        if key not in settings:
            raise ValueError(f"within_bounds: {key} is not in the trial's config")
        if low > high:
            raise ValueError(f"within_bounds: {key}: the minimum {low} is above the maximum {high}")
        set_dotted(config, key, min(max(settings[key], low), high))
    return config


# ---- When trials are compared --------------------------------------------------------------------


def first_rung(trials: Sequence[GRPOConfig]) -> int | None:
    """Return the number of groups after which ASHA first compares the trials.

    At this point, all trials are evaluated, and the shortest trial has trained on at least a
    quarter of its groups. Return None if there is no such point before the end of the shortest
    trial. ASHA compares the trials again after 4, 16, … times as many groups. All trials that run
    that long are evaluated at these points too.
    """
    between = math.lcm(*(t.eval.every * schedule.prompts_per_round(t) for t in trials))
    shortest = min(map(groups_of, trials))
    first = math.ceil(shortest / 4 / between) * between
    return first if first < shortest else None


def groups_of(trial: GRPOConfig) -> int:
    """Return the number of groups that a trial is to train on."""
    return trial.rounds * schedule.prompts_per_round(trial)


def perturbation_interval(trial: GRPOConfig) -> int | None:
    """Return the number of rounds after which PBT compares trials: about an eighth of all rounds.

    The trials are evaluated in the rounds in which PBT compares them. Return None if no round
    before the last one has an evaluation.
    """
    every = trial.eval.every
    interval = max(1, round(trial.rounds / 8 / every)) * every
    return interval if interval < trial.rounds else None


# ---- Trials that a scheduler refuses -------------------------------------------------------------


def check_population(trials: Sequence[GRPOConfig], fixed: Mapping[str, object]) -> None:
    """Refuse trials that population-based training could not clone from each other."""
    arms = {trial.arm for trial in trials}
    if len(arms) > 1:
        raise UsageError(
            "--scheduler pbt: a trial can continue only from a checkpoint of its own arm; choose "
            f"one arm with --set arm=…: {', '.join(sorted(arms))}"
        )
    varied = pbt_bounds(trials[0])
    if fixed.keys() >= varied.keys():
        raise UsageError(
            f"--scheduler pbt: --set fixes {' and '.join(varied)}, which pbt varies; leave at "
            "least one of them free"
        )
    if len(trials) < 2:
        raise UsageError("--scheduler pbt: needs at least two trials; set --num-samples >= 2")
    if perturbation_interval(trials[0]) is None:
        raise UsageError(
            "--scheduler pbt: trials copy each other according to their held-out rewards, but no "
            f"round before the last round ({trials[0].rounds}) has an evaluation; lower eval.every "
            f"({trials[0].eval.every})"
        )


def check_comparable(trials: Sequence[GRPOConfig]) -> None:
    """Refuse trials that ASHA could not compare after equal numbers of samples."""
    if first_rung(trials) is None:
        every = sorted({t.eval.every * schedule.responses_per_round(t) for t in trials})
        raise UsageError(
            "--scheduler asha: trials are compared by held-out rewards after equal numbers of "
            f"responses, but they are evaluated every {', '.join(map(str, every))} responses and "
            "share no evaluation before their end; use --samples N, or lower eval.every"
        )
