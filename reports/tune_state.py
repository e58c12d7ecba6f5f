"""The state of Tune in the experiment of a user's own Tuner: trials that have not begun.

Each run of `fit()` and of `restore` stores the state of its trials and of its searcher in files
whose names contain the time at which the run began. Tune creates trials one after another, so only
the searcher knows how many will follow.
"""

from __future__ import annotations

import json
import pickletools
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from reports.experiment_files import content_of
from reports.own_tuner import named_by_tune
from reports.records import TrialRecord

SNAPSHOT = re.compile(r"experiment_state-(?P<date>[\d_-]+)\.json")
# Start of the name of a searcher's file -> two keys: the first for the number of trials, the second
# for the flag that says that no trial will follow.
SEARCHERS = {
    "basic-variant-state": ("_total_samples", "_finished"),
    "search_gen_state": ("total_samples", "finished"),
}


@dataclass(frozen=True, kw_only=True)
class TuneState:
    """The trials of a user's own Tuner, as far as Tune knows them."""

    waiting: int | None = 0  # number of trials that have not begun; None if unknown
    several_runs: bool = False  # True if `fit()` ran several times under the experiment's name
    # Names of trials that no snapshot contains, although a later run has begun. After a kill,
    # `restore` does not know such trials, and begins them again.
    forgotten: Collection[str] = ()


@dataclass(frozen=True)
class _Snapshot:
    """The trials of one run."""

    date: str  # local time at which the run began, as in the names of files
    started: float  # the same time in seconds since 1970
    statuses: Mapping[str, str]  # name of a trial's directory -> status


def tune_state(
    root: Path, entries: Collection[str], trials: Sequence[TrialRecord], problems: list[str]
) -> TuneState:
    """Read the state of Tune, without unpickling.

    Args:
        root: The directory of the experiment.
        entries: The names of the entries of this directory.
        trials: The trials that have begun.
        problems: Receives a line for each of Tune's files that cannot be read.
    """
    names = [name for name in entries if SNAPSHOT.fullmatch(name)]
    read = {name: _snapshot(root, name, problems) for name in names}
    known = [own for own in read.values() if own is not None]
    if not names:
        return TuneState()
    if read[max(names)] is None:
        return TuneState(waiting=None)
    *earlier, last = sorted(known, key=lambda own: own.started)
    # A trial that has ended belongs to all later snapshots of its run.
    several = len(known) < len(names) or any(
        status == "TERMINATED" and name not in last.statuses
        for own in earlier
        for name, status in own.statuses.items()
    )
    ended = {name for name, own in last.statuses.items() if own in ("TERMINATED", "ERROR")}
    # The snapshot may be older than the newest trials.
    begun = {trial.name for trial in trials if trial.name in last.statuses}
    dates = {trial.name: parts["date"] for parts, trial in named_by_tune(trials)}
    begun |= {name for name, date in dates.items() if date >= last.date}
    stored = {name for own in known for name in own.statuses}
    planned = _planned(root, entries, last.date, problems)
    if planned is None:
        return TuneState(waiting=None, several_runs=several)
    created = len(begun | last.statuses.keys())
    return TuneState(
        waiting=max(created, planned) - len(ended | begun),
        several_runs=several,
        # If the snapshot of a trial's own run cannot be read, the trial may be in that snapshot.
        forgotten={
            name
            for name, date in dates.items()
            if name not in stored | begun and any(own.date <= date for own in known)
        }
        if len(known) == len(names)
        else (),
    )


def _snapshot(root: Path, name: str, problems: list[str]) -> _Snapshot | None:
    content = content_of(root, [name], problems)
    if content is None:
        return None
    try:
        stored = json.loads(content)
        trials = [json.loads(text) for text, _ in stored["trial_data"]]
        statuses = {own["relative_logdir"] or own["trial_id"]: own["status"] for own in trials}
        started = float(stored["stats"]["start_time"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        problems.append(f"{name}: damaged snapshot of Tune")
        return None
    found = SNAPSHOT.fullmatch(name)
    assert found is not None
    return _Snapshot(found["date"], started, statuses)


def _planned(root: Path, entries: Collection[str], date: str, problems: list[str]) -> int | None:
    """Return the total number of trials that the searcher of a run will create.

    The result is 0 in three cases: the number of trials has no limit, no further trial will follow,
    or the searcher stores nothing. None if the stored number cannot be read.
    """
    for start, (total, finished) in SEARCHERS.items():
        name = f"{start}-{date}.json"
        if name not in entries:
            continue
        content = content_of(root, [name], problems)
        found = {} if content is None else _values(content, (total, finished))
        planned = found.get(total)
        if not isinstance(planned, int):
            problems.append(f"{name}: the number of trials cannot be read")
            return None
        if found.get(finished) is True or planned >= sys.maxsize:  # `num_samples=-1`
            return 0
        return planned
    return 0


def _values(pickled: bytes, keys: Collection[str]) -> dict[str, object]:
    """Return the first value after each key in a pickle, if it is a number or a boolean.

    The pickle is not loaded, because loading it can run any code.
    """
    found: dict[str, object] = {}
    key = None
    with suppress(ValueError):  # damaged
        for opcode, value, _ in pickletools.genops(pickled):
            if opcode.name in ("MEMOIZE", "FRAME"):
                continue
            value = {"NEWTRUE": True, "NEWFALSE": False}.get(opcode.name, value)
            if key is not None and key in keys and isinstance(value, int):
                found.setdefault(key, value)
            key = value if isinstance(value, str) else None
    return found
