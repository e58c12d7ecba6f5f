"""Plan of an experiment: everything that is known before Ray starts."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_trainable import __version__
from grpo_trainable.command_line import UsageError
from grpo_trainable.config import (
    CHECKS,
    Check,
    ConfigError,
    GRPOConfig,
    flatten,
    make_absolute,
    parse_assignment,
    parse_assignments,
    prepared,
    set_dotted,
    shown,
)
from grpo_trainable.plugins import PluginError, is_reference, source_of
from grpo_trainable.storage.digests import digest_of
from grpo_trainable.tasks.custom import default_settings, keys_with, with_task_settings
from grpo_trainable.text import did_you_mean, plural
from reports import EXPERIMENT_FILE, EXTENSIONS, STORAGE
from search_spaces import SPACES
from search_spaces.find import absolute, directory_of, find_preset, find_space, source_file
from search_spaces.presets import Preset
from search_spaces.search_space import SearchSpace, in_blocks
from tuning.checks import (
    Missing,
    checks_of,
    too_short_for_lag,
)
from tuning.directories import (
    directory_named,
    has_results,
    is_running,
    is_taken,
    refusal,
    refuse_state_of_others,
    removed,
    write_file,
)
from tuning.memory import check_gpu_memory, compare, machine_bytes, need_of, unlike
from tuning.nodes import Nodes, at_once, check_resources, this_machine, usable_cpus

if TYPE_CHECKING:
    from grpo_trainable.storage.object_store import AnyPath

# Packages whose versions are stored with the experiment, because results may depend on them.
PACKAGES = ("torch", "ray", "numpy", "pyarrow", "tokenizers", "safetensors")
OPTIONAL_PACKAGES = ("transformers", "vllm")  # their versions are also stored if they are installed
MAX_FAILURES = 2
MAX_SEEDS = 20  # default of --max-seeds with --until-decided
SPACE_INPUT = "space"  # key of the space's file among the digests of input files


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of an experiment. `launch/tune.py --help` explains each option."""

    space: str | None = None
    preset: str | None = None
    assignments: Sequence[str] = ()  # KEY=VALUE
    samples: int | None = None
    iterations: int | None = None
    num_samples: int = 1
    seed: int = 0
    name: str | None = None
    storage: str = STORAGE
    resume: str = "never"
    checkpoint_every: int | None = None
    max_failures: int | None = None
    scheduler: str = "fifo"
    max_concurrent: int | None = None
    address: str | None = None
    verbose: bool = False
    accept_changed_code: bool = False
    margin: float | None = None
    margin_relative: float | None = None
    baseline: str | None = None
    until_decided: bool = False
    max_seeds: int | None = None
    budget: float | None = None  # seconds
    extend: bool = False
    added_arms: Sequence[str] = ()
    trackers: Sequence[str] = ()
    callbacks: Sequence[str] = ()  # references to users' classes


