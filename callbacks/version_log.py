"""Records every change of version in learner and generators, and how stale the rollouts were."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict
from typing import Any

import pyarrow as pa

from callbacks.round_writer import RoundWriter
from callbacks.trial_files import (
    cut_parts,
    label,
    read_parts,
    trial_directory,
    write_part,
)
from callbacks.verbosity import is_verbose
from grpo_trainable.protocol.round_records import RoundDetails
from grpo_trainable.protocol.versions import VersionChange

SCHEMA = pa.schema(
    {
        "at": pa.float64(),  # seconds since 1970, by the clock of the trial's process
        "round": pa.int32(),  # the trial's round in which it happened
        "side": pa.string(),  # "generator" or "learner"
        "actor": pa.string(),
        "version": pa.int32(),
        "weights_round": pa.int32(),
        # How the weights reached a generator; null in the learner, which made them.
        "transport": pa.string(),
        "bytes": pa.int64(),
        "publish_s": pa.float64(),  # seconds in the learner, for the snapshot and its checksum
        "transfer_s": pa.float64(),  # seconds until their memory is in the generator
        "load_s": pa.float64(),  # seconds until they are its checked parameters
    }
)


class VersionLogCallback(RoundWriter):
    """Keeps version changes in `versions/part-*.parquet`.

    Prints a line for each change, and the histogram of lags at a trial's end, where that is asked
    for.
    """

    def __init__(self) -> None:
        super().__init__()
        self._versions: dict[tuple[str, str], int] = {}  # (trial, actor) -> what it has

    def cut(self, trial: Any, last: int) -> None:
        cut_parts(trial_directory(trial) / "versions", last)
        # The versions that the old actors had say nothing about the new ones.
        for key in [key for key in self._versions if key[0] == trial.trial_id]:
            del self._versions[key]

    def write(self, trial: Any, iteration: int, details: RoundDetails) -> None:
        rows = [
            {
                "at": change.at,
                "round": details.round,
                "side": change.role,
                "actor": change.actor,
                "version": change.version,
                "weights_round": change.weights_round,
                **({} if change.sync is None else asdict(change.sync)),
            }
            for change in details.versions
        ]
        table = pa.Table.from_pylist(rows, SCHEMA)
        write_part(trial_directory(trial) / "versions", iteration, table)
        verbose = is_verbose(trial)
        for change in details.versions:
            before = self._versions.get((trial.trial_id, change.actor))
            self._versions[trial.trial_id, change.actor] = change.version
            if verbose:
                print(version_line(label(trial), details.round, change, before), flush=True)

    def on_trial_complete(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        super().on_trial_complete(iteration=iteration, trials=trials, trial=trial, **info)
        if is_verbose(trial) and (lags := lag_histogram(trial)):
            groups = ", ".join(f"{lag}: {count}" for lag, count in lags.items())
            print(f"{label(trial):<18} groups by lag at first training: {groups}", flush=True)


def lag_histogram(trial: Any) -> dict[int, int]:
    """The number of groups first trained at each lag, over all that a trial has written."""
    counts: Counter[int] = Counter()
    for part in read_parts(trial, "rollouts", ["cursor", "lag", "first_use"]):
        # A row is a response, and the responses to a prompt share their lag.
        first = {row["cursor"]: row["lag"] for row in part.to_pylist() if row["first_use"]}
        counts.update(first.values())
    return dict(sorted(counts.items()))


def version_line(trial: str, round_: int, change: VersionChange, before: int | None) -> str:
    """A change as a line: `12:03:44.210  async_k1/0  round 7  learner  version 6 -> 7`."""
    clock = time.strftime("%H:%M:%S", time.localtime(change.at))
    milliseconds = int(change.at % 1 * 1000)
    came_from = "" if before is None else f"{before} -> "
    return (
        f"{clock}.{milliseconds:03d}  {trial:<18} round {round_:<4} {change.actor:<12} "
        f"version {came_from}{change.version} (weights of round {change.weights_round})"
    )
