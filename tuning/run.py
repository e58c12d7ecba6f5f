"""Run a plan under Ray Tune: start Ray or join a cluster, then run the trials to their end."""

from __future__ import annotations

import copy
import logging
import os
import secrets
import sys
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
from callbacks.own_callback import own_callback
from callbacks.trial_files import error_line, label, set_verbose
from grpo_trainable.command_line import UsageError
from grpo_trainable.config import GRPOConfig, resources, set_dotted
from grpo_trainable.engines.selection import chosen_engine
from grpo_trainable.storage.object_store import AnyPath
from grpo_trainable.storage.ray_private import SYNCER_LOGGER, Config, services
from grpo_trainable.tasks.input_files import users_objects, users_rewards
from grpo_trainable.trainable import NAME, register
from tuning.grid import OrderedGrid, param_space
from tuning.interrupt import raise_on_interrupt
from tuning.joined_cluster import check_nodes, join, ship_to_nodes
from tuning.nodes import Nodes, check_resources, this_machine, total
from tuning.plan import Plan
from tuning.schedulers import (
    ASHA,
    FIFO,
    GROUPS,
    PBT,
    Limited,
    first_rung,
    groups_of,
    pbt_bounds,
    perturbation_interval,
    within_bounds,
)
from tuning.snapshots import StateUnreadable, keep_whole, refuse_to_begin_anew


@contextmanager
def ray_started(plan: Plan) -> Iterator[Nodes]:
    """Start Ray for the trials of a plan, yield Ray's nodes, and shut Ray down afterwards.

    Raises:
        UsageError: The cluster cannot be joined, a trial finds no room in it, or a node cannot be
            used.
    """
    # If snapshots were less frequent, a killed driver or a retried trial would lose rows.
    os.environ["TUNE_GLOBAL_CHECKPOINT_S"] = "1"
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"
    # A trial may be killed after its last row, but before the snapshot that records this row. After
    # a resume, the trial ends without a new row. Tune's check for the metric would then end the
    # command.
    os.environ["TUNE_DISABLE_STRICT_METRIC_CHECKING"] = "1"
    try:
        raise_on_interrupt()
        _start_ray(plan)
        raise_on_interrupt()
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        address = plan.options.address
        if address is not None:
            where = f"the cluster at {address}"
            check_resources(plan.trials, nodes, where)
            check_nodes(plan.storage)
            plan.shipped = ship_to_nodes(plan.files_of_trials)
            # Ray splits the memory of a node between processes and objects.
            memory = total(nodes, "memory") + total(nodes, "object_store_memory")
            plan.check_memory(nodes, int(memory), where)
        yield nodes
    finally:
        stop_live_table()
        ray.shutdown()


