"""Read an experiment from its directory: the trials, their rows, and what is missing or damaged.

This module imports neither Ray nor torch, runs no code from the experiment and unpickles nothing.
So it is safe to read anyone's experiment, even while the experiment runs or after it was killed.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_trainable.config import ConfigError, GRPOConfig, arm_and_seed, flatten
from grpo_trainable.storage.checkpointing import ASIDE, CHECKPOINT
from grpo_trainable.telemetry.metrics import COPIED_FROM
from grpo_trainable.text import plural, without_module
from reports import EXPERIMENT_FILE, EXTENSIONS, experiment_files
from reports.experiment_files import content_of, name_of, one_line
from reports.own_tuner import DIRECTORY, numbers_of, with_absolute_paths, without_restarted
from reports.population import groups_of_donors, short_value
from reports.records import (
    MAX_NUMBER,
    MIN_NUMBER,
    NO_ERROR,
    ExperimentRecord,
    Extension,
    Stretch,
    TrialRecord,
)
from reports.tune_state import TuneState, tune_state
from search_spaces import SPACES
from search_spaces.search_space import MAX_LABEL, Question

# Files and directory that a report writes. A report never replaces a link that has such a name.
REPORT_FILES = ("report.html", "report.json", "plots")

MAX_ROUND = 1 << 31
MOST_REASONS = 3  # maximum number of left-out trials that an error names
LEFT_OUT = "left out, because its config cannot be used"
OF_RLLIB = "it is a config of RLlib, and trials of RLlib have no report; use GRPOTrainable instead"

# First round of a stretch (rounds with the same settings), the settings, and the trial that was
# copied at the start of the stretch. The last entry is None if no trial was copied.
Begun = tuple[int, dict[str, Any], Any]


class ExperimentError(ValueError):
    """The directory contains no experiment; the message is one line."""


def read_experiment(directory: Path) -> ExperimentRecord:
    """Read an experiment without its Parquet files, which `parquet_reader.read_files` reads.

    Raises:
        ExperimentError: The directory does not exist, or contains no experiment.
    """
    if not directory.exists():
        raise ExperimentError(f"{directory}: does not exist")
    if not directory.is_dir():
        raise ExperimentError(f"{directory}: is not a directory")
    try:
        entries = experiment_files.entries(directory)
    except OSError as error:
        raise ExperimentError(f"{directory}: cannot be read ({error.strerror})") from None
    if not entries:
        raise ExperimentError(f"{directory}: is empty")
    problems: list[str] = []
    described = EXPERIMENT_FILE in entries
    description = _read_object(directory, (EXPERIMENT_FILE,), problems) if described else {}
    extensions = _extensions(description, problems)
    planned = _planned(description.get("planned", ()), "planned", problems)
    trials, not_begun = _read_run(directory, (), entries, planned, problems)
    for number, extension in enumerate(extensions, start=1):
        run = (EXTENSIONS, str(number))
        own = _entries_of_run(directory, run, problems)
        more, left = _read_run(directory, run, own, extension.planned, problems)
        trials += more
        not_begun += left
    if not described and not trials:
        if any(DIRECTORY.fullmatch(name) for name in entries) and not any(
            LEFT_OUT in problem for problem in problems
        ):
            raise ExperimentError(f"{directory}: no trial has begun yet")
        if left_out := [problem for problem in problems if LEFT_OUT in problem]:
            raise ExperimentError(
                f"{directory}: no trial can be used; {_why_none(left_out, entries)}"
            )
        raise ExperimentError(
            f"{directory}: is not an experiment: it has neither {EXPERIMENT_FILE} nor a trial"
        )
    question = _question(description, problems)
    order = {arm: place for place, arm in enumerate(question.arms if question else ())}
    trials.sort(key=lambda t: (order.get(t.config.arm, len(order)), t.config.arm, t.config.seed))
    state = TuneState()
    if not described:
        state = tune_state(directory, entries, trials, problems)
        trials = without_restarted(trials, state.forgotten, problems)
        trials = with_absolute_paths(trials)
        numbers = {} if state.several_runs else numbers_of(trials)
        trials.sort(key=lambda trial: (numbers.get(trial.name, math.inf), _first_reported(trial)))
    members = description.get("scheduler") == "pbt" or any(trial.copied for trial in trials)
    return ExperimentRecord(
        directory=directory,
        own_tuner=not described,
        description=description,
        question=question,
        trials=as_population(trials) if members else told_apart(trials),
        not_begun=not_begun,
        waiting=state.waiting,
        several_runs=state.several_runs,
        extensions=extensions,
        problems=problems,
    )


def _why_none(left_out: Sequence[str], entries: Mapping[str, str]) -> str:
    """Return, in one line, the reasons why no trial of a user's own Tuner can be used.

    Args:
        left_out: A line for each trial with unusable settings. Each line begins with the trial's
            name.
        entries: name -> kind of each entry of the experiment's directory.
    """
    reasons = list(left_out[:MOST_REASONS])
    if len(left_out) > MOST_REASONS:
        reasons.append(f"{plural(len(left_out) - MOST_REASONS, 'more trial')} left out")
    waiting = [
        name
        for name, kind in entries.items()
        if kind == "directory"
        and DIRECTORY.fullmatch(name)
        and not any(line.startswith(name) for line in left_out)
    ]
    if waiting:
        reasons.append(f"not begun: {plural(len(waiting), 'trial')}")
    return "; ".join(reasons)


def _entries_of_run(root: Path, run: Sequence[str], problems: list[str]) -> dict[str, str]:
    """Return the entries of an extension's directory; empty before Tune starts the extension."""
    try:
        return experiment_files.entries(root, *run)
    except FileNotFoundError:
        return {}
    except OSError as error:
        problems.append(f"{'/'.join(run)} cannot be read ({error.strerror})")
        return {}


