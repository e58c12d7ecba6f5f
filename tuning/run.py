"""Runs a plan under Ray Tune: starts Ray or joins a cluster, and runs the trials to their end."""

from __future__ import annotations

import copy
import logging
import os
import secrets
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.experiment import Trial

from callbacks import grpo_callbacks
from callbacks.console import stop_live_table
from callbacks.trial_files import error_line, set_verbose
from grpo_trainable.command_line import UsageError
from grpo_trainable.config import resources, schedule, set_dotted
from grpo_trainable.storage.object_store import AnyPath
from grpo_trainable.storage.ray_private import SYNCER_LOGGER
from grpo_trainable.trainable import NAME, register
from tuning.grid import OrderedGrid, param_space
from tuning.interrupt import Interrupt
from tuning.joined_cluster import check_nodes, join, ship_to_nodes
from tuning.nodes import Nodes, WaitingCallback, check_resources, this_machine, total
from tuning.plan import Plan
from tuning.schedulers import ASHA, FIFO, PBT, Limited, pbt_bounds, within_bounds
from tuning.snapshots import StateUnreadable, keep_whole, refuse_to_begin_anew


@contextmanager
def ray_started(plan: Plan, interrupt: Interrupt) -> Iterator[Nodes]:
    """Ray for the trials of a plan, and its nodes. Ray is shut down at the end.

    Raises:
        UsageError: the cluster cannot be joined, a trial finds no room in it, or a node cannot be
            used.
    """
    # Fewer snapshots than one a second would lose rows of a killed driver and of a retried trial.
    os.environ["TUNE_GLOBAL_CHECKPOINT_S"] = "1"
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"
    try:
        interrupt.install()
        _start_ray(plan)
        interrupt.install()
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        address = plan.options.address
        if address is not None:
            where = f"the cluster at {address}"
            check_resources(plan.trials, nodes, where)
            check_nodes(plan.storage)
            plan.shipped = ship_to_nodes(plan.files_of_trials)
            # Ray divides the memory of its nodes between processes and objects.
            memory = total(nodes, "memory") + total(nodes, "object_store_memory")
            plan.check_memory(nodes, int(memory), where)
        yield nodes
    finally:
        stop_live_table()
        ray.shutdown()


def _start_ray(plan: Plan) -> None:
    """Joins the cluster that the command names, or starts one here.

    Raises:
        UsageError: the cluster cannot be joined.
    """
    verbose, address = plan.options.verbose, plan.options.address
    options: dict[str, Any] = {
        "log_to_driver": verbose,
        "logging_level": logging.INFO if verbose else logging.ERROR,
        "runtime_env": {"env_vars": resources.OPENMP},
    }
    if address is not None:
        join(address, **options)
        return
    os.environ.update(resources.OPENMP)
    make_token(Path.home(), os.environ)
    # Ray gives its workers niceness 15: beside one busy process a trial would seem to hang.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Ray starts a worker for each core beforehand, and Tune runs a trial in others, with variables
    # of their own: a CPU second for nothing, when the trial wants it.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    (machine,) = this_machine(plan.trials)
    ray.init(
        address="local",  # not a cluster that somebody else has started here
        include_dashboard=False,
        num_cpus=int(machine["CPU"]),
        num_gpus=int(machine["GPU"]),
        **options,
    )


@dataclass(frozen=True)
class Failure:
    """A trial that has failed."""

    directory: str  # the name of the trial's
    error: str  # in one line


def fit(plan: Plan) -> list[Failure]:
    """Runs the trials, or goes on with those of a resumed experiment, to their end. Those that have
    failed are returned.

    Raises:
        UsageError: the state of the experiment that is resumed is damaged, or is that of a version
            of ours that this one cannot read.
    """
    if not plan.options.verbose:
        # A failed trial's traceback is in its error.txt; the last line is printed at the end.
        logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
        # Tune's snapshots of an experiment warn once a second, with a traceback.
        logging.getLogger(SYNCER_LOGGER).setLevel(logging.CRITICAL)
    keep_whole()
    refuse_to_begin_anew()
    register(plan.inputs, plan.shipped)
    tuner = _restored(plan) if plan.resuming and plan.has_state else _new(plan)
    # A resumed experiment's callbacks are those that were pickled with it.
    set_verbose(plan.options.verbose)
    # `Tuner.fit` would read errors back from the storage path, where a full disk has cut them.
    tuned: Any = tuner._local_tuner
    run = tuned._fit_resume if tuned._is_restored else tuned._fit_internal
    try:
        trials = run(tuned.converted_trainable, copy.deepcopy(tuned.param_space)).trials
    except StateUnreadable as error:
        raise UsageError(
            f"--resume: Tune's state in {plan.directory} cannot be read ({error}); nothing was "
            "started: try again, or put a copy of the newest experiment_state-*.json in its place"
        ) from error
    # Tune is over: an interrupt from now on ends the command itself. Ignored, not the default:
    # a timer may be about to send it.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    stop_live_table()
    return [failure(trial) for trial in trials if trial.status == Trial.ERROR]


