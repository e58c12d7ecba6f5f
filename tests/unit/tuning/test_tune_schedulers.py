"""The number of retries of a trial and the number of concurrent trials, also after a resume."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayTaskError
from ray.tune import Checkpoint

from grpo_trainable.cluster.tune_trials import Trial
from grpo_trainable.config import ConfigError, GRPOConfig
from grpo_trainable.plugins import PluginError
from grpo_trainable.protocol.calls import ActorFailed, FailsAgain
from grpo_trainable.storage.ray_private import StorageContext
from search_spaces import SPACES
from tuning.schedulers import (
    ASHA,
    FIFO,
    GROUPS,
    PBT,
    first_rung,
    perturbation_interval,
)

SCHEDULERS = {
    "fifo": FIFO,
    "asha": lambda: ASHA(metric="reward", mode="max"),
    "pbt": lambda: PBT(metric="reward", mode="max", hyperparam_mutations={"lr": [1, 2]}),
}


@dataclass(eq=False)
class FakeTrial:
    """A trial as schedulers see it. After a restore, its values are from the first command."""

    trial_id: str
    status: str = Trial.PENDING
    num_failures: int = 0
    max_failures: int = 7
    has_directory: bool = False

    def __post_init__(self) -> None:
        manager = SimpleNamespace(checkpoint_config=SimpleNamespace(num_to_keep=None))
        self.run_metadata = SimpleNamespace(checkpoint_manager=manager)
        self.config: dict[str, Any] = {"lr": 1}
        self.evaluated_params: dict[str, Any] = {}
        self.experiment_tag = self.trial_id
        # Older versions of Ray save all trials when they compare them.
        self.temporary_state = SimpleNamespace(saving_to=None)
        self.checkpoint = None

    def set_status(self, status: str) -> None:
        self.status = status

    def init_local_path(self) -> None:
        self.has_directory = True

    def is_finished(self) -> bool:
        return self.status in (Trial.TERMINATED, Trial.ERROR)


class FakeController:
    """A controller that adds trials to a scheduler and starts the chosen trials, as Tune does."""

    def __init__(self, scheduler: Any, trials: list[FakeTrial]) -> None:
        self.scheduler, self.trials, self.search_alg = scheduler, trials, None
        self._tune_controller = self  # Tune wraps its controller
        # The decisions of an earlier command: each trial was to stop once it was saved.
        self._cached_trial_decisions = {trial.trial_id: "STOP" for trial in trials}
        for trial in trials:
            scheduler.on_trial_add(self, trial)

    def get_trials(self) -> list[FakeTrial]:
        return self.trials

    def get_live_trials(self) -> list[FakeTrial]:
        return [trial for trial in self.trials if not trial.is_finished()]

    def start(self) -> str | None:
        """Return the trial that the scheduler lets Tune start in its next step."""
        chosen = self.scheduler.choose_trial_to_run(self)
        if chosen is None:
            return None
        chosen.set_status(Trial.PENDING)
        return chosen.trial_id


@pytest.fixture(params=list(SCHEDULERS))
def controller(request: pytest.FixtureRequest) -> Any:
    def build(trials: list[FakeTrial], **limits: Any) -> FakeController:
        scheduler = SCHEDULERS[request.param]()
        scheduler.limit(**{"max_failures": 2, "max_concurrent": 0, **limits})
        return FakeController(scheduler, trials)

    return build


def trials(count: int) -> list[FakeTrial]:
    return [FakeTrial(name) for name in "abcdef"[:count]]


def test_no_more_trials_start_than_may_run_at_a_time(controller):
    c = controller(trials(4), max_concurrent=2)
    # When an experiment ends early, Tune cannot return a result for a trial without a directory.
    assert [trial.has_directory for trial in c.trials] == [True] * 4
    assert [c.start(), c.start(), c.start()] == ["a", "b", None]
    c.trials[0].set_status(Trial.RUNNING)
    assert c.start() is None
    c.trials[0].set_status(Trial.TERMINATED)
    assert [c.start(), c.start()] == ["c", None]


def test_nothing_is_held_back_without_a_limit(controller):
    c = controller(trials(3))
    assert [trial.status for trial in c.trials] == [Trial.PENDING] * 3


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_that_was_given_no_limit_leaves_those_of_tune(name):
    c = FakeController(SCHEDULERS[name](), trials(2))
    assert [(t.status, t.max_failures) for t in c.trials] == [(Trial.PENDING, 7)] * 2


def test_what_had_ended_before_a_resume_does_not_count(controller):
    ended = [FakeTrial("x", Trial.TERMINATED), FakeTrial("y", Trial.ERROR)]
    c = controller([*ended, *trials(2)], max_concurrent=1)
    assert [c.start(), c.start()] == ["a", None]
    assert [trial.status for trial in ended] == [Trial.TERMINATED, Trial.ERROR]


def test_what_an_earlier_command_meant_to_do_after_a_save_is_forgotten(controller):
    c = controller(trials(2))
    assert c._cached_trial_decisions == {}
    # A retry within a command does not change Tune's present decision.
    c._cached_trial_decisions["a"] = "PAUSE"
    c.scheduler.on_trial_add(c, c.trials[0])
    assert c._cached_trial_decisions == {"a": "PAUSE"}


def test_retries_are_counted_from_the_resume(controller):
    # Tune retries while failures <= max_failures, and continues to count failures.
    failed, other = FakeTrial("a", num_failures=3), FakeTrial("b")
    controller([failed, other], max_failures=1)
    assert (failed.max_failures, other.max_failures) == (4, 1)


def test_a_retry_takes_nothing_from_the_count_and_waits_for_nobody(controller):
    c = controller(trials(2), max_concurrent=1, max_failures=1)
    c.start()
    trial = c.trials[0]
    trial.num_failures = 1
    c.scheduler.on_trial_add(c, trial)  # as Tune does before each retry
    assert trial.max_failures == 1
    assert trial.status == Trial.PENDING
    assert c.start() is None


# ---- Synchronous PBT -----------------------------------------------------------------------------


class Population(FakeController):
    """Trials under synchronous PBT, which compares trials every four rounds and copies none."""

    def __init__(self, **rounds: int) -> None:
        self.rounds = rounds  # finished rounds of each trial
        self.since_start = dict.fromkeys(rounds, 0)
        scheduler = PBT(
            time_attr="training_iteration",
            **{"metric": "reward", "mode": "max", "synch": True, "quantile_fraction": 0},
            perturbation_interval=4,
            hyperparam_mutations={"lr": [1, 2]},
        )
        super().__init__(scheduler, [FakeTrial(name) for name in rounds])

    def _schedule_trial_save(self, trial: FakeTrial, result: object) -> None:
        """Save nothing, because no trial is copied."""

    def trial(self, name: str) -> FakeTrial:
        return next(trial for trial in self.trials if trial.trial_id == name)

    def round(self, name: str) -> str:
        """Finish a round of a trial and return the decision of the scheduler."""
        self.rounds[name] += 1
        self.since_start[name] += 1
        trial = self.trial(name)
        row = {
            "training_iteration": self.rounds[name],
            "iterations_since_restore": self.since_start[name],
            "reward": 0.5,
        }
        decision = self.scheduler.on_trial_result(self, trial, row)
        trial.set_status(Trial.PAUSED if decision == "PAUSE" else Trial.RUNNING)
        return decision

    def run_to_pause(self, name: str) -> int:
        """Run a trial until the scheduler pauses it, and return the number of its rounds."""
        while self.round(name) == "CONTINUE":
            assert self.rounds[name] < 100
        return self.rounds[name]

    def started(self) -> set[str]:
        """Start every trial that may run, and return their names."""
        names: set[str] = set()
        while name := self.start():
            self.trial(name).set_status(Trial.RUNNING)
            names.add(name)
        return names


@pytest.mark.parametrize(
    ("a", "b", "pauses"), [(0, 0, [4, 8]), (11, 11, [12, 16]), (12, 10, [16, 20])]
)
def test_restored_trials_are_compared_in_equal_rounds_at_multiples_of_the_interval(a, b, pauses):
    population = Population(a=a, b=b)
    for rounds in pauses:
        assert population.started() == {"a", "b"}
        paused: set[str] = set()
        while len(paused) < 2:  # the trials take turns
            for name in sorted({"a", "b"} - paused):
                if population.round(name) == "PAUSE":
                    paused.add(name)
        assert population.rounds == {"a": rounds, "b": rounds}


def test_a_trial_that_waits_for_an_earlier_comparison_is_started_again_after_a_restore():
    population = Population(a=12, b=11)
    population.started()
    assert population.run_to_pause("b") == 12
    assert population.round("a") == "CONTINUE"  # round 13: the next comparison is after round 16
    assert population.started() == {"b"}


def test_a_retried_trial_is_not_compared_before_the_round_in_which_others_wait():
    population = Population(a=0, b=0)
    population.started()
    assert [population.run_to_pause("a"), population.run_to_pause("b")] == [4, 4]
    population.started()
    assert population.run_to_pause("a") == 8
    population.scheduler.on_trial_add(population, population.trial("b"))  # as Tune does
    assert population.run_to_pause("b") == 8


def test_trials_go_on_when_the_trial_that_they_waited_for_fails():
    population = Population(a=0, b=0, c=0)
    population.started()
    assert [population.run_to_pause("a"), population.run_to_pause("b")] == [4, 4]
    assert population.started() == set()
    population.trial("c").set_status(Trial.ERROR)
    assert population.started() == {"a", "b"}
    assert population.run_to_pause("a") == 8


# ---- Reused processes ----------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0, 1])
def test_the_search_goes_on_until_no_trial_waits_for_its_turn(controller, limit):
    c = controller(trials(2), max_concurrent=limit)
    first, last = c.trials
    first.set_status(Trial.RUNNING)
    assert c.scheduler.is_any_waiting()
    for status in (Trial.RUNNING, Trial.TERMINATED, Trial.ERROR):
        last.set_status(status)
        assert not c.scheduler.is_any_waiting()
    last.set_status(Trial.PAUSED)  # as PBT does
    assert c.scheduler.is_any_waiting()


# ---- Failures that are not retried ---------------------------------------------------------------


@pytest.mark.parametrize("limit", [2, -1])
@pytest.mark.parametrize(
    ("error", "retried"),
    [
        (FailsAgain("the reward"), False),
        (ConfigError("lag=1: …"), False),
        (PluginError("task.name=my.py:Task: …"), False),
        (ActorFailed("a machine"), True),
        (OSError(), True),
    ],
)
def test_only_a_failure_that_may_pass_is_retried(error, retried, limit):
    trial = stub(limit)
    trial.handle_error(raised(error))
    assert trial.num_failures == 1
    assert trial.should_recover() == retried
    trial.handle_error(raised(OSError()))
    assert trial.should_recover()


def test_a_failure_that_would_repeat_leaves_the_limit_of_later_runs():
    """`Tuner.restore` applies this limit to the trial when it restarts or resumes the trial."""
    trial = stub(2)
    trial.handle_error(raised(ConfigError("lag=1: …")))
    assert trial.max_failures == 2
    trial.create_placement_group_factory()
    resumed = Trial.from_json_state(trial.get_json_state()[0], stub=True)
    assert resumed.should_recover()


def stub(max_failures: int) -> Trial:
    nowhere: Any = SimpleNamespace(trial_driver_staging_path="")  # without the path, Tune needs Ray
    return Trial("stub", stub=True, storage=nowhere, max_failures=max_failures)


def raised(error: Exception) -> Exception:
    """Return an error as Tune receives it from a trial."""
    return RayTaskError("step", "Traceback …", error).as_instanceof_cause()


def test_a_resume_of_the_command_sets_the_limit_of_a_failed_trial():
    trial = stub(2)
    trial.handle_error(raised(ConfigError("lag=1: …")))
    trial.set_status(Trial.PENDING)
    resumed = FIFO()
    resumed.limit(max_failures=2, max_concurrent=0)
    FakeController(resumed, [trial])  # type: ignore[list-item]
    assert trial.max_failures == 1 + 2


# ---- When trials are compared --------------------------------------------------------------------


def asha(trials: list[FakeTrial], first: int) -> ASHA:
    """Return a scheduler that compares trials after `first` groups and stops the worse half."""
    scheduler = ASHA(
        **{"time_attr": GROUPS, "metric": "reward/eval_mean", "mode": "max"},
        **{"max_t": 100, "grace_period": first, "reduction_factor": 2},
    )
    FakeController(scheduler, trials)
    return scheduler


def row(round_: int, evaluated: int, reward: float) -> dict[str, Any]:
    return {"training_iteration": round_, "eval/round": evaluated, "reward/eval_mean": reward}


def grpo_trials(*ks: int) -> list[FakeTrial]:
    """Return trials of 4 groups per rollout batch, with k fresh batches per round."""
    found = trials(len(ks))
    for trial, k in zip(found, ks, strict=True):
        trial.config = {"rollout": {"prompts": 4}, "k": k, "k_mode": "fresh_batches"}
    return found


def test_asha_judges_no_trial_by_an_evaluation_of_an_earlier_round():
    good, worse = grpo_trials(1, 1)
    scheduler = asha([good, worse], first=8)
    decide = scheduler.on_trial_result
    assert decide(None, good, row(2, 2, 0.5)) == "CONTINUE"
    # In round 2, only the reward before training is known.
    assert decide(None, worse, row(2, 0, 0.3)) == "CONTINUE"
    assert decide(None, worse, row(3, 3, 0.4)) == "STOP"


@pytest.mark.parametrize("last", [{}, {"done": True}])
def test_asha_accepts_the_end_of_a_trial_without_a_row(last):
    (trial,) = grpo_trials(1)
    asha([trial], first=8).on_trial_complete(None, trial, last)


def test_asha_compares_trials_whose_rounds_differ_after_equal_numbers_of_groups():
    single, double = grpo_trials(1, 2)
    scheduler = asha([single, double], first=8)
    decide = scheduler.on_trial_result
    assert decide(None, single, row(1, 1, 0.9)) == "CONTINUE"  # four groups: too early to judge
    assert decide(None, single, row(2, 2, 0.5)) == "CONTINUE"
    assert decide(None, double, row(1, 1, 0.4)) == "STOP"  # also after eight groups


def test_asha_with_a_metric_of_every_round_judges_every_row():
    good, worse = grpo_trials(1, 1)
    scheduler = ASHA(metric="reward/train_mean", mode="max", grace_period=2, reduction_factor=2)
    FakeController(scheduler, [good, worse])
    rewards = {"reward/train_mean": 0.5}
    assert scheduler.on_trial_result(None, good, {**row(2, 0, 0.3), **rewards}) == "CONTINUE"
    rewards = {"reward/train_mean": 0.4}
    assert scheduler.on_trial_result(None, worse, {**row(2, 0, 0.3), **rewards}) == "STOP"


def test_the_first_comparison_is_at_an_evaluation_that_all_trials_make():
    # The trials have 96 rounds of 16 groups, and an evaluation every 16 rounds. A quarter of the
    # groups is 384, and the next evaluation is after 512.
    assert first_rung(SPACES["async_vs_sync"].trials({}, [0])) == 512

    def trial(**settings: Any) -> GRPOConfig:
        return GRPOConfig.from_dict({"rollout": {"prompts": 4}, **settings})

    each = trial(rounds=8, eval={"every": 1})
    assert first_rung([each]) == 8
    assert first_rung([each, trial(rounds=8, eval={"every": 3})]) == 12
    assert first_rung([each, trial(rounds=8, eval={"every": 8})]) is None
    assert first_rung([trial(rounds=8, eval={"every": 16})]) is None
    # The shortest trial decides.
    assert first_rung([each, trial(rounds=80, eval={"every": 1})]) == 8
    assert first_rung([each, trial(rounds=80, eval={"every": 8})]) is None


@pytest.mark.parametrize(
    ("rounds", "every", "interval"),
    [(96, 16, 16), (96, 4, 12), (96, 1, 12), (8, 3, 3), (8, 8, None)],
)
def test_pbt_compares_trials_in_rounds_with_an_evaluation(rounds, every, interval):
    trial = GRPOConfig.from_dict({"rounds": rounds, "eval": {"every": every}})
    assert perturbation_interval(trial) == interval


def test_a_snapshot_after_a_copy_has_its_checkpoint_and_its_settings(tmp_path: Path) -> None:
    storage = StorageContext(str(tmp_path), "experiment")
    clone, donor = (
        Trial("PPO", config={"lr": lr}, trial_id=name, storage=storage, stub=True)
        for name, lr in (("clone", 1), ("donor", 2))
    )
    scheduler = PBT(
        metric="reward",
        mode="max",
        time_attr="training_iteration",
        perturbation_interval=1,
        hyperparam_mutations={"lr": [1, 2]},
        log_config=False,
    )
    controller: Any = SimpleNamespace(
        search_alg=None, pause_trial=lambda trial, should_checkpoint: None
    )
    for trial in (clone, donor):
        scheduler.on_trial_add(controller, trial)
    checkpoint = Checkpoint(str(tmp_path / "experiment" / "donor" / "checkpoint_000000"))
    found: Any = scheduler._trial_state[donor]
    found.last_score, found.last_result, found.last_checkpoint = 1.0, {}, checkpoint
    scheduler._trial_state[clone].last_score = 0.0  # type: ignore[assignment]

    def stored() -> str:
        return json.dumps(clone.get_json_state())

    path = b"donor/checkpoint_000000".hex()  # Tune stores checkpoints as pickle
    assert path not in stored()  # Tune caches this state
    scheduler._exploit(controller, clone, donor)
    assert path in stored()
