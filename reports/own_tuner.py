"""Trials of a user's own Tuner: relative paths, restarted trials, trials that have not begun."""

from __future__ import annotations

import json
import pickletools
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from grpo_trainable.config import ConfigError, GRPOConfig, flatten, make_absolute, set_dotted
from reports.experiment_files import content_of
from reports.records import TrialRecord

# The name that Tune gives a trial's directory: TRAINABLE_ID_NUMBER_SETTINGS_DATE. The number is
# unique within one run of `fit()`, and a restarted trial keeps it.
DIRECTORY = re.compile(
    r"(?P<trainable>.+)_(?P<id>[0-9a-f]{5}_\d{5,}|[0-9a-f]{8})_(?P<tag>\d+(?:_.*)?)"
    r"_(?P<date>\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d)"
)
# Each run of `fit()` and of `restore` stores the state of its trials and of its searcher in files
# whose names contain the time at which the run began.
STATE = re.compile(r"experiment_state-(?P<date>[\d_-]+)\.json")
SEARCHERS = ("basic-variant-state", "search_gen_state")
TOTAL = {"_total_samples", "total_samples"}  # the number of trials, in the searcher's state


def with_absolute_paths(trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Return the trials, in which trials without rows have absolute paths if these are known.

    Rows contain absolute paths. Without rows, the settings are read from params.json, which
    contains the paths as the user wrote them. A trial with rows and the same relative path tells
    which absolute path it means.
    """
    if all(trial.stretches for trial in trials):
        return list(trials)
    known = {}
    for trial in trials:
        if trial.stretches:
            used = flatten(trial.config.to_dict())
            with suppress(ConfigError):  # params.json is damaged
                given = _relative_paths(GRPOConfig.from_dict(trial.params))
                known |= {(key, repr(value)): used[key] for key, value in given}
    return [trial if trial.stretches else _with_paths(trial, known) for trial in trials]


def _with_paths(trial: TrialRecord, known: Mapping[tuple[str, str], object]) -> TrialRecord:
    settings = trial.config.to_dict()
    for key, value in _relative_paths(trial.config):
        set_dotted(settings, key, known.get((key, repr(value)), value))
    return replace(trial, config=GRPOConfig.from_dict(settings))


def _relative_paths(config: GRPOConfig) -> Iterator[tuple[str, object]]:
    """Yield the key and the value of each setting that contains a relative path."""
    settings = config.to_dict()
    absolute = flatten(make_absolute(settings, "/"))
    for key, value in flatten(settings).items():
        if absolute[key] != value:
            yield key, value


def without_restarted(trials: Sequence[TrialRecord], problems: list[str]) -> list[TrialRecord]:
    """Leave out each trial that was started again in a new directory.

    `tune.Tuner.restore(…, restart_errored=True)` gives each failed trial a new directory and a new
    id. After a kill, `restore` begins a trial that Tune's last snapshot lacks again, with the same
    id.

    Args:
        trials: The trials of all runs.
        problems: Receives a line for each trial that is left out.
    """
    newest: dict[tuple[str, str], TrialRecord] = {}
    restarted = {}  # name of a trial -> name of the trial that replaces it
    for parts, trial in sorted(_named_by_tune(trials), key=lambda found: found[0]["date"]):
        number = f"{parts['trainable']} {parts['tag']}"
        by_settings = number, json.dumps(trial.params, sort_keys=True)
        by_id = number, parts["id"]  # after a kill, params.json may be missing
        for older in (newest.get(by_id), newest.get(by_settings)):
            if older is not None and (older.failed or older is newest.get(by_id)):
                restarted[older.name] = trial.name
        newest[by_settings] = newest[by_id] = trial
    counted = []
    for trial in trials:
        if trial.name in restarted:
            problems.append(
                f"{trial.name} {trial.status}. It was started again as "
                f"{restarted[trial.name]}, and only the new trial counts"
            )
        else:
            counted.append(trial)
    return counted


def _named_by_tune(trials: Sequence[TrialRecord]) -> Iterator[tuple[re.Match[str], TrialRecord]]:
    for trial in trials:
        if parts := DIRECTORY.fullmatch(trial.name):
            yield parts, trial


def trials_not_begun(
    root: Path, entries: Collection[str], trials: Sequence[TrialRecord], problems: list[str]
) -> int:
    """Return the number of trials of the last run that have not begun, or 0 if it is unknown.

    Tune creates trials one after another, so only its searcher knows how many will follow.

    Args:
        root: The directory of the experiment.
        entries: The names of the entries of this directory.
        trials: The trials that have begun.
        problems: Receives a line if Tune's files cannot be read.
    """
    dates = [found["date"] for name in entries if (found := STATE.fullmatch(name))]
    if not dates:
        return 0
    date = max(dates)
    content = content_of(root, [f"experiment_state-{date}.json"], problems)
    ended, waiting = set(), set()
    try:
        for text, _ in json.loads(content or b"{}").get("trial_data", ()):
            trial = json.loads(text)
            over = trial["status"] in ("TERMINATED", "ERROR")
            (ended if over else waiting).add(trial["relative_logdir"] or trial["trial_id"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        problems.append(
            f"experiment_state-{date}.json is damaged, so trials that have not begun do not count"
        )
        return 0
    # Trials of an earlier run with the same name do not belong to the last run.
    begun = {trial.name for trial in trials if trial.name in waiting}
    begun |= {trial.name for parts, trial in _named_by_tune(trials) if parts["date"] >= date}
    files = [f"{name}-{date}.json" for name in SEARCHERS if f"{name}-{date}.json" in entries]
    states = [content_of(root, [name], problems) for name in files]
    planned = [_total_in(state) for state in states if state is not None]
    return max(len(ended | waiting | begun), *planned, 0) - len(ended | begun)


def _total_in(pickled: bytes) -> int:
    """Return the number of trials in the pickled state of a searcher, or 0 if it has no limit.

    The state is not unpickled, because unpickling can run any code.
    """
    key = None
    with suppress(ValueError):  # damaged
        for opcode, value, _ in pickletools.genops(pickled):
            if key in TOTAL and isinstance(value, int):
                return value if value < sys.maxsize else 0  # `num_samples=-1`
            key = key if opcode.name == "MEMOIZE" else value
    return 0
