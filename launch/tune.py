"""Runs a search space: several complete GRPO systems under Ray Tune, and one table at the end."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib.metadata
import json
import logging
import os
import platform
import re
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from grpo_trainable import __version__
from grpo_trainable.config import (
    ConfigError,
    GRPOConfig,
    flatten,
    make_absolute,
    parse_assignment,
    set_dotted,
    shown,
    unmet,
)
from grpo_trainable.installed import missing_on_machine
from launch.directories import WRITABLE_BY_OTHERS, local_directory, refuse_state_of_others
from reports import EXPERIMENT_FILE
from search_spaces import SPACES, SearchSpace
from search_spaces.base import in_blocks, param_space

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
# Seconds after an interrupt: to the end of the round and its checkpoint, and to our own end. Ray
# needs up to 3 s more to end what we leave.
ROUND_S, GRACE_S = 15.0, 22.0
# Keys that PBT varies unless --set fixes them or the loss does not read them, and between what
# bounds; those of the clip range in parts of its default.
PBT_MUTATIONS = {"optim.lr": (1e-5, 1e-3), "loss.clip": (0.25, 2.0)}
# What results may depend on; their versions are kept with the experiment.
PACKAGES = ("torch", "ray", "numpy", "pyarrow", "tokenizers", "safetensors")


class UsageError(Exception):
    """Known before Ray starts, and told in one line."""


def main(argv: Sequence[str] | None = None) -> int:
    # Until the trials run, SIGTERM ends the command as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # A resume refuses state that others could have written. Ray's processes inherit it.
    os.umask(os.umask(0) | WRITABLE_BY_OTHERS)
    try:
        args = parse_arguments(sys.argv[1:] if argv is None else argv)
        if args.list:
            print_spaces()
            return OK
        plan = Plan(args)
        if args.dry_run:
            plan.print_trials()
            return OK
        plan.check()
        plan.prepare_directory()
    except (UsageError, ConfigError) as error:
        print(f"tune.py: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print("interrupted; nothing was started", file=sys.stderr)
        return INTERRUPTED
    return run(plan)


# ---- Arguments -------------------------------------------------------------------------------

DESCRIPTION = """\
Run the trials of a search space under Ray Tune and compare them. Each trial is a complete GRPO
system that trains a language model; a row of metrics is kept for every round. Trials run in
randomised blocks: seed after seed, each seed's arms in an order drawn from the seed."""

