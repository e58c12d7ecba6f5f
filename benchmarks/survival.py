"""An experiment in which a fault strikes a trial, and the checks that the trial lost nothing."""

from __future__ import annotations

import csv
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, Any

import psutil
from measure import ROOT

from grpo_trainable.storage.checkpointing import MANIFEST, STATE
from grpo_trainable.telemetry.metrics import NAMES, TIMED

ROUNDS, CHECKPOINT_EVERY = 16, 4
FIRST, LAST = 3, 12  # a fault strikes between these rounds
LONGEST_S = 240.0
ROLES = ("Generator", "Learner", "Colocated", "DetailedGRPO")
SETTINGS = {
    "eval.prompts": 8,
    "eval.samples": 1,
    "eval.every": 4,
    "rollout.prompts": 4,
    "rollout.max_new_tokens": 24,
}
# These metrics show the fault, so they may differ from the metrics of an uninterrupted run.
OF_THE_FAULT = ("count/redispatched", "count/checkpoint_failures", "fleet/generators")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    survived: bool
    happened: str  # one line about the fault
    recovered_s: float | None = None  # longest time without a new row after the fault
    rounds_repeated: int | None = None
    prompts_asked_again: int | None = None
    exact: bool | None = None  # equal to an uninterrupted run, bit for bit; None: not promised


@dataclass(frozen=True)
class Fault:
    name: str
    repeats: int
    strike: Callable[[random.Random, int], Outcome]  # (random draws, number of the repeat)


class Lost(Exception):
    """The experiment did not survive the fault; the message says why."""


class Experiment:
    """One trial of `async_vs_sync`, run with the same command that users run."""

    rounds, checkpoint_every = ROUNDS, CHECKPOINT_EVERY
    longest_s = LONGEST_S  # time limit for each wait

    def __init__(
        self, storage: Path, arm: str, kept_in: str | None = None, **settings: Any
    ) -> None:
        """Make the commands that start and resume the trial.

        Args:
            storage: the local directory of the files.
            arm: the arm of `async_vs_sync`.
            kept_in: the value of --storage, if `storage` only holds a copy of the files.
            settings: further settings of the trial.
        """
        self.arm, self.settings = arm, settings
        self.directory = storage / "faults"
        script = str(ROOT / "launch" / "tune.py")
        where = ["--name", "faults", "--storage", kept_in or str(storage)]
        self.resume_command = [sys.executable, script, "--resume", "must", *where]
        pairs = {"arm": arm, **SETTINGS, **settings}
        options = [part for key, value in pairs.items() for part in ("--set", f"{key}={value}")]
        self.command = [
            *(sys.executable, script, "--space", "async_vs_sync", *where),
            *("--iterations", str(self.rounds)),
            *("--checkpoint-every", str(self.checkpoint_every), *options),
        ]

    @property
    def trial(self) -> Path:
        (path,) = self.directory.glob("*/result.json")
        return path.parent

    def rows(self) -> list[dict[str, Any]]:
        """Return the complete lines of the trial's result.json."""
        for path in self.directory.glob("*/result.json"):
            return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
        return []

    def start(self) -> Running:
        return Running(self, self.command)

    def resume(self) -> str:
        """Resume the trial, wait for its end, and return the output.

        Raises:
            Lost: The command did not end with status 0.
        """
        with Running(self, self.resume_command) as running:
            return running.ends_well()

    def launch(self, command: Sequence[str], log: IO[bytes]) -> subprocess.Popen[Any]:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def family(self, command: int) -> list[psutil.Process]:
        """Return the processes of the trial, given the command's process id."""
        return psutil.Process(command).children(recursive=True)

    def uninterrupted(self) -> tuple[Any, ...]:
        """Return rows and checkpoint digests of the same trial without a fault."""
        return uninterrupted(self.arm, tuple(sorted(self.settings.items())))


