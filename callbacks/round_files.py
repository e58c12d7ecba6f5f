"""Write the responses, gradient steps and version changes of each round to Parquet files."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from callbacks.round_writer import RoundWriter
from callbacks.trial_files import (
    cut_parts,
    is_verbose,
    label,
    read_parts,
    trial_directory,
    write_part,
)
from grpo_trainable.protocol.round_records import RoundDetails, table, version_columns
from grpo_trainable.protocol.versions import VersionChange


class RolloutsCallback(RoundWriter):
    """Writes training responses to `rollouts/`, and evaluation responses to `evaluations/`.

    The held-out prompts are the same in every evaluation, so responses can be compared directly. In
    a verbose trial, two responses are printed after each evaluation.
    """

    def cut(self, trial: Any, last: int) -> None:
        """Remove the Parquet files of the rounds after `last`."""
        for name in ("rollouts", "evaluations"):
            cut_parts(trial_directory(trial) / name, last)

    def write(self, trial: Any, iteration: int, details: RoundDetails) -> None:
        """Write the Parquet files of a round. In a verbose trial, print two examples."""
        directory = trial_directory(trial)
        write_part(directory / "rollouts", iteration, table("rollouts", details.rollouts))
        if not details.evaluations:
            return
        evaluations = table("evaluations", details.evaluations)
        write_part(directory / "evaluations", iteration, evaluations)
        if is_verbose(trial):
            for example in evaluations.slice(0, 2).to_pylist():
                text = " ".join(example["response"].split())
                print(f"{label(trial):<18} {example['prompt']!r} ({example['reward']:g}): {text}")


class GradientStepsCallback(RoundWriter):
    """Writes one row per gradient step to `steps/`, in one Parquet file per round."""

    def cut(self, trial: Any, last: int) -> None:
        """Remove the Parquet files of the rounds after `last`."""
        cut_parts(trial_directory(trial) / "steps", last)

    def write(self, trial: Any, iteration: int, details: RoundDetails) -> None:
        """Write the Parquet file of a round."""
        steps = table("steps", details.steps)
        write_part(trial_directory(trial) / "steps", iteration, steps)


class VersionLogCallback(RoundWriter):
    """Writes each change of an actor's policy version to `versions/part-*.parquet`.

    In a verbose trial, the callback also prints a line for each change, and a histogram of lags
    when the trial ends.
    """

    def __init__(self) -> None:
        super().__init__()
        self._versions: dict[tuple[str, str], int] = {}  # (trial id, actor) -> version

    def cut(self, trial: Any, last: int) -> None:
        """Remove the Parquet files of the rounds after `last`."""
        cut_parts(trial_directory(trial) / "versions", last)
        # The trial has new actors, so the versions of the old actors no longer matter.
        for key in [key for key in self._versions if key[0] == trial.trial_id]:
            del self._versions[key]

    def write(self, trial: Any, iteration: int, details: RoundDetails) -> None:
        """Write the Parquet file of a round. In a verbose trial, print the version changes."""
        versions = table("versions", version_columns(details.versions, details.round))
        write_part(trial_directory(trial) / "versions", iteration, versions)
        verbose = is_verbose(trial)
        for change in details.versions:
            before = self._versions.get((trial.trial_id, change.actor))
            self._versions[trial.trial_id, change.actor] = change.version
            if verbose:
                print(version_line(label(trial), details.round, change, before), flush=True)

    def on_trial_complete(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        """Print the histogram of lags in a verbose trial."""
        super().on_trial_complete(iteration=iteration, trials=trials, trial=trial, **info)
        if is_verbose(trial) and (lags := lag_histogram(trial)):
            groups = ", ".join(f"{lag}: {count}" for lag, count in lags.items())
            print(f"{label(trial):<18} groups by lag at first training: {groups}", flush=True)


def lag_histogram(trial: Any) -> dict[int, int]:
    """Return the number of a trial's groups by the lag at which they were first trained on."""
    counts: Counter[int] = Counter()
    for part in read_parts(trial, "rollouts", ["cursor", "lag", "first_use"]):
        # Each row is a response. The responses to a prompt have the same lag.
        first = {row["cursor"]: row["lag"] for row in part.to_pylist() if row["first_use"]}
        counts.update(first.values())
    return dict(sorted(counts.items()))


def version_line(trial: str, round_: int, change: VersionChange, before: int | None) -> str:
    """Return a change as a line: `12:03:44.210  async_k1/0  round 7  learner  version 6 -> 7`."""
    clock = time.strftime("%H:%M:%S", time.localtime(change.at))
    milliseconds = int(change.at % 1 * 1000)
    came_from = "" if before is None else f"{before} -> "
    return (
        f"{clock}.{milliseconds:03d}  {trial:<18} round {round_:<4} {change.actor:<12} "
        f"version {came_from}{change.version} (weights of round {change.weights_round})"
    )