EXAMPLES = """\
examples:
  python launch/tune.py --space async_vs_sync
  python launch/tune.py --space async_vs_sync --samples 1024
  python launch/tune.py --space async_vs_sync --iterations 4 --set arm=async_k1
  python launch/tune.py --space async_vs_sync --num-samples 3 --name three_seeds
  python launch/tune.py --resume --name three_seeds
  python launch/tune.py --space async_vs_sync --set optim.lr=2e-4 --set loss.kl_coef=0.02 --dry-run

exit status: 0 every trial done, 1 a trial failed, 2 bad usage (nothing was started),
130 interrupted (go on with --resume)"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (--help lists the options)")


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(
        prog="tune.py",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--space", metavar="SPACE", help="the question to ask; --list shows them")
    add(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="fix a config key in every trial, for example optim.lr=2e-4, or arm=async_k1 to run "
        "one arm only; may be given many times; python -m grpo_trainable.config lists the keys",
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--samples",
        metavar="N",
        type=_at_least(1),
        help="responses of every trial, cut into each arm's own rounds; evaluations then fall at "
        "equal samples as well",
    )
    length.add_argument(
        "--iterations",
        metavar="N",
        type=_at_least(1),
        help="rounds of every arm, however many responses an arm's round has",
    )
    add("--num-samples", metavar="N", type=_at_least(1), default=1, help="seeds of every arm (1)")
    add("--seed", metavar="N", type=_at_least(0), default=0, help="the first seed (0)")
    add("--name", metavar="NAME", help="of the experiment (the space's and the time)")
    add(
        "--storage",
        metavar="DIR",
        default="~/ray_results",
        help="where experiments are kept, a directory of this machine (~/ray_results)",
    )
    add(
        "--resume",
        nargs="?",
        const="must",
        default="never",
        choices=("auto", "never", "must"),
        help="go on with the experiment --name: must (the bare option) refuses when there is none, "
        "auto starts it then, never (the default) refuses when there is one. Its state is pickle, "
        "so it is refused when others own it or can write to it. Settings and data files must be "
        "what they were; --max-failures and --max-concurrent may change",
    )
    add(
        "--checkpoint-every", metavar="N", type=_at_least(1), help="rounds between checkpoints (10)"
    )
    add(
        "--max-failures",
        metavar="N",
        type=_at_least(0),
        help="retries of a failed trial, counted anew by each --resume (2)",
    )
    add(
        "--scheduler",
        choices=("fifo", "asha", "pbt"),
        default="fifo",
        help="of Tune (fifo); asha stops trials that learn less than the others from a quarter of "
        "the samples; pbt lets the worse trials of one arm go on from the better ones with another "
        "optim.lr and, where the loss reads it, loss.clip",
    )
    add(
        "--max-concurrent",
        metavar="N",
        type=_at_least(1),
        help="trials at a time. The default is 1, because trials beside each other slow each other "
        "and their speeds could not be compared; with asha and pbt it is as many as fit",
    )
    add("--address", metavar="ADDRESS", help="of a running Ray cluster; default: start one here")
    add(
        "--verbose",
        action="store_true",
        help="a line for every change of version, the seconds of each stage at a trial's end, and "
        "what Ray and the actors log",
    )
    add("--list", action="store_true", help="show the search spaces and end")
    add("--dry-run", action="store_true", help="show every trial's config and end, without Ray")
    return parser.parse_args(argv)


def _at_least(minimum: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not re.fullmatch(r"[+-]?\d+", text) or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"must be an integer >= {minimum}, got {shown(text)}")
        return int(text)

    return read


def print_spaces() -> None:
    width = max(map(len, SPACES))
    for space in SPACES.values():
        print(f"{space.name:<{width}}  {space.question} ({len(space.arms)} arms)")


# ---- The plan: everything that is known before Ray starts ----------------------------------


class Plan:
    """What the command line asks for, resolved to the config of every trial."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        try:
            self.storage = local_directory(args.storage)
        except ValueError as error:
            raise UsageError(f"--storage {shown(args.storage)}: {error}") from None
        if args.name is not None and not re.fullmatch(r"[\w][\w.+-]*", args.name):
            raise UsageError(
                f"--name {shown(args.name)}: must be letters, digits and . _ + -, no slashes"
            )
        if args.resume == "must" and args.name is None:
            raise UsageError("--resume needs --name, the experiment to go on with")
        self.name: str = args.name or ""
        stored = self._read_stored()
        self.stored: dict[str, Any] = stored or {}
        self.resuming = args.resume != "never" and stored is not None
        if args.space is None and self.resuming:
            args.space = self.stored["space"]
        self.space = self._space()
        if not self.name:
            self.name = f"{self.space.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        self.limits = self._limits()
        self.fixed = self._fixed()
        seeds = range(args.seed, args.seed + args.num_samples)
        if "seed" in self.fixed:
            if args.num_samples > 1:
                raise UsageError("--num-samples asks for several seeds, --set seed fixes one")
            seeds = (self.fixed["seed"],)
        # Of arms: what this machine lacks for them. A resumed experiment keeps its arms.
        # What a cluster has is not known from here.
        here = self.space.not_available() if args.address is None else {}
        self.not_available: dict[str, str] = (
            self.stored.get("not_available", {}) if self.resuming else here
        )
        self.trials = self._trials(seeds)
        if self.resuming:
            self._compare_with_stored()

    @property
    def directory(self) -> Path:
        return self.storage / self.name

    @property
    def max_concurrent(self) -> int:
        """Trials at a time; 0: as many as fit."""
        given = self.limits["max_concurrent"]
        return given if given is not None else int(self.args.scheduler == "fifo")

    @property
    def has_state(self) -> bool:
        """Whether Tune got as far as to write down the experiment before it ended."""
        return (self.directory / "tuner.pkl").exists()

    def _read_stored(self) -> dict[str, Any] | None:
        """What the experiment of this name was started with; None when there is none."""
        if not self.name:
            return None
        path = self.directory / EXPERIMENT_FILE
        try:
            return json.loads(path.read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise UsageError(f"{path}: cannot be read ({error})") from None

    def _space(self) -> SearchSpace:
        name = self.args.space
        if name is None:
            raise UsageError(f"--space is missing; valid: {', '.join(SPACES)}")
        if name not in SPACES:
            near = difflib.get_close_matches(name, SPACES, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UsageError(f"--space {name}: unknown; {hint}valid: {', '.join(SPACES)}")
        return SPACES[name]

    def _fixed(self) -> dict[str, Any]:
        """Dotted keys that the command line fixes in every trial; paths absolute."""
        args = self.args
        fixed = dict(parse_assignment(text) for text in args.set)
        if args.samples is not None and "rounds" in fixed:
            raise UsageError(
                f"--samples {args.samples} contradicts --set rounds={shown(fixed['rounds'])}"
            )
        for key, option, value in (
            ("rounds", "--iterations", args.iterations),
            ("checkpoint.every", "--checkpoint-every", args.checkpoint_every),
        ):
            if value is None:
                continue
            if fixed.get(key, value) != value:
                raise UsageError(f"{option} {value} contradicts --set {key}={shown(fixed[key])}")
            fixed[key] = value
        nested: dict[str, Any] = {}
        for key, value in fixed.items():
            set_dotted(nested, key, value)
        return flatten(make_absolute(nested, os.getcwd()))

    def _limits(self) -> dict[str, Any]:
        """What a resume may change: as this command says, else as the one before it did."""
        limits: dict[str, Any] = {"max_failures": 2, "max_concurrent": None}
        before = self.stored if self.resuming else {}
        for option, default in limits.items():
            given = getattr(self.args, option)
            limits[option] = before.get(option, default) if given is None else given
        return limits

    def description(self) -> dict[str, Any]:
        """What a resume must agree with."""
        return {
            "space": self.space.name,
            "fixed": self.fixed,
            "num_samples": self.args.num_samples,
            "seed": self.args.seed,
            "scheduler": self.args.scheduler,
            "samples": self.args.samples,
            "not_available": self.not_available,
            "grpo_trainable": __version__,
        }

    def _compare_with_stored(self) -> None:
        """A resumed experiment takes the stored settings; what the user names must not differ."""
        stored, args = self.stored, self.args
        if self.space.name != stored["space"]:
            raise UsageError(
                f"--space {self.space.name}: experiment {self.name} is of {stored['space']}"
            )
        for key, value in self.fixed.items():
            if stored["fixed"].get(key) != value:
                was = (
                    f"fixed at {shown(stored['fixed'][key])}" if key in stored["fixed"] else "free"
                )
                raise UsageError(
                    f"--set {key}={shown(value)}: {key} was {was} when experiment {self.name} "
                    "started; a resumed experiment keeps its settings"
                )
        defaults = {"num_samples": 1, "seed": 0, "scheduler": "fifo", "samples": None}
        for option, default in defaults.items():
            was = stored.get(option, default)
            if getattr(args, option) not in (default, was):
                raise UsageError(
                    f"--{option.replace('_', '-')} {getattr(args, option)}: experiment "
                    f"{self.name} was started {f'with {was}' if was is not None else 'without it'}"
                )
            setattr(args, option, was)
        self.fixed = stored["fixed"]
        seeds = [self.fixed.get("seed", stored["seed"] + i) for i in range(stored["num_samples"])]
        self.trials = self._trials(dict.fromkeys(seeds))

    def _trials(self, seeds: Iterable[int]) -> list[GRPOConfig]:
        """In the order in which they run."""
        return in_blocks(
            self.space.trials(
                self.fixed, list(seeds), without=self.not_available, samples=self.args.samples
            )
        )

    def print_trials(self) -> None:
        print(f"# {self.space.name}: {len(self.trials)} trials")
        for arm, why in self.not_available.items():
            print(f"# not available here: {arm} ({why})")
        for trial in self.trials:
            print(json.dumps(trial.to_dict()))

    def check(self) -> None:
        """Reads what the trials will read, and compares what they need with what is here."""
        if not self.resuming and self.directory.exists():
            raise UsageError(
                f"--name {self.name}: {self.directory} exists; choose another name, or go on with "
                "it by --resume"
            )
        if self.args.resume == "must" and not self.resuming:
            raise UsageError(f"--resume: there is no experiment {self.name} in {self.storage}")
        arms = {trial.arm for trial in self.trials}
        if self.args.scheduler == "pbt" and len(arms) > 1:
            raise UsageError(
                "--scheduler pbt: trials go on from one another's checkpoints, which those of "
                f"other arms cannot; choose one by --set arm=…, of {', '.join(sorted(arms))}"
            )
        varied = pbt_bounds(self.trials[0])
        if self.args.scheduler == "pbt" and self.fixed.keys() >= varied.keys():
            raise UsageError(
                f"--scheduler pbt: varies {' and '.join(varied)}, which --set fixes; leave one free"
            )
        if self.args.scheduler == "pbt" and len(self.trials) < 2:
            raise UsageError("--scheduler pbt: needs several trials; choose --num-samples >= 2")
        if self.resuming:
            self._check_state()
        if self.args.address is None:
            check_transports(self.trials)
            check_resources(self.trials, this_machine(self.trials), "this machine")
        seen = set()
        for trial in self.trials:
            prompts = trial.rounds * trial.prompts_per_round
            inputs = (trial.model, trial.task, trial.rollout, trial.eval, trial.seed, prompts)
            if inputs not in seen:
                check_inputs(trial)
            seen.add(inputs)

    def _check_state(self) -> None:
        """What a resume reads is the user's own, and what the trials read is what it was."""
        from grpo_trainable.inputs import InputChanged, input_digests, refuse_changed_inputs

        before = self.stored.get("inputs", {})  # none in an experiment of an older version
        try:
            refuse_state_of_others(self.directory)
            for trial in self._readers():
                refuse_changed_inputs(trial, input_digests(trial), before)
        except OSError as error:
            reason = f"{error.filename} cannot be read ({error.strerror})"
            raise UsageError(f"--resume: {reason}") from None
        except (ValueError, InputChanged) as error:
            raise UsageError(f"--resume: {error}") from None

    def _readers(self) -> Iterable[GRPOConfig]:
        """A trial for each set of input files."""
        return {(trial.model, trial.task): trial for trial in self.trials}.values()

    def prepare_directory(self) -> None:
        from grpo_trainable.inputs import input_digests

        kept = self.stored if self.resuming else {**self.description(), **surroundings()}
        kept = {**kept, **self.limits}
        if "inputs" not in kept:  # a resume has compared the others already
            digests = [input_digests(trial) for trial in self._readers()]
            kept["inputs"] = {key: digest for own in digests for key, digest in own.items()}
        path = self.directory / EXPERIMENT_FILE
        temporary = path.with_suffix(".tmp")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            # A resume writes it as well: that it can is known before Ray starts.
            temporary.write_text(json.dumps(kept, indent=1) + "\n")
            os.replace(temporary, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise UsageError(
                f"--storage {self.storage}: cannot write there ({error.strerror})"
            ) from None


def surroundings() -> dict[str, Any]:
    """Where and with what an experiment was started, as its report shows it."""
    packages = {"python": platform.python_version()}
    for name in PACKAGES:
        packages[name] = importlib.metadata.version(name)
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "packages": packages,
        "machine": {"cpus": usable_cpus(), "platform": platform.platform()},
    }


def usable_cpus() -> int:
    return len(os.sched_getaffinity(0))


def check_transports(trials: Sequence[GRPOConfig]) -> None:
    """What the transports of the trials need is installed on this machine."""
    for name in dict.fromkeys(trial.transport for trial in trials):
        missing = missing_on_machine(name)
        if missing is not None:
            raise UsageError(f"transport={name}: {missing}")


def check_inputs(trial: GRPOConfig) -> None:
    """Model, tokenizer, task files and reward function of a trial can be read and fit together."""
    from grpo_trainable.actors.scorer import check_reward_spec
    from grpo_trainable.models.store import build_policy
    from grpo_trainable.prompts import Prompts, build_task

    try:
        model, tokenizer = build_policy(trial.model.preset, trial.model.path, trial.seed)
    except ValueError as error:
        raise UsageError(f"model.path={error}") from None
    try:
        prompts = Prompts(trial, build_task(trial), tokenizer)
        if trial.task.reward is not None:
            check_reward_spec(trial.task.reward)
    except ValueError as error:
        raise UsageError(str(error)) from None
    context = model.config.context_length
    asked = {"train": min(trial.rounds * trial.prompts_per_round, 4096), "eval": trial.eval.prompts}
    for stream, count in asked.items():
        for cursor in range(count):
            length = len(prompts.request(stream, cursor).prompt_ids)
            if length + trial.rollout.max_new_tokens > context:
                raise UsageError(
                    f"rollout.max_new_tokens={trial.rollout.max_new_tokens}: the model's context "
                    f"is {context} tokens and the prompt {shown(prompts.text(stream, cursor))} "
                    f"takes {length}; valid: at most {context - length}"
                )


def this_machine(trials: Sequence[GRPOConfig]) -> dict[str, float]:
    """CPUs here, and GPUs when a trial asks for any."""
    machine = {"CPU": float(usable_cpus()), "GPU": 0.0}
    if any("GPU" in bundle for trial in trials for bundle in trial.bundles()):
        import torch

        machine["GPU"] = float(torch.cuda.device_count())
    return machine


def check_resources(
    trials: Sequence[GRPOConfig], available: Mapping[str, float], where: str
) -> None:
    """A placement group that never fits would leave its trial pending for ever."""
    for trial in trials:
        for kind in ("CPU", "GPU"):
            needed = round(sum(bundle.get(kind, 0.0) for bundle in trial.bundles()), 4)
            if needed > available.get(kind, 0.0):
                keys = "worker" if trial.placement == "colocated" else "generator, learner"
                raise UsageError(
                    f"arm {trial.arm} needs {needed:g} {kind}s, {where} has "
                    f"{available.get(kind, 0.0):g}; lower "
                    + " or ".join(f"resources.{key}_{kind.lower()}s" for key in keys.split(", "))
                )


def at_once(trials: Sequence[GRPOConfig], available: Mapping[str, float]) -> int:
    """How many of the largest trials fit beside each other."""
    needed = {
        kind: max(sum(bundle.get(kind, 0.0) for bundle in trial.bundles()) for trial in trials)
        for kind in ("CPU", "GPU")
    }
    return min(int(available.get(kind, 0.0) / need) for kind, need in needed.items() if need)


# ---- The run ---------------------------------------------------------------------------------


class Interrupt:
    """Ctrl-C and SIGTERM. The first lets every trial finish its round and save, for `ROUND_S`; the
    second ends the program at once; `GRACE_S` after the first it ends in any case."""

    def __init__(self, resume: str, release_terminal: Callable[[], None]) -> None:
        from callbacks import interruption

        self.received = False
        self._resume = resume
        self._release_terminal = release_terminal
        self._requested = interruption.requested
        self._requested.clear()

    def install(self) -> None:
        """Around `ray.init`, which sets handlers of its own; Tune's would hide the interrupt."""
        os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"
        signal.signal(signal.SIGINT, self._handle)
        signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            try:
                self._release_terminal()
                print("interrupted again: stopping at once", file=sys.stderr, flush=True)
            finally:
                os._exit(INTERRUPTED)
        self.received = True
        name = signal.Signals(number).name
        print(f"{name}: the trials end their round and save", file=sys.stderr, flush=True)
        for seconds, act in ((ROUND_S, self._end_now), (GRACE_S, self._give_up)):
            watchdog = threading.Timer(seconds, act)
            watchdog.daemon = True
            watchdog.start()
        self._requested.set()
        if not callable(signal.getsignal(signal.SIGUSR1)):
            raise KeyboardInterrupt  # before Tune runs

    def _end_now(self) -> None:
        """What has not been saved by now goes back to its last checkpoint."""
        if callable(signal.getsignal(signal.SIGUSR1)):
            os.kill(os.getpid(), signal.SIGUSR1)

    def _give_up(self) -> None:
        try:
            self._release_terminal()
            print(self._resume, flush=True)
        finally:
            os._exit(INTERRUPTED)


def run(plan: Plan) -> int:
    args = plan.args
    # Without a snapshot a second, a killed driver loses rows, and a retried trial as well.
    os.environ["TUNE_GLOBAL_CHECKPOINT_S"] = "1"
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"
    quiet = logging.INFO if args.verbose else logging.ERROR
    import ray
    from ray import tune

    from callbacks import grpo_callbacks
    from callbacks.console import stop_live_table
    from callbacks.verbosity import set_verbose
    from grpo_trainable.trainable import NAME, register

    # Threads that spin while they wait take the core that another actor was promised.
    environment = {"OMP_WAIT_POLICY": "PASSIVE"}
    options: dict[str, Any] = {
        "log_to_driver": args.verbose,
        "logging_level": quiet,
        "runtime_env": {"env_vars": environment},
    }
    if args.address is None:
        os.environ.update(environment)
        options["address"] = "local"  # not a cluster that somebody else has started here
        machine = this_machine(plan.trials)
        options["include_dashboard"] = False
        options["num_cpus"], options["num_gpus"] = int(machine["CPU"]), int(machine["GPU"])
    else:
        options["address"] = args.address
    interrupt = Interrupt(resume_line(plan), stop_live_table)
    try:
        interrupt.install()
        ray.init(**options)
        interrupt.install()
        if args.address is not None:
            check_resources(plan.trials, ray.cluster_resources(), f"the cluster at {args.address}")
        if not args.verbose:
            # A failed trial's traceback is in its error.txt; the last line is printed at the end.
            logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
        register()
        print(
            f"{plan.space.name}: {plan.space.question}\n"
            f"{len(plan.trials)} trials, kept in {plan.directory}",
            *(f"not available here: {arm} ({why})" for arm, why in plan.not_available.items()),
            sep="\n",
            flush=True,
        )
        available = ray.cluster_resources()
        if plan.limits["max_concurrent"] is None and 1 == plan.max_concurrent < at_once(
            plan.trials, available
        ):
            print("one trial at a time, so that none slows another; --max-concurrent N runs more")
        samples = {trial.rounds * trial.responses_per_round for trial in plan.trials}
        if len(samples) > 1:
            print(
                "note: the arms do not train on equal samples, because --iterations or --set "
                "changed it; --samples N gives each of them N responses"
            )
        run_config = tune.RunConfig(
            name=plan.name,
            storage_path=str(plan.storage),
            callbacks=grpo_callbacks(verbose=args.verbose),
            verbose=0,  # of Tune's own reporter, which the callbacks replace
        )
        if plan.resuming and plan.has_state:
            tuner = tune.Tuner.restore(
                str(plan.directory),
                trainable=NAME,
                resume_errored=True,
            )
            # As an argument it would be refused where this version has other keys than the one
            # that started the experiment.
            tuner._local_tuner.param_space = param_space(plan.trials)  # pyright: ignore
            # Tune keeps the settings of the command that started the experiment, limits among them,
            # and has no public way to say others.
            tuner._local_tuner._tune_config = tune_config(plan)  # pyright: ignore
        else:
            tuner = tune.Tuner(
                NAME,
                param_space=param_space(plan.trials),
                tune_config=tune_config(plan),
                run_config=run_config,
            )
        # A resumed experiment's callbacks are those that were pickled with it.
        set_verbose(args.verbose)
        results = tuner.fit()
        # Tune is over: an interrupt from now on ends the command itself. Ignored, not the default:
        # a timer may be about to send it.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        stop_live_table()
        return summarise(plan, results, interrupted=interrupt.received)
    except UsageError as error:
        print(f"tune.py: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print(resume_line(plan), flush=True)
        return INTERRUPTED
    finally:
        stop_live_table()
        ray.shutdown()


def tune_config(plan: Plan) -> Any:
    from ray import tune

    from launch.blocks import OrderedGrid
    from launch.schedulers import ASHA, FIFO, PBT

    args = plan.args
    if args.scheduler == "asha":
        # By samples: arms differ in what a round is.
        groups = max(trial.rounds * trial.prompts_per_round for trial in plan.trials)
        scheduler = ASHA(time_attr="count/trained", max_t=groups, grace_period=max(1, groups // 4))
    elif args.scheduler == "pbt":
        rounds = max(trial.rounds for trial in plan.trials)
        bounds = {k: v for k, v in pbt_bounds(plan.trials[0]).items() if k not in plan.fixed}
        mutations: dict[str, Any] = {}
        for key, (low, high) in bounds.items():
            set_dotted(mutations, key, tune.loguniform(low, high))
        scheduler = PBT(
            time_attr="training_iteration",
            perturbation_interval=max(1, rounds // 8),
            hyperparam_mutations=mutations,
            custom_explore_fn=partial(within_bounds, bounds),
            synch=True,
        )
    else:
        scheduler = FIFO()
    scheduler.limit(plan.limits["max_failures"], plan.max_concurrent)
    order = [(trial.arm, trial.seed) for trial in plan.trials]
    return tune.TuneConfig(
        metric="reward/eval_mean",
        mode="max",
        scheduler=scheduler,
        # Synchronous PBT waits until all of its population has come as far, so all trials are made
        # at once, and the scheduler alone limits how many run.
        search_alg=OrderedGrid(order, 0 if args.scheduler == "pbt" else plan.max_concurrent),
        # A clone is the same actors with another config.
        reuse_actors=args.scheduler == "pbt",
        trial_name_creator=trial_name,
        trial_dirname_creator=trial_name,
    )


def pbt_bounds(trial: GRPOConfig) -> dict[str, tuple[float, float]]:
    """What PBT can vary in such a trial: key -> least and greatest value."""
    bounds = {key: limits for key, limits in PBT_MUTATIONS.items() if not unmet(key, trial)}
    if "loss.clip" in bounds:
        low, high = bounds["loss.clip"]
        bounds["loss.clip"] = (low * trial.clip_low, high * trial.clip_low)
    return bounds


def within_bounds(
    bounds: Mapping[str, tuple[float, float]], config: dict[str, Any]
) -> dict[str, Any]:
    """What PBT explores next: its factors of 0.8 and 1.2 add up, beyond what is valid."""
    for key, (low, high) in bounds.items():
        set_dotted(config, key, min(max(flatten(config)[key], low), high))
    return config


def trial_name(trial: Any) -> str:
    return f"{trial.config['arm']}-{trial.config['seed']}-{trial.trial_id}"


# ---- The end ---------------------------------------------------------------------------------


def summarise(plan: Plan, results: Any, *, interrupted: bool) -> int:
    from reports.experiment import read_experiment
    from reports.summary import table

    print()
    print(table(read_experiment(plan.directory).trials))
    print()
    print(f"tensorboard --logdir {shlex.quote(str(plan.directory))}")
    failed = [result for result in results if result.error is not None]
    for result in failed:
        last = str(result.error).strip().splitlines()[-1]
        print(f"failed: {last}\n        see {Path(result.path) / 'error.txt'}")
    if interrupted or failed:
        print(resume_line(plan), flush=True)
    report_line(plan, write=not interrupted)
    if interrupted:
        return INTERRUPTED
    return FAILED if failed else OK


def report_line(plan: Plan, *, write: bool) -> None:
    """The path of the report, or the command that writes it: an interrupt leaves no time."""
    from reports.page import ReportError, write_report

    command = shlex.join(["python", "launch/report.py", str(plan.directory)])
    if not write:
        print(command)
        return
    try:
        print(f"report: {write_report(plan.directory)}", flush=True)
    except ReportError as error:
        print(f"no report: {error}; then: {command}", flush=True)
    except Exception:
        # The trials are what the command was for; their outcome is its exit status.
        traceback.print_exc()
        print(f"no report: the error above; to try again: {command}", flush=True)


def resume_line(plan: Plan) -> str:
    parts = [
        *("python", "launch/tune.py", "--space", plan.space.name, "--resume", "must"),
        *("--name", plan.name, "--storage", str(plan.storage)),
    ]
    return shlex.join(parts)


if __name__ == "__main__":
    sys.exit(main())