def _start_ray(plan: Plan) -> None:
    """Join the cluster that the command names, or start Ray on this machine.

    Raises:
        UsageError: The cluster cannot be joined.
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
    require_token()
    # Ray gives its workers niceness 15. At that niceness, a trial would seem to hang as soon as one
    # other process is busy.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Ray would start a worker for each core in advance. Tune runs trials in other workers, with
    # different environment variables. So each worker started in advance would waste one second of
    # CPU time while a trial starts.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    (machine,) = this_machine(plan.trials)
    with _ray_processes_in_their_own_sessions():
        ray.init(
            address="local",  # do not join a cluster that already runs on this machine
            include_dashboard=False,
            num_cpus=int(machine["CPU"]),
            num_gpus=int(machine["GPU"]),
            **options,
        )


@contextmanager
def _ray_processes_in_their_own_sessions() -> Iterator[None]:
    """Keep Ray's processes that start in this context out of the command's process group.

    `timeout` and job schedulers send SIGTERM to the whole group. Ray's processes would end at once,
    before the trials are saved. Ray itself protects them only from SIGINT. On Linux, these
    processes end with the command even if they belong to other sessions. On other systems, they
    stay in the group, because Ray ends them through their group.
    """
    start = services.ConsolePopen
    if sys.platform == "linux":
        services.ConsolePopen = partial(start, start_new_session=True)  # pyright: ignore
    try:
        yield
    finally:
        services.ConsolePopen = start


@dataclass(frozen=True)
class Failure:
    """A trial that has failed."""

    trial: str  # label of the trial, as in messages
    directory: str  # name of the trial's directory
    error: str  # one line


def fit(plan: Plan) -> list[Failure]:
    """Run the trials, or continue those of a resumed experiment, and return the failed ones.

    Raises:
        UsageError: The state of the resumed experiment is damaged, or this version of
            grpo-trainable cannot read the state that another version wrote.
    """
    if not plan.options.verbose:
        # The traceback of a failed trial is in its error.txt, and the traceback's last line is
        # printed.
        logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
        # Tune takes a snapshot once per second, and may log a warning with a traceback each time.
        logging.getLogger(SYNCER_LOGGER).setLevel(logging.CRITICAL)
    keep_whole()
    refuse_to_begin_anew()
    register(plan.inputs, plan.shipped, plan.replaced)
    tuner = _restored(plan) if plan.resuming and plan.has_state else _new(plan)
    # A resumed experiment has pickled callbacks, so `grpo_callbacks` has not called `set_verbose`.
    set_verbose(plan.options.verbose)
    # `Tuner.fit` would read errors from the storage path, where a full disk may have cut them
    # short.
    tuned: Any = tuner._local_tuner
    run = tuned._fit_resume if tuned._is_restored else tuned._fit_internal
    try:
        trials = run(tuned.converted_trainable, copy.deepcopy(tuned.param_space)).trials
    except StateUnreadable as error:
        raise UsageError(
            f"--resume: Tune's state in {plan.run_directory} cannot be read ({error}), and nothing "
            "was started; try again, or restore the newest experiment_state-*.json from a copy"
        ) from error
    stop_live_table()
    return [failure(trial) for trial in trials if trial.status == Trial.ERROR]


def failure(trial: Any) -> Failure:
    """Return the failure of a trial, read from its `error.txt` on this machine.

    The storage path contains only a copy of that file.
    """
    return Failure(label(trial), Path(trial.path).name, error_line(trial))


def _new(plan: Plan) -> tune.Tuner:
    return tune.Tuner(
        NAME,
        param_space=param_space(plan.grid),
        tune_config=tune_config(plan),
        run_config=tune.RunConfig(
            name=plan.run_name,
            **kept_in(plan.run_storage),
            callbacks=[
                *map(own_callback, plan.options.callbacks),
                *grpo_callbacks(
                    verbose=plan.options.verbose,
                    trackers=plan.options.trackers,
                    experiment=plan.name,  # an extension has a directory with another name
                ),
            ],
            verbose=0,  # the callbacks replace Tune's own reporter
        ),
    )


def kept_in(directory: AnyPath) -> dict[str, Any]:
    """Return the arguments that make Tune store experiments in a directory."""
    if isinstance(directory, Path):
        return {"storage_path": str(directory)}
    return {"storage_path": directory.path, "storage_filesystem": directory.filesystem}


def _restored(plan: Plan) -> tune.Tuner:
    try:
        where = kept_in(plan.run_directory)
        path = where.pop("storage_path")
        tuner = tune.Tuner.restore(path, trainable=NAME, resume_errored=True, **where)
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"--resume: experiment {plan.name} was started by another version of grpo-trainable "
            f"({error}); resume it with that version, or start a new experiment"
        ) from error
    # Do not pass the space as an argument: Tune would reject a space unless its keys equal the
    # keys of the version that started the experiment.
    tuner._local_tuner.param_space = param_space(plan.grid)  # pyright: ignore
    # Tune keeps the settings, including limits, of the command that started the experiment. Tune
    # has no public way to change these settings.
    tuner._local_tuner._tune_config = tune_config(plan)  # pyright: ignore
    return tuner


def tune_config(plan: Plan) -> tune.TuneConfig:
    """Return Tune's settings for choosing, ordering and naming the trials."""
    order = [(trial.arm, trial.seed) for trial in plan.trials]
    chosen = scheduler(plan)
    return tune.TuneConfig(
        metric="reward/eval_mean",
        mode="max",
        scheduler=chosen,
        search_alg=OrderedGrid(order, chosen.is_any_waiting),
        # True: the next trial with the same resources, or a PBT clone, uses the same processes.
        reuse_actors=all(map(leaves_no_state, plan.trials)),
        trial_name_creator=trial_name,
        trial_dirname_creator=trial_name,
    )


def leaves_no_state(trial: GRPOConfig) -> bool:
    """Return True if another trial may later run in the same processes as this trial.

    A user's module may keep state that changes the next trial. Rewards and environments are an
    exception, because they run in processes that end with each trial. vLLM does not free all its
    memory.
    """
    own = users_objects(trial).keys() - users_rewards(trial).keys() - {"env.name"}
    return not own and chosen_engine(trial).name != "vllm"


def scheduler(plan: Plan) -> Limited:
    """Return the scheduler that the options name, with the limits of the plan."""
    found = SCHEDULERS[plan.options.scheduler](plan)
    found.limit(plan.limits["max_failures"], plan.max_concurrent)
    return found


def _asha(plan: Plan) -> ASHA:
    # Arms are compared after equal numbers of samples, because their rounds differ in size.
    first = first_rung(plan.trials)
    assert first is not None, "`check_comparable` refuses such trials"
    longest = max(map(groups_of, plan.trials))
    return ASHA(time_attr=GROUPS, max_t=longest, grace_period=first)


def _pbt(plan: Plan) -> PBT:
    interval = perturbation_interval(plan.trials[0])
    assert interval is not None, "`check_population` refuses such trials"
    bounds = {k: v for k, v in pbt_bounds(plan.trials[0]).items() if k not in plan.fixed}
    mutations: dict[str, Any] = {}
    for key, (low, high) in bounds.items():
        set_dotted(mutations, key, tune.loguniform(low, high))
    return PBT(
        time_attr="training_iteration",
        perturbation_interval=interval,
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
    """Return `ARM-SEED-ID`, the name of a trial and of its directory."""
    return f"{trial.config['arm']}-{trial.config['seed']}-{trial.trial_id}"


def make_token(home: Path, environment: Mapping[str, str]) -> None:
    """Write Ray's token file in a home directory, unless the file exists already.

    Nothing is written if the environment names a different token. Ray would write the file too, but
    with the permissions that the umask allows, so others might read it.
    """
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


def require_token() -> None:
    """If this process starts a cluster, make the cluster refuse calls without Ray's token.

    If the environment says whether a token is needed, do nothing. Ray 2.59 and newer require a
    token by default, but older versions do not.
    """
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        Config.initialize("")  # Ray read the environment when it was imported