def _read_run(
    root: Path,
    run: Sequence[str],
    entries: Mapping[str, str],
    planned: Sequence[tuple[str, int]],
    problems: list[str],
) -> tuple[list[TrialRecord], list[tuple[str, int]]]:
    """Read the trials of one run of Tune: the first run, or an extension.

    Args:
        root: The directory of the experiment.
        run: The components of the path from `root` to the directory of the run.
        entries: name -> kind of each entry of the run's directory.
        planned: The arm and the seed of each trial.
        problems: Receives a line for each thing that cannot be read.

    Returns:
        The trials, and the arm and the seed of each planned trial without a directory.
    """
    trials = []
    for name, kind in entries.items():
        if kind == "directory":
            trial = _read_trial(root, run, name, problems)
            if trial is not None:
                trials.append(trial)
        elif kind == "link" and name not in (EXPERIMENT_FILE, *REPORT_FILES):
            problems.append(f"{'/'.join((root.name, *run, name))} is a link; not followed")
    return trials, _not_begun(planned, entries)


def _question(description: Mapping[str, Any], problems: list[str]) -> Question | None:
    """Return the question of the search space, as stored when the experiment started."""
    if "question" not in description:  # an old version stored only the name of the space
        space = SPACES.get(str(description.get("space")))
        return None if space is None else space.asked
    try:
        return Question.from_dict(description["question"])
    except ValueError as error:
        problems.append(f"{EXPERIMENT_FILE}: question: {error}")
        return None


def _extensions(description: Mapping[str, Any], problems: list[str]) -> list[Extension]:
    """Return the extensions in experiment.json, in order."""
    extensions = description.get("extensions", [])
    if not isinstance(extensions, list) or not all(isinstance(own, dict) for own in extensions):
        problems.append(f"{EXPERIMENT_FILE}: extensions: not a list of objects")
        return []
    return [
        Extension(
            started=_text(own.get("started")),
            planned=_planned(own.get("planned"), f"extensions: {number}: planned", problems),
        )
        for number, own in enumerate(extensions, start=1)
    ]


def _planned(value: Any, key: str, problems: list[str]) -> list[tuple[str, int]]:
    """Return the arm and the seed of each planned trial, as experiment.json lists them."""
    try:
        planned = [(arm, seed) for arm, seed in value]
        if not all(type(arm) is str and type(seed) is int for arm, seed in planned):
            raise TypeError
        return planned
    except (TypeError, ValueError):
        problems.append(f"{EXPERIMENT_FILE}: {key}: not a list of arms and seeds")
        return []


def _not_begun(
    planned: Sequence[tuple[str, int]], entries: Mapping[str, str]
) -> list[tuple[str, int]]:
    """Return the arm and the seed of each planned trial without a directory, in the plan's order.

    Args:
        planned: The arm and the seed of each trial of a run.
        entries: name -> kind of each entry of the run's directory. A trial's directory is named
            ARM-SEED-ID. It keeps this name even if a scheduler gives the trial different settings.
    """
    begun = Counter(
        name.rpartition("-")[0] for name, kind in entries.items() if kind == "directory"
    )
    left = []
    for arm, seed in planned:
        if begun[f"{arm}-{seed}"]:
            begun[f"{arm}-{seed}"] -= 1
        else:
            left.append((arm, seed))
    return left


