"""Trials of a user's own Tuner: relative paths in their settings, and restarted trials."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from grpo_trainable.config import ConfigError, GRPOConfig, flatten, make_absolute, set_dotted
from reports.records import TrialRecord

# The name that Tune gives a trial's directory: TRAINABLE_ID_NUMBER_SETTINGS_DATE. The number is
# unique within one run of `fit()`, and a restarted trial keeps it.
DIRECTORY = re.compile(
    r"(?P<trainable>.+)_(?P<id>[0-9a-f]{5}_\d{5,}|[0-9a-f]{8})_(?P<tag>\d+(?:_.*)?)"
    r"_(?P<date>\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d)"
)


def with_absolute_paths(trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Return the trials. Trials without rows get absolute paths if the paths are known.

    Rows contain absolute paths. Without rows, the settings are read from params.json, which
    contains the paths as the user wrote them. The rows of another trial with the same relative path
    show which absolute path is meant.
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


def without_restarted(
    trials: Sequence[TrialRecord], forgotten: Collection[str], problems: list[str]
) -> list[TrialRecord]:
    """Leave out each trial that was started again in a new directory.

    `tune.Tuner.restore(…, restart_errored=True)` gives each failed trial a new directory and a new
    id. If Tune's last snapshot lacks a trial after a kill, `restore` begins this trial again, with
    the same id.

    Args:
        trials: The trials of all runs.
        forgotten: Names of trials that no snapshot of Tune contains, although a later run began.
        problems: Receives a line for each trial that is left out.
    """
    newest: dict[tuple[str, str], TrialRecord] = {}
    restarted = {}  # name of a trial -> name of the trial that replaces it
    for parts, trial in sorted(named_by_tune(trials), key=lambda found: found[0]["date"]):
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
        elif trial.name in forgotten:
            problems.append(
                f"{trial.name} {trial.status}. It does not count, because no snapshot of Tune "
                "contains it, and a later run has begun"
            )
        else:
            counted.append(trial)
    return counted


def numbers_of(trials: Sequence[TrialRecord]) -> dict[str, int]:
    """Return a map from each trial's name to the number that Tune gave the trial.

    A restored experiment may run its trials in another order.
    """
    return {trial.name: int(parts["tag"].split("_")[0]) for parts, trial in named_by_tune(trials)}


def named_by_tune(trials: Sequence[TrialRecord]) -> Iterator[tuple[re.Match[str], TrialRecord]]:
    """Yield (parts of the name, trial) for each trial whose directory has a name of Tune's form."""
    for trial in trials:
        if parts := DIRECTORY.fullmatch(trial.name):
            yield parts, trial