class Plan:
    """Options of an experiment, resolved into the config of every trial.

    An experiment consists of runs of Tune. The first run has all trials that the experiment starts
    with, and each extension is another run. A plan describes one run: a new run, or the last run of
    a resumed experiment.

    Raises:
        UsageError, ConfigError: The options contradict each other, a trial is invalid, or a resumed
            experiment was started with different settings.
    """

    def __init__(self, options: Options, only: Collection[str] | None = None) -> None:
        """Resolve the options.

        Args:
            options: The options.
            only: With `--extend`: the arms that may get new trials. None means no restriction.
        """
        self.options = options
        try:
            self.storage = directory_named(options.storage)
        except ValueError as error:
            raise UsageError(f"--storage {shown(options.storage)}: {error}") from None
        if options.name is not None and not re.fullmatch(r"[\w][\w.+-]*", options.name):
            raise UsageError(
                f"--name {shown(options.name)}: must consist of letters, digits and . _ + -, "
                "without slashes"
            )
        if options.resume == "must" and options.name is None:
            raise UsageError("--resume needs --name, the name of the experiment to continue")
        self.name: str = options.name or ""
        stored = self._read_stored()
        if options.resume == "must" and stored is None:
            raise UsageError(f"--resume: {self._not_found()}")
        if options.accept_changed_code and options.resume == "never":
            raise UsageError("--accept-changed-code needs --resume, which continues an experiment")
        self.extending = options.extend
        self._check_extend_options(stored)
        self.stored: dict[str, Any] = stored or {}
        # True if the settings come from a stored experiment.
        self.resuming = stored is not None and (self.extending or options.resume != "never")
        self._option = "--extend" if self.extending else "--resume"  # for messages
        # The extensions so far, as experiment.json describes them.
        self.extensions: list[dict[str, Any]] = self.stored.get("extensions", [])
        if options.until_decided and options.max_seeds is None and not self.resuming:
            self.options = replace(options, max_seeds=MAX_SEEDS)
        self.options = replace(
            self.options,
            added_arms=[arm for text in options.added_arms for arm in text.split(",")],
            trackers=list(dict.fromkeys(options.trackers)),
            callbacks=[*map(absolute, options.callbacks)],
        )
        # SHA-256 of each file that must not have changed since the experiment started, by key.
        self._unchanged: Mapping[str, str] = {}
        if self.resuming:
            self._refuse_state_of_others()  # first, because the state names Python files to load
            self._unchanged = self._files_to_compare()
        self.preset = self._preset()
        # The text that names the space, and the SHA-256 of its file (None if the space ships with
        # the package).
        self.space_source, self.space_digest = self._space_source()
        self.space = self._space()
        if not self.name:
            self.name = f"{self.space.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        self.limits = self._limits()
        self.fixed = self._fixed()
        # Arm -> what this machine lacks to run the arm. A resumed experiment uses the stored
        # mapping, so its arms stay the same. For a new experiment on a cluster, the mapping is
        # empty, because nothing is known yet about the cluster's machines. It is also empty if the
        # options name the arms, because then no arm is left out.
        named = "arm" in self.fixed
        here = {} if named or options.address is not None else self.space.not_available()
        self.not_available: dict[str, str] = (
            self.stored.get("not_available", {}) if self.resuming else here
        )
        if self.resuming:
            self._take_stored_settings()
        # The trials of every arm and seed. `trials` has only the trials of this run, in the order
        # in which they run.
        self.grid = self._trials(self._seeds())
        self.trials = self._of_this_run(only)
        self._check_baseline()
        self._check_until_decided()
        # Key -> SHA-256 of the files that the trials read, as they were when the experiment
        # started. None until the digests are known, and on the first resume of an experiment that
        # an older version started.
        self.inputs: dict[str, str] | None = self.stored.get("inputs") if self.resuming else None
        # Key -> path of the input files that belong to the user. None until the files are read.
        self.own_files: dict[str, str] | None = None
        # SHA-256 of each earlier version of the code files that settings name.
        self.replaced: list[str] = list(self.stored.get("replaced", [])) if self.resuming else []
        # Path -> content of the files that nodes of a cluster lack; empty until the nodes answer.
        self.shipped: dict[str, bytes] = {}
        self.told: list[str] = []  # notes from the checks of trials
        self.memory: str | None = None  # line about the largest trial's memory, once checked

    @property
    def directory(self) -> AnyPath:
        """Directory of the experiment."""
        return self.storage / self.name

    @property
    def run_storage(self) -> AnyPath:
        """Directory that contains the directory of this run."""
        return self.directory / EXTENSIONS if self._number else self.storage

    @property
    def run_name(self) -> str:
        """Name of this run's directory: the experiment's name, or the number of an extension."""
        return str(self._number) if self._number else self.name

    @property
    def run_directory(self) -> AnyPath:
        """Directory of this run. The first run has the directory of the experiment."""
        return self.run_storage / self.run_name

    @property
    def _number(self) -> int:
        return len(self.extensions) + self.extending

    @property
    def max_concurrent(self) -> int:
        """Number of trials that run at the same time. 0 means as many as fit."""
        given = self.limits["max_concurrent"]
        return given if given is not None else int(self.options.scheduler == "fifo")

    @property
    def margin_option(self) -> str | None:
        """The option that gives the margin, or None without a margin."""
        for name in ("margin", "margin_relative"):
            if getattr(self.options, name) is not None:
                return f"--{name.replace('_', '-')}"
        return None

    @property
    def has_state(self) -> bool:
        """Return True if Tune has saved this run at least once."""
        return (self.run_directory / "tuner.pkl").exists()

    def _check_extend_options(self, stored: Mapping[str, Any] | None) -> None:
        """Check the options of an extension.

        Args:
            stored: The description of the experiment with this name, or None.

        Raises:
            UsageError: There is no experiment to extend, or the options contradict each other.
        """
        options = self.options
        if not options.extend:
            if options.added_arms:
                raise UsageError("--arm needs --extend; --set arm=NAME runs only that arm")
            return
        if options.resume != "never":
            raise UsageError(
                "--extend cannot be combined with --resume: --resume continues an unfinished "
                "experiment, and --extend adds trials to a finished one"
            )
        if options.name is None:
            raise UsageError("--extend needs --name, the name of the experiment")
        if stored is None:
            raise UsageError(f"--extend: {self._not_found()}")
        if "planned" not in stored:
            raise UsageError(
                f"--extend: an older version of grpo-trainable started experiment {self.name} and "
                "did not record its trials; start a new experiment"
            )

    def _not_found(self) -> str:
        """Say that this command has not started an experiment with this name."""
        if has_results(self.directory):
            instead = (
                'to run more seeds, call fit() of a new tune.Tuner with another name and "seed": '
                "tune.grid_search([…])"
                if self.options.extend
                else "continue it with tune.Tuner.restore"
            )
            return (
                f"a program with its own Tuner started {self.directory}; {instead}, as "
                "docs/howto/tuner.md shows"
            )
        return (
            f"no experiment {self.name} in {self.storage}; if it is stored elsewhere, add "
            "--storage DIRECTORY"
        )

    def _read_stored(self) -> dict[str, Any] | None:
        """Return the description of the stored experiment with this name, or None."""
        if not self.name:
            return None
        path = self.directory / EXPERIMENT_FILE
        try:
            return json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise UsageError(f"{path}: cannot be read ({_told(error)})") from None

    def _preset(self) -> Preset | None:
        given, before = self.options.preset, self.stored.get("preset")
        if not self.resuming:
            return None if given is None else find_preset(given)
        if given not in (None, before):
            raise UsageError(
                f"--preset {given}: experiment {self.name} was started "
                f"{f'with {before}' if before is not None else 'without it'}"
            )
        return None if before is None else find_preset(before)

    def _space(self) -> SearchSpace:
        """Return the requested space. A preset fills in settings that the arms leave open."""
        if self.preset is None:
            return find_space(self.space_source)
        alone = self.space_source == self.preset.name
        return self.preset.under(self.preset.space if alone else find_space(self.space_source))

    def _space_source(self) -> tuple[str, str | None]:
        """Return the text that names the space, and the SHA-256 of its file.

        The SHA-256 is None if the space ships with this package. On a resume, the file must be the
        same as when the experiment started. This is checked before any code in the file runs. The
        caller has checked that the user owns the experiment.
        """
        source = self.options.space
        if source is None and self.resuming:
            source = self.stored.get("space_source", self.stored["space"])
        if source is None and self.preset is not None:
            source = self.preset.name  # one trial with the preset's settings
        if source is None:
            raise UsageError(
                "--space is missing; --preset grpo trains once, without a search space; valid "
                f"spaces: {', '.join(SPACES)}"
            )
        source = absolute(source)
        file = source_file(source)
        if file is None:
            return source, None
        try:
            digest = digest_of("--space", file)
        except ValueError as error:
            raise UsageError(str(error)) from None
        if self.resuming and digest != self.stored.get("inputs", {}).get(SPACE_INPUT, digest):
            raise UsageError(
                f"{self._option}: {file} has changed since this experiment started; put the file "
                "back as it was at the start, or start a new experiment"
            )
        return source, digest

    def _fixed(self) -> dict[str, Any]:
        """Return the settings that the options fix in every trial, with absolute paths, by key."""
        options = self.options
        checks = self._checks()
        fixed = parse_assignments(options.assignments, checks)
        if options.samples is not None and "rounds" in fixed:
            raise UsageError(
                f"--samples {options.samples} contradicts --set rounds={shown(fixed['rounds'])}"
            )
        for key, option, value in (
            ("rounds", "--iterations", options.iterations),
            ("checkpoint.every", "--checkpoint-every", options.checkpoint_every),
        ):
            if value is None:
                continue
            if fixed.get(key, value) != value:
                raise UsageError(f"{option} {value} contradicts --set {key}={shown(fixed[key])}")
            fixed[key] = value
        nested: dict[str, Any] = {}
        for key, value in fixed.items():
            set_dotted(nested, key, value)
        return flatten(make_absolute(nested, os.getcwd(), checks))

    def _checks(self) -> dict[str, Check]:
        """Return the check of every key that `--set` accepts, including keys of users' tasks."""
        key = "task.name"
        given = [text for text in self.options.assignments if text.split("=")[0].strip() == key]
        fixed = dict(self.stored["fixed"]) if self.resuming else {}
        for text in given:
            fixed |= make_absolute(dict([parse_assignment(text)]), os.getcwd())
        checks: dict[str, Check] = {}
        for name in self._tasks(fixed):
            checks |= self._keys_with(name)
        return checks

    def _tasks(self, fixed: Mapping[str, Any]) -> set[str]:
        """Return the tasks that the arms run if these settings are fixed."""
        key = "task.name"
        if key in fixed:
            return {fixed[key]}
        return {arm.get(key, CHECKS[key].default) for arm in self.space.arms.values()}

    def _keys_with(self, task: str) -> Mapping[str, Check]:
        """Return the check of every key of a trial that runs this task.

        This loads the class of a user's task, but never from a file that has changed since the
        experiment started.
        """
        if not is_reference(task):
            return CHECKS
        if self.resuming and task in self._tasks(self.stored["fixed"]):
            self._compare_task("task.name", task)
        return keys_with(task)

    def _compare_task(self, key: str, task: str) -> None:
        """Check that the file of a user's task has not changed since the experiment started."""
        from grpo_trainable.tasks.input_files import InputChanged, refuse_changed

        source = source_of(task)
        if source is None:
            return
        try:
            refuse_changed(key, Path(source), digest_of(key, source), self._unchanged)
        except (ValueError, InputChanged) as error:
            raise UsageError(f"{self._option}: {error}{self._way_on(error)}") from None

    def _files_to_compare(self) -> dict[str, str]:
        """Return the SHA-256 of each file that a resume must find unchanged, by key.

        The user's code may change until a trial has results, and after that only with
        `accept_changed_code`.
        """
        before = self.stored.get("inputs", {})
        if has_results(self.directory) and not self.options.accept_changed_code:
            return before
        return {key: digest for key, digest in before.items() if key not in self._code}

    @property
    def _code(self) -> set[str]:
        """Keys of those files of the stored experiment that contain the user's code."""
        own = self.stored.get("own_files", {}).items()
        return {key for key, path in own if path.endswith(".py") and key != SPACE_INPUT}

    def _way_on(self, error: Exception) -> str:
        """Return a clause that says how to continue with a changed file, or ""."""
        unreadable = isinstance(error, ValueError)
        if unreadable or str(error).partition(":")[0] not in self._code:
            return ""
        return ", or continue with the changed file: add --accept-changed-code"

    def _seeds(self) -> Sequence[int]:
        if "seed" not in self.fixed:
            return range(self.options.seed, self.options.seed + self.options.num_samples)
        if self.options.num_samples > 1:
            raise UsageError(
                "--num-samples requests several seeds, but --set seed fixes one; drop one of the "
                "two options"
            )
        return (self.fixed["seed"],)

    def _limits(self) -> dict[str, Any]:
        """Return the limits that a resume may change. By default, they keep their values."""
        limits: dict[str, Any] = {
            "max_failures": MAX_FAILURES,
            "max_concurrent": None,
            "budget": None,
        }
        before = self.stored if self.resuming else {}
        for option, default in limits.items():
            given = getattr(self.options, option)
            limits[option] = before.get(option, default) if given is None else given
        return limits

    def description(self) -> dict[str, Any]:
        """Return the settings to store in experiment.json; a resume must have the same settings."""
        return {
            "space": self.space.name,
            "space_source": self.space_source,
            "preset": None if self.preset is None else self.preset.name,
            "question": self.space.asked.to_dict(),
            "fixed": self.fixed,
            "num_samples": self.options.num_samples,
            "seed": self.options.seed,
            "scheduler": self.options.scheduler,
            "samples": self.options.samples,
            "margin": self.options.margin,
            "margin_relative": self.options.margin_relative,
            "baseline": self.options.baseline,
            "until_decided": self.options.until_decided,
            "max_seeds": self.options.max_seeds,
            "trackers": list(self.options.trackers),
            "callbacks": list(self.options.callbacks),
            "not_available": self.not_available,
            "task_defaults": self._task_defaults(),
            "held_out_prompts": self._held_out_prompts(),
            "grpo_trainable": __version__,
        }

    def _task_defaults(self) -> dict[str, dict[str, Any]]:
        """Return the defaults of the settings that users' tasks declare, by task.

        A report shows which settings differ from these defaults. The defaults are stored, because a
        report never loads a user's code.
        """
        names = {trial.task.name for trial in self.trials if trial.task.is_custom}
        return {name: default_settings(name, os.getcwd()) for name in sorted(names)}

    def _held_out_prompts(self) -> int | None:
        """Return the smallest number of prompts that a task of the trials holds out.

        A report advises no larger number of prompts. None if a task does not state its number, or
        if it generates its prompts, because counting them may take long.
        """
        from grpo_trainable.tasks.prompts import build_task
        from grpo_trainable.tasks.task import eval_size, train_size

        trials = {(trial.task, trial.env): trial for trial in self.trials}.values()
        tasks = map(build_task, trials)
        sizes = [None if train_size(task) is None else eval_size(task) for task in tasks]
        known = [size for size in sizes if size is not None]
        return min(known) if known and len(known) == len(sizes) else None

    def _take_stored_settings(self) -> None:
        """Use the stored settings of a resumed experiment, and refuse options that differ."""
        stored = self.stored
        was_file = SPACE_INPUT in stored.get("inputs", {})
        if self.space.name != stored["space"] or was_file != (self.space_digest is not None):
            of = stored.get("space_source", stored["space"])
            raise UsageError(
                f"--space {self.space_source}: experiment {self.name} was started with {of}"
            )
        for key, value in self.fixed.items():
            if stored["fixed"].get(key) != value:
                was = (
                    f"fixed at {shown(stored['fixed'][key])}"
                    if key in stored["fixed"]
                    else "not fixed"
                )
                raise UsageError(
                    f"--set {key}={shown(value)}: {key} was {was} when experiment {self.name} "
                    "started; the settings of an experiment never change. To train a model "
                    "further, export it, and start a new experiment with --set model.path=…"
                )
        for option in (
            *("num_samples", "seed", "scheduler", "samples"),
            *("margin", "margin_relative", "baseline", "until_decided", "max_seeds"),
        ):
            default = getattr(Options(), option)
            given, was = getattr(self.options, option), stored.get(option, default)
            accepted = [default, was]
            if option == "num_samples":
                if self.extending and given > was:
                    continue
                # Also accept the number of seeds in the first command, before any extension.
                accepted.append(len({seed for _, seed in stored.get("planned", ())}))
            if given not in accepted:
                value = "" if given is True else f" {given}"
                more = option == "num_samples" and given > was
                raise UsageError(
                    f"--{option.replace('_', '-')}{value}: experiment {self.name} was started "
                    f"{f'with {was}' if was not in (None, False) else 'without it'}"
                    f"{'; --extend adds seeds after the experiment has ended' if more else ''}"
                )
            self.options = replace(self.options, **{option: was})
        self._take_stored_callbacks()
        self.fixed = stored["fixed"]
        if self.extending and self.options.scheduler != "fifo":
            raise UsageError(
                f"--extend: --scheduler {self.options.scheduler} compared the trials of experiment "
                f"{self.name} with each other, so no trials can be added"
            )

    def _take_stored_callbacks(self) -> None:
        """Use the stored trackers and callbacks, and refuse options that differ."""
        for option in ("trackers", "callbacks"):
            given, was = list(getattr(self.options, option)), self.stored.get(option, [])
            if given not in ([], was):
                before = f"with {' '.join(was)}" if was else "without it"
                raise UsageError(
                    f"--{option.removesuffix('s')} {' '.join(given)}: experiment {self.name} was "
                    f"started {before}"
                )
            self.options = replace(self.options, **{option: was})

    def _check_baseline(self) -> None:
        """Check that the arm to compare with exists.

        Raises:
            UsageError: No trial runs the arm, or no margin is given.
        """
        baseline = self.options.baseline
        if baseline is None:
            return
        if self.options.margin is None and self.options.margin_relative is None:
            raise UsageError(f"--baseline {baseline} needs --margin or --margin-relative")
        arms = list(dict.fromkeys(trial.arm for trial in self.grid))
        if baseline not in arms:
            hint = did_you_mean(baseline, arms) or f"the arms are {', '.join(sorted(arms))}"
            raise UsageError(f"--baseline {shown(baseline)}: no trial runs this arm; {hint}")

    def _check_until_decided(self) -> None:
        """Check that seeds can be added until the arms are decided.

        Raises:
            UsageError: An option is missing, has no effect, or has a wrong value.
        """
        options = self.options
        if not options.until_decided:
            for option, value in (("max-seeds", options.max_seeds), ("budget", options.budget)):
                if value is not None:
                    raise UsageError(f"--{option} needs --until-decided")
            return
        from reports.intervals import MOST_SEEDS
        from reports.margin_tests import FIRST_LOOK

        if options.margin is None and options.margin_relative is None:
            raise UsageError("--until-decided needs --margin or --margin-relative")
        if options.scheduler != "fifo":
            raise UsageError(
                f"--until-decided cannot be combined with --scheduler {options.scheduler}, which "
                "stops trials"
            )
        if "seed" in self.fixed:
            raise UsageError(
                "--until-decided adds seeds, but --set seed fixes one; drop --set seed"
            )
        if len({trial.arm for trial in self.grid}) < 2:
            raise UsageError("--until-decided compares arms, but there is only one arm")
        most = options.max_seeds
        assert most is not None
        if not FIRST_LOOK <= most <= MOST_SEEDS:
            raise UsageError(
                f"--max-seeds {most}: must be an integer in [{FIRST_LOOK}, {MOST_SEEDS}]"
            )
        if options.num_samples > most:
            raise UsageError(f"--num-samples {options.num_samples} exceeds --max-seeds {most}")

    def _trials(self, seeds: Iterable[int]) -> list[GRPOConfig]:
        """Return the trials of every arm and seed, in randomised blocks."""
        self._fetch_models()
        try:
            trials = self._resolved(seeds, self._arms_of_extensions())
            if self.options.added_arms:
                self._refuse_changed_trials(self._resolved(seeds, self._arms_before()), trials)
        except ConfigError as error:
            of_preset = self._of_preset(_key_of(error), self.space.arms)
            raise ConfigError(f"{error}{of_preset}") from None
        return [self._complete(trial) for trial in in_blocks(trials)]

    def _arms_before(self) -> list[str]:
        """Return the arms that earlier extensions added."""
        return [arm for extension in self.extensions for arm in extension["arms"]]

    def _arms_of_extensions(self) -> list[str]:
        """Return the arms that this and earlier extensions add.

        Raises:
            UsageError: An added arm is not in the space.
        """
        for arm in self.options.added_arms:
            self.space.refuse_unknown(arm, f"--arm {shown(arm)}")
        return [*self._arms_before(), *self.options.added_arms]

    def _resolved(self, seeds: Iterable[int], added: Collection[str]) -> list[GRPOConfig]:
        """Return the trials of the experiment's original arms and of the arms in `added`."""
        fixed, without = self.fixed, self.not_available.keys()
        if added:
            started = set(self.space.named(fixed)) or self.space.arms.keys() - without
            fixed = {key: value for key, value in fixed.items() if key != "arm"}
            without = self.space.arms.keys() - started - set(added)
        samples = self.options.samples
        return self.space.trials(fixed, list(seeds), without=without, samples=samples)

    def _refuse_changed_trials(
        self, before: Sequence[GRPOConfig], now: Sequence[GRPOConfig]
    ) -> None:
        """Check that added arms do not change the trials of the other arms.

        With more arms, the rounds in which all arms are evaluated can differ, and so can the arms
        that a fixed setting applies to.
        """
        same = {(trial.arm, trial.seed): flatten(trial.to_dict()) for trial in now}
        for trial in before:
            own = flatten(trial.to_dict())
            found = same.get((trial.arm, trial.seed))
            added = f"--arm {' '.join(self.options.added_arms)}"
            if found is None:
                raise UsageError(f"{added}: has the same settings as arm {trial.arm}")
            changed = [key for key, value in own.items() if found.get(key) != value]
            if changed:
                raise UsageError(
                    f"{added}: would change {changed[0]} of arm {trial.arm} from "
                    f"{shown(own[changed[0]])} to {shown(found.get(changed[0]))}; start a new "
                    "experiment with these arms"
                )

    def _of_this_run(self, only: Collection[str] | None) -> list[GRPOConfig]:
        """Return the trials that this run has, or will have.

        Args:
            only: The arms to which an extension may add trials. If it is None, an extension that
                adds seeds may add trials to all arms, and any other extension only adds its arms.

        Raises:
            UsageError: An extension adds no trial.
        """
        if not self.extending:
            if not self.extensions:
                return self.grid
            planned = {(arm, seed) for arm, seed in self.extensions[-1]["planned"]}
            return [trial for trial in self.grid if (trial.arm, trial.seed) in planned]
        runs = [self.stored, *self.extensions]
        planned = {(arm, seed) for run in runs for arm, seed in run["planned"]}
        if only is None and self.options.num_samples <= self.stored["num_samples"]:
            only = self.options.added_arms  # arms that were decided early still get no more seeds
        new = [trial for trial in self.grid if (trial.arm, trial.seed) not in planned]
        new = [trial for trial in new if only is None or trial.arm in only]
        if new:
            return new
        arms, seeds = ({pair[i] for pair in planned} for i in (0, 1))
        raise UsageError(
            f"--extend: nothing to add, because experiment {self.name} already has "
            f"{plural(len(arms), 'arm')} with {plural(len(seeds), 'seed')}; add seeds with "
            f"--num-samples {len(seeds) + 1} or more, or an arm with --arm ARM"
        )

    def _fetch_models(self) -> None:
        """Download the small files of the arms' models, because defaults depend on them.

        `check` reports a model that cannot be downloaded. `SearchSpace.trials` reports other
        mistakes.
        """
        models: list[Any] = []
        for arm in self.space.arms.values():
            settings: dict[str, Any] = {}
            with suppress(ConfigError):
                for key, value in {**arm, **self.fixed}.items():
                    set_dotted(settings, key, value)
                model = {"model": settings.get("model", {})}
                if model not in models:
                    models.append(model)
                    prepared(model)

    def _of_preset(self, key: str, arms: Iterable[str]) -> str:
        """Return a clause that says that these arms get `key` from the preset, or ""."""
        if self.preset is None or key in self.fixed or key not in self.preset.settings:
            return ""
        value = self.preset.settings[key]
        if any(self.space.arms[arm][key] != value for arm in arms):
            return ""  # an arm does not have the preset's value
        return f"; {key} comes from --preset {self.preset.name}, and --set {key}=… overrides it"

    def _complete(self, trial: GRPOConfig) -> GRPOConfig:
        """Return the trial with all settings of its task filled in."""
        if self.resuming:
            for label, part in trial.parts.items():
                if part.task.is_custom:
                    self._compare_task(f"task.mix/{label}/name", part.task.name)
        with self._naming_arm(trial):
            return with_task_settings(trial, os.getcwd(), given_in=directory_of(self.space_source))

    @contextmanager
    def _naming_arm(self, trial: GRPOConfig) -> Iterator[None]:
        """Name the preset or the arm in an error that begins with a setting of the arm."""
        try:
            yield
        except (UsageError, ConfigError, PluginError) as error:
            key, arm = _key_of(error), self.space.arm_of(trial.arm)
            if key not in self.space.arms[arm].keys() - self.fixed.keys():
                raise
            kind = Missing if isinstance(error, Missing) else UsageError
            of_arm = f" (arm {arm} of {self.space.name})"
            raise kind(f"{error}{self._of_preset(key, [arm]) or of_arm}") from None

    @property
    def files_of_trials(self) -> dict[str, str]:
        """SHA-256, by path, of the files that settings name and that every machine reads."""
        own = self.own_files if self.own_files is not None else self.stored.get("own_files", {})
        digests = self.inputs or {}
        return {path: digests[key] for key, path in own.items() if key != SPACE_INPUT}

    def check(self, *, holds_lock: bool = False) -> None:
        """Check that the trials can read their files and that this machine has what they need.

        The check leaves no file behind and does not start Ray.

        Args:
            holds_lock: True if this command holds the lock of the experiment.

        Raises:
            UsageError: The name of a new experiment is taken, another command is running the
                experiment, an experiment to extend is not finished, the storage cannot be written
                to, a file that a trial reads is missing or has changed, or a trial needs more than
                this machine has.
            PluginError: User-defined code, such as a reward function, cannot be used.
            Missing: The trials are valid, but something that they need is missing.
        """
        try:
            taken = not self.resuming and is_taken(self.directory)
        except OSError as error:  # an object store that does not answer
            raise UsageError(f"--storage {self.storage}: {_told(error)}") from None
        if taken:
            # A directory without a description belongs to a user's own Tuner, or to something else.
            ours = self._read_stored() is not None
            go_on = ", or continue the experiment with --resume" if ours else ""
            raise UsageError(
                f"--name {self.name}: {self.directory} exists; choose another name{go_on}"
            )
        if self.resuming and not holds_lock and is_running(self.directory):
            raise UsageError(
                f"{self._option}: another command is running experiment {self.name}; wait until it "
                "ends"
            )
        if self.extending:
            self._refuse_unfinished()
        if wrong := refusal(self.directory):
            raise UsageError(f"--storage {self.storage}: {wrong}")
        if self.options.scheduler != "fifo":
            from tuning import schedulers  # imports Ray Tune, slowly

            if self.options.scheduler == "pbt":
                schedulers.check_population(self.trials, self.fixed)
            if self.options.scheduler == "asha":
                schedulers.check_comparable(self.trials)
            self._refuse_margin()
        begins = not self.resuming or self.options.added_arms
        if begins and (short := too_short_for_lag(self.trials)):
            if self.margin_option is not None:
                raise UsageError(f"{self.margin_option}: {short}")
            self.told.append(f"note: {short}")
        if self.inputs is not None:
            self._compare_inputs(self._unchanged)
        here = self.options.address is None
        if here:
            nodes = this_machine(self.trials)
            check_resources(self.trials, nodes, "this machine")
            self.check_memory(nodes, machine_bytes(), "this machine")
        self._check_callbacks()
        if self.preset is not None and not self.resuming:
            self._check_preset(self.preset)
        for check, trial in checks_of(self.trials, here=here):
            with self._naming_arm(trial):
                told = check(trial)
            self.told += [line for line in told if line not in self.told]
        if self.inputs is None or self._unchanged != self.inputs or self.options.added_arms:
            self._read_inputs()

    def _check_callbacks(self) -> None:
        """Check that the trackers and the user's callbacks can be used.

        Raises:
            Missing: A tracker's library or login is missing.
            PluginError: A callback cannot be loaded.
        """
        if self.options.callbacks:
            from callbacks.own_callback import own_callback  # imports Tune, slowly

            for reference in self.options.callbacks:
                own_callback(reference)
        if self.options.trackers:
            from callbacks.trackers.tracked_run import TrackerError, refuse_unusable

            for tracker in self.options.trackers:
                try:
                    refuse_unusable(tracker)
                except TrackerError as error:
                    raise Missing(f"--tracker {error}") from None

    def _refuse_margin(self) -> None:
        """Refuse a margin, because the scheduler ends trials early or changes their settings."""
        if self.margin_option is not None:
            raise UsageError(
                f"{self.margin_option} needs --scheduler fifo: {self.options.scheduler} does not "
                "run every arm to its end with its own settings"
            )

    def _refuse_unfinished(self) -> None:
        """Check that every trial of the experiment to extend has ended.

        Raises:
            UsageError: A trial has not ended, or has failed.
        """
        from reports.experiment import ExperimentError, read_experiment
        from reports.report import ReportError
        from reports.stored import at_hand

        try:
            with at_hand(self.directory) as directory:
                experiment = read_experiment(directory)
        except (ExperimentError, ReportError) as error:
            raise UsageError(f"--extend: {error}") from None
        unfinished = [f"{t.label} ({t.status})" for t in experiment.trials if not t.done]
        unfinished += [f"{arm}/{seed} (not started)" for arm, seed in experiment.not_begun]
        if unfinished:
            raise UsageError(
                f"--extend: {plural(len(unfinished), 'trial')} of experiment {self.name} must end "
                f"first, such as {unfinished[0]}; continue with --resume --name {self.name}"
            )

    def _check_preset(self, preset: Preset) -> None:
        """Check that the trials set the files that a preset needs besides its settings.

        Raises:
            Missing: A file is not set. The message is one line.
        """
        for trial in self.trials:
            key = preset.lacks(trial)
            if key is not None:
                raise Missing(
                    f"--preset {preset.name}: {key} is not set, and the problems that ship with "
                    f"this package do not suit the preset; add --set {key}=FILE"
                )

    def check_memory(self, nodes: Nodes, available: int, where: str) -> None:
        """Compare the memory that the trials need with the available memory.

        Without a cluster, this also compares the trials' GPU memory with the GPUs of this machine.

        Args:
            nodes: The nodes that the trials run on.
            available: Number of bytes of main memory of all nodes together.
            where: Name of the machine or cluster, for messages.

        Raises:
            DoesNotFit: The trials need more memory than is available. The message is one line that
                lists the parts.
            UsageError: A policy cannot be used.
        """
        needs = []
        for trial in unlike(self.trials):
            with self._naming_arm(trial):
                needs.append(need_of(trial))
        together = min(len(self.trials), self.max_concurrent or at_once(self.trials, nodes))
        self.memory = compare(needs, together, available, where)
        if self.options.address is None:
            check_gpu_memory(needs)

    def _compare_inputs(self, before: Mapping[str, str]) -> None:
        """Check that the files that trials read have not changed since the experiment started."""
        from grpo_trainable.tasks.input_files import InputChanged, input_digests

        try:
            for trial in self._readers():
                input_digests(trial, before)
        except (ValueError, InputChanged) as error:
            raise UsageError(f"{self._option}: {error}{self._way_on(error)}") from None

    def _read_inputs(self) -> None:
        """Record the digests of the files that trials read, and which files are the user's."""
        from grpo_trainable.tasks.input_files import Input, add_inputs

        read: dict[str, Input] = {}
        for trial in self._readers():
            with self._naming_arm(trial):
                try:
                    add_inputs(read, trial)
                except ValueError as error:
                    raise UsageError(str(error)) from None
        before = self.inputs or {}
        self.inputs = {key: file.sha256 for key, file in read.items()}
        if before and has_results(self.directory):
            now = self.inputs
            self.replaced += [old for key, old in before.items() if now.get(key, old) != old]
        self.own_files = {key: str(file.path) for key, file in read.items() if not file.ships}
        if self.space_digest is not None:
            self.inputs[SPACE_INPUT] = self.space_digest
            self.own_files[SPACE_INPUT] = self.space_source

    def _refuse_state_of_others(self) -> None:
        if not isinstance(self.directory, Path):
            return  # a bucket does not show who may write to it; see docs/security.md
        try:
            refuse_state_of_others(self.directory)
            if self.extensions and not self.extending and self.run_directory.exists():
                refuse_state_of_others(Path(str(self.run_directory)))
        except OSError as error:
            reason = f"{error.filename} cannot be read ({error.strerror})"
            raise UsageError(f"{self._option}: {reason}") from None
        except ValueError as error:
            raise UsageError(f"{self._option}: {error}") from None

    def _readers(self) -> Iterable[GRPOConfig]:
        """Return one trial for each distinct set of input files."""
        from grpo_trainable.tasks.input_files import users_objects

        return {
            (trial.model, trial.task, *users_objects(trial).values()): trial for trial in self.grid
        }.values()

    def prepare_directory(self) -> None:
        """Write the description of the experiment.

        A resume also writes the description. So a directory that is not writable is noticed before
        Ray starts.

        The description names the trials of each run. Once it is written, the trials of this run
        belong to the experiment. If a crash keeps some trials from running, `--resume` runs them.

        Raises:
            UsageError: The description cannot be written, or another command has extended the
                experiment since this command read it.
        """
        if self.inputs is None:
            self._read_inputs()
        if self.extending and self._read_stored() != self.stored:
            raise UsageError(
                f"--extend: another command has changed experiment {self.name} in the meantime; "
                "try again when that command has ended"
            )
        kept = self.stored if self.resuming else {**self.description(), **surroundings()}
        planned = [(trial.arm, trial.seed) for trial in self.trials]
        kept = {**kept, **self.limits, "inputs": self.inputs, "replaced": self.replaced}
        if self.extending:
            arms = list(self.options.added_arms)
            extension = {"arms": arms, "planned": planned, **surroundings()}
            kept["extensions"] = [*self.extensions, extension]
            kept["num_samples"] = self.options.num_samples
            kept["not_available"] = {
                arm: why for arm, why in self.not_available.items() if arm not in arms
            }
        elif not self.extensions:
            kept["planned"] = planned
        if self.own_files is not None:
            kept["own_files"] = self.own_files
        self._write_description(kept)

    def _write_description(self, kept: Mapping[str, Any]) -> None:
        try:
            content = json.dumps(kept, indent=1) + "\n"
            write_file(self.directory, EXPERIMENT_FILE, content.encode())
        except OSError as error:
            raise UsageError(
                f"--storage {self.storage}: cannot write there ({_told(error)})"
            ) from None

    def withdraw(self) -> None:
        """Undo `prepare_directory` for a new experiment or extension in which no trial has begun.

        The name of a new experiment can then be used again.
        """
        if self.has_state:
            return
        if self.extending:
            self._write_description(self.stored)
        elif not self.resuming:
            removed(self.directory, EXPERIMENT_FILE)


def _told(error: Exception) -> str:
    """Return the problem with a file in one line."""
    if isinstance(error, OSError):
        from grpo_trainable.storage.object_store import reason

        return reason(error)
    return " ".join(str(error).split())


def surroundings() -> dict[str, Any]:
    """Return the start time, package versions and machine of an experiment, for its report."""
    packages = {"python": platform.python_version()}
    for name in PACKAGES:
        packages[name] = importlib.metadata.version(name)
    for name in OPTIONAL_PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "packages": packages,
        "machine": {"cpus": usable_cpus(), "platform": platform.platform()},
    }


def _key_of(error: Exception) -> str:
    """Return the setting that an error begins with, or ""."""
    match = re.match(r"[\w.]*", str(error))
    return match[0] if match else ""