class Running:
    """The command as a process, which is killed on exit if it is still running."""

    def __init__(self, experiment: Experiment, command: Sequence[str]) -> None:
        self.experiment = experiment
        self._log = TemporaryFile()  # noqa: SIM115  # closed on exit
        self.process = experiment.launch(command, self._log)

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._log.close()

    def printed(self) -> str:
        """Return the output of the command so far."""
        return os.pread(self._log.fileno(), 1 << 24, 0).decode()

    def wait_for(self, condition: Callable[[], Any], step_s: float = 0.02) -> Any:
        longest_s = self.experiment.longest_s
        end = time.monotonic() + longest_s
        while not (found := condition()):
            if self.process.poll() is not None:
                raise Lost(f"the command ended too early: {self.printed()[-300:]}")
            if time.monotonic() > end:
                raise Lost(f"waited {longest_s:g} s without success: {self.printed()[-300:]}")
            time.sleep(step_s)
        return found

    def wait_for_rounds(self, rounds: int) -> None:
        self.wait_for(lambda: len(self.experiment.rows()) >= rounds)

    def family(self) -> list[psutil.Process]:
        return self.experiment.family(self.process.pid)

    def process_of(self, role: str) -> psutil.Process:
        for process in self.family():
            if is_ours(process, role):
                return process
        raise Lost(f"no process of {role} was found")

    def output(self) -> str:
        """Wait for the end of the command, and return its output."""
        try:
            self.process.wait(timeout=self.experiment.longest_s)
        except subprocess.TimeoutExpired:
            told = self.printed()[-300:]
            raise Lost(f"did not end within {self.experiment.longest_s:g} s: {told}") from None
        return self.printed()

    def ends_well(self) -> str:
        text = self.output()
        if self.process.returncode != 0:
            raise Lost(f"status {self.process.returncode}: {text[-300:]}")
        return text


def is_ours(process: psutil.Process, role: str | None = None) -> bool:
    try:
        title = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return any(f"ray::{name}" in title for name in ((role,) if role else ROLES))


def none_left(family: Sequence[psutil.Process]) -> None:
    """Wait until our processes in `family` have ended.

    Raises:
        Lost: A process is still running after 30 s.
    """
    _, left = psutil.wait_procs([p for p in family if is_ours(p)], timeout=30)
    if left:
        raise Lost(f"{len(left)} of our processes were still running 30 s after the kill")


def judge(experiment: Experiment, happened: str, before: int, struck: float) -> Outcome:
    """Judge a finished trial by its files.

    Args:
        experiment: the experiment with the trial.
        happened: a line about the fault.
        before: number of rows when the fault struck.
        struck: time of the fault, in seconds since 1970.

    Raises:
        Lost: A round is missing or written twice, or the trial differs from an uninterrupted run.
    """
    trial, results = experiment.trial, experiment.rows()
    check_rounds(experiment)
    # Each round writes a Parquet file, and a repeated round writes its file again.
    times = sorted(path.stat().st_mtime for path in (trial / "rollouts").glob("*.parquet"))
    after = [struck, *(at for at in times if at > struck)]
    starts = [row["training_iteration"] for row in results if row["iterations_since_restore"] == 1]
    check_accounts(experiment)
    exact = equals_uninterrupted(experiment)
    if exact is False:
        raise Lost(f"{happened}; its rows or weights differ from those of an uninterrupted run")
    return Outcome(
        survived=True,
        happened=happened,
        recovered_s=max((b - a for a, b in pairwise(after)), default=None),
        rounds_repeated=max(0, before - (starts[-1] - 1)) if starts[-1] > 1 else 0,
        prompts_asked_again=int(results[-1]["count/redispatched"]),
        exact=exact,
    )


def check_rounds(experiment: Experiment) -> None:
    """Check that each file contains every round once and in order.

    Raises:
        Lost: A file lacks a round, repeats one, or contains rounds in a different order.
    """
    every = list(range(1, experiment.rounds + 1))
    for name, found in rounds_on_disk(experiment.trial).items():
        if found != every:
            raise Lost(f"{name} contains rounds {found}")