def as_population(trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Put all members of a population into one arm.

    The settings of a member change when it copies another member, so no single configuration
    describes the member.
    """
    arms = " and ".join(dict.fromkeys(trial.config.arm for trial in trials))
    label = f"{arms} (population of {len(trials)})"
    members = {trial.name: trial for trial in trials}
    return [
        replace(trial, arm=label, member=True, groups_of_donors=groups_of_donors(trial, members))
        for trial in trials
    ]


def told_apart(trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Add to each arm's label the settings, other than the seed, in which its trials differ.

    For example, if a grid search defines no arms, all its trials have the same arm but different
    settings.
    """
    settings: dict[str, list[dict[str, Any]]] = {}
    for trial in trials:
        settings.setdefault(trial.config.arm, []).append(flatten(trial.config.to_dict()))
    labels = {arm: iter(_labels(arm, own)) for arm, own in settings.items()}
    return [replace(trial, arm=next(labels[trial.config.arm])) for trial in trials]


def _labels(arm: str, settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the label of each trial of an arm, in order.

    A label lists the settings in which the trials differ. If a label would be too long, or if
    different settings would give equal labels, each combination of settings gets a number instead.

    Args:
        arm: The name of the arm in the trials' settings.
        settings: The settings of each trial, by dotted key.
    """
    keys = [
        key
        for key in dict.fromkeys(key for own in settings for key in own)
        if key != "seed" and any(own.get(key) != settings[0].get(key) for own in settings)
    ]
    if not keys:
        return [arm] * len(settings)
    labels = [
        f"{arm} ({', '.join(f'{key}={short_value(own[key])}' for key in keys if key in own)})"
        for own in settings
    ]
    combinations = [repr([own.get(key) for key in keys]) for own in settings]
    different = list(dict.fromkeys(combinations))
    if max(map(len, labels)) <= MAX_LABEL and len(set(labels)) == len(different):
        return labels
    return [f"{arm} {different.index(own) + 1}" for own in combinations]


def _first_reported(trial: TrialRecord) -> float:
    """Return the time of a trial's first row, in seconds since 1970."""
    return trial.rows[0].get("timestamp", math.inf) if trial.rows else math.inf


def _read_trial(
    root: Path, run: Sequence[str], name: str, problems: list[str]
) -> TrialRecord | None:
    """Return the trial in a directory, or None if there is no trial or its config is unusable.

    Args:
        root: The directory of the experiment.
        run: The components of the path from `root` to the directory of the run.
        name: The name of the trial's directory.
        problems: Receives a line if there is no usable trial.
    """
    path = (*run, name)
    directory, where = root.joinpath(*path), "/".join(path)
    own: list[str] = []
    try:
        entries = experiment_files.entries(root, *path)
    except OSError as error:
        problems.append(f"{where} cannot be read ({error.strerror})")
        return None
    if not {"params.json", "result.json"} & entries.keys():
        return None
    params = _read_object(root, (*path, "params.json"), own)
    unreadable = own[:]
    rows, ended, begun, id_ = _read_rows(root, path, own)
    stretches = _stretches(begun, f"{where}/result.json", own)
    if stretches and begun[0][1].keys() >= {"arm", "seed"}:
        # A trial that copies another trial takes over that trial's settings, including the seed.
        first, latest = stretches[0].config, stretches[-1].config
        config = replace(latest, arm=first.arm, seed=first.seed)
        used = [f"{problem}; the settings were read from result.json" for problem in unreadable]
        own[: len(unreadable)] = used
    else:
        try:
            if unreadable:
                raise ConfigError(unreadable[0])
            config = GRPOConfig.from_dict(params)
        except ConfigError as error:
            reason = OF_RLLIB if "num_env_runners" in params else error
            label = arm_and_seed(params)
            named = where if label is None else f"{where} ({label})"
            problems.append(f"{named}: {LEFT_OUT} ({reason})")
            return None
    content = content_of(root, (*path, "error.txt"), own)
    error = None if content is None else content.decode("utf-8", errors="replace")
    for entry, kind in entries.items():
        if ASIDE.fullmatch(entry) and kind == "directory":
            own += _said_of_set_aside(root, path, entry)
    if entries.get("trace.json") == "link":
        own.append(f"{where}/trace.json is a link; not followed")
    return TrialRecord(
        name=name,
        directory=directory,
        run=run,
        params=params,
        config=config,
        stretches=stretches,
        arm=config.arm,
        tune_name=None if "arm" in params else _tune_name(name, id_),
        rows=rows,
        ended=ended,
        error=None if error is None else _last_line(error),
        error_at=None if error is None else _last_failure(error),
        has_trace=entries.get("trace.json") == "file",
        problems=own,
    )


def _said_of_set_aside(root: Path, path: Sequence[str], name: str) -> list[str]:
    """Say why a trial set files aside; empty if the directory with these files is empty.

    Args:
        root: The directory of the experiment.
        path: The components of the path from `root` to the trial's directory.
        name: The name of the directory with the files.
    """
    where = "/".join(path)
    aside = f"{where}/{name}"
    try:
        found = experiment_files.entries(root, *path, name)
    except OSError as error:
        return [f"{aside} cannot be read ({error.strerror})"]
    if not found:
        return []
    if all(CHECKPOINT.fullmatch(entry) for entry in found):
        return [f"{where}: the trial did not continue from the checkpoints in {aside}"]
    return [
        f"{where}: no checkpoint could be used, so the trial started again from round 0; its "
        f"earlier files are in {aside}"
    ]


def _tune_name(directory: str, id_: str) -> str:
    """Return the name that Tune gave a trial, from the name of the trial's directory."""
    before, found, _ = directory.partition(id_ or directory)
    return before + found


def _read_object(root: Path, names: Sequence[str], problems: list[str]) -> dict[str, Any]:
    """Return the JSON object in a file. On failure, return {} and add a line to `problems`."""
    content = content_of(root, names, problems, needed=True)
    if content is None:
        return {}
    where = name_of(root, names)
    try:
        text = content.decode("utf-8")
        value = json.loads(text, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        problems.append(f"{where} cannot be read ({one_line(error)})")
        return {}
    if not isinstance(value, dict):
        problems.append(f"{where} does not contain a JSON object")
        return {}
    return value


def _finite(text: str) -> float:
    """Parse a finite number.

    Python's JSON also reads `NaN`, `Infinity` and 1e999, but a report cannot contain them.

    Raises:
        ValueError: The number is not finite.
    """
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


def _read_rows(
    root: Path, path: Sequence[str], problems: list[str]
) -> tuple[list[dict[str, float]], bool, list[Begun], str]:
    """Return the rows of result.json, and facts about the trial that the rows contain.

    A trial that was retried or resumed continues from its last checkpoint and appends rows. So a
    row replaces all rows above it that belong to the same round or to a later one.

    Returns:
        The rows, a flag that is True if the last row ends the trial, the starts of the trial's
        stretches, and the trial's id.
    """
    names = (*path, "result.json")
    where = "/".join(names)
    content = content_of(root, names, problems)
    lines = [] if content is None else content.splitlines()
    rows: list[dict[str, float]] = []
    begun: list[Begun] = []
    unusable: dict[str, str] = {}
    done, id_ = False, ""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
            round_ = values["training_iteration"]
            if type(round_) is not int or not 1 <= round_ < MAX_ROUND:
                raise ValueError
            numbers = {
                name: 0.0 if abs(value) < MIN_NUMBER else float(value)
                for name, value in values.items()
                if isinstance(value, int | float) and not isinstance(value, bool)
            }
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            cut = "half-written" if number == len(lines) else "damaged"
            problems.append(f"{where}: line {number} of {len(lines)} is {cut} and was skipped")
            continue
        for name, value in numbers.items():
            if not abs(value) < MAX_NUMBER:
                text = f"{where}: {name} is {value}, first in round {round_}"
                unusable.setdefault(name, text)
        while rows and rows[-1]["training_iteration"] >= round_:
            rows.pop()
        while begun and begun[-1][0] >= round_:
            begun.pop()
        settings, donor = values.get("config"), values.get(COPIED_FROM)
        if isinstance(settings, dict) and (not begun or donor or settings != begun[-1][1]):
            begun.append((round_, settings, donor))
        rows.append({name: value for name, value in numbers.items() if abs(value) < MAX_NUMBER})
        done, id_ = values.get("done") is True, str(values.get("trial_id", ""))
    problems += unusable.values()
    return rows, done, begun, id_


def _stretches(begun: Sequence[Begun], where: str, problems: list[str]) -> list[Stretch]:
    """Return the stretches of a trial; empty if the settings of any stretch cannot be used.

    If a newer version of this package resumed the trial, only the rows since the resume have the
    settings that the newer version added. In earlier rows, these settings get their defaults, so
    consecutive rows with equal configs belong to one stretch.
    """
    stretches: list[Stretch] = []
    try:
        for round_, settings, donor in begun:
            config, copied_from = GRPOConfig.from_dict(settings), _text(donor)
            if copied_from or not stretches or config != stretches[-1].config:
                stretches.append(Stretch(first=round_, config=config, copied_from=copied_from))
        return stretches
    except ConfigError as error:
        if len(begun) > 1:
            problems.append(f"{where}: the settings of the trial's rounds cannot be used ({error})")
        return []


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _last_line(error: str) -> str:
    lines = error.strip().splitlines()
    return without_module(lines[-1].strip()) if lines else NO_ERROR


def _last_failure(error: str) -> float | None:
    """Return the time of the last failure that Tune recorded, in seconds since 1970, or None."""
    times = re.findall(r"^Failure # \d+ \(occurred at ([\d_-]+)\)", error, re.MULTILINE)
    try:
        return time.mktime(time.strptime(times[-1], "%Y-%m-%d_%H-%M-%S"))
    except (ValueError, IndexError, OverflowError):
        return None