def failure(trial: Any) -> Failure:
    """How a trial has failed, by its `error.txt` on this machine, of which the storage path has a
    copy."""
    return Failure(Path(trial.path).name, error_line(trial))


def _new(plan: Plan) -> tune.Tuner:
    return tune.Tuner(
        NAME,
        param_space=param_space(plan.trials),
        tune_config=tune_config(plan),
        run_config=tune.RunConfig(
            name=plan.name,
            **kept_in(plan.storage),
            callbacks=[*grpo_callbacks(verbose=plan.options.verbose), WaitingCallback()],
            verbose=0,  # the callbacks replace Tune's own reporter
        ),
    )


def kept_in(directory: AnyPath) -> dict[str, Any]:
    """A directory as Tune takes it."""
    if isinstance(directory, Path):
        return {"storage_path": str(directory)}
    return {"storage_path": directory.path, "storage_filesystem": directory.filesystem}


def _restored(plan: Plan) -> tune.Tuner:
    try:
        where = kept_in(plan.directory)
        path = where.pop("storage_path")
        tuner = tune.Tuner.restore(path, trainable=NAME, resume_errored=True, **where)
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"--resume: experiment {plan.name} was started by another version of grpo-trainable "
            f"({error}); go on with it by that version, or start a new one"
        ) from error
    # Tune would refuse it as an argument where this version has other keys than the one that
    # started the experiment.
    tuner._local_tuner.param_space = param_space(plan.trials)  # pyright: ignore
    # Tune keeps the settings of the command that started the experiment, limits among them,
    # and has no public way to say others.
    tuner._local_tuner._tune_config = tune_config(plan)  # pyright: ignore
    return tuner


def tune_config(plan: Plan) -> tune.TuneConfig:
    """How the trials are chosen, ordered and named."""
    order = [(trial.arm, trial.seed) for trial in plan.trials]
    return tune.TuneConfig(
        metric="reward/eval_mean",
        mode="max",
        scheduler=scheduler(plan),
        search_alg=OrderedGrid(order),
        # A clone of PBT is the same actors with another config.
        reuse_actors=plan.options.scheduler == "pbt",
        trial_name_creator=trial_name,
        trial_dirname_creator=trial_name,
    )


def scheduler(plan: Plan) -> Limited:
    """The scheduler that the options name, with the limits of the plan."""
    found = SCHEDULERS[plan.options.scheduler](plan)
    found.limit(plan.limits["max_failures"], plan.max_concurrent)
    return found


def _asha(plan: Plan) -> ASHA:
    # Arms are compared by samples, since they differ in what a round is.
    groups = max(trial.rounds * schedule.prompts_per_round(trial) for trial in plan.trials)
    return ASHA(time_attr="count/trained", max_t=groups, grace_period=max(1, groups // 4))


def _pbt(plan: Plan) -> PBT:
    rounds = max(trial.rounds for trial in plan.trials)
    bounds = {k: v for k, v in pbt_bounds(plan.trials[0]).items() if k not in plan.fixed}
    mutations: dict[str, Any] = {}
    for key, (low, high) in bounds.items():
        set_dotted(mutations, key, tune.loguniform(low, high))
    return PBT(
        time_attr="training_iteration",
        perturbation_interval=max(1, rounds // 8),
        hyperparam_mutations=mutations,
        custom_explore_fn=partial(within_bounds, bounds),
        synch=True,
    )


SCHEDULERS: dict[str, Callable[[Plan], Limited]] = {
    "fifo": lambda plan: FIFO(),
    "asha": _asha,
    "pbt": _pbt,
}


def trial_name(trial: Any) -> str:
    return f"{trial.config['arm']}-{trial.config['seed']}-{trial.trial_id}"


def make_token(home: Path, environment: Mapping[str, str]) -> None:
    """Makes the token that Ray looks for in a home directory, where there is none and the
    environment names no other. Ray would make it too, but readable for everybody whom the umask
    allows."""
    other = environment.keys() & {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}
    if other or environment.get("RAY_AUTH_MODE", "token") != "token":
        return
    path = home / ".ray" / "auth_token"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    with open(descriptor, "w") as file:
        file.write(secrets.token_hex(32))