def check_accounts(experiment: Experiment) -> None:
    """Check that each prompt was trained on or dropped, or is still waiting or in flight.

    Raises:
        Lost: The counts of the last row do not add up, or the files of the responses contradict
            them.
    """
    import pyarrow.parquet as pq

    last = experiment.rows()[-1]
    counts = {
        name: int(last[f"count/{name}"])
        for name in ("requested", "trained", "dropped", "waiting", "in_flight")
    }
    requested = counts.pop("requested")
    if requested != sum(counts.values()):
        raise Lost(f"{requested} prompts were requested, but the counts are {counts}")
    cursors = {
        cursor
        for path in (experiment.trial / "rollouts").glob("*.parquet")
        for cursor in pq.read_table(path, columns=["cursor"]).column("cursor").to_pylist()
    }
    if len(cursors) != counts["trained"] or not cursors <= set(range(requested)):
        raise Lost(
            f"{counts['trained']} prompts were trained on, but the files contain {len(cursors)}"
        )


def rounds_on_disk(trial: Path) -> dict[str, list[int]]:
    import pyarrow.parquet as pq
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with (trial / "progress.csv").open(newline="") as file:
        progress = [int(row["training_iteration"]) for row in csv.DictReader(file)]
    events = EventAccumulator(str(trial), {"scalars": 0})
    events.Reload()
    parquet = {
        kind: sorted(
            {
                round_
                for path in (trial / kind).glob("*.parquet")
                for round_ in pq.read_table(path, columns=["round"]).column("round").to_pylist()
            }
        )
        for kind in ("rollouts", "versions")
    }
    lines = (trial / "result.json").read_text().splitlines()
    return {
        "result.json": [json.loads(line)["training_iteration"] for line in lines],
        "progress.csv": progress,
        "TensorBoard": [event.step for event in events.Scalars("version/learner")],
        **parquet,
    }


def equals_uninterrupted(experiment: Experiment) -> bool | None:
    """Compare the rows and the last checkpoint with those of an uninterrupted run, bit for bit.

    Returns:
        True if they are equal, or None for an asynchronous arm, for which this is not promised.
    """
    if experiment.arm.startswith("async"):
        return None
    return fingerprint(experiment) == experiment.uninterrupted()


@cache
def uninterrupted(arm: str, settings: tuple[tuple[str, Any], ...]) -> tuple[Any, ...]:
    with TemporaryDirectory() as storage:
        experiment = Experiment(Path(storage), arm, **dict(settings))
        with experiment.start() as running:
            running.ends_well()
        return fingerprint(experiment)


def fingerprint(experiment: Experiment) -> tuple[Any, ...]:
    """Return all rows without timings, and the digests of the last checkpoint's tensor files."""
    rows = [
        {
            name: value
            for name, value in row.items()
            if name in NAMES and not name.startswith(TIMED) and name not in OF_THE_FAULT
        }
        for row in experiment.rows()
    ]
    last = max(experiment.trial.glob("checkpoint_*"))
    digests = json.loads((last / MANIFEST).read_text())["files"]
    return rows, {name: digest for name, digest in digests.items() if name != STATE}


def interrupt(running: Running) -> None:
    """Send Ctrl-C to the command, and wait until it ends.

    Raises:
        Lost: A process is still running after 25 s, or the status is not 130.
    """
    family, began = running.family(), time.monotonic()
    running.process.send_signal(signal.SIGINT)
    running.output()
    _, left = psutil.wait_procs(family, timeout=max(0.0, 25 - (time.monotonic() - began)))
    if running.process.returncode != 130 or left:
        raise Lost(
            f"Ctrl-C: status {running.process.returncode}, {len(left)} processes left after 25 s"
        )
