"""One experiment that something happens to, and whether anything of it was lost."""

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
FIRST, LAST = 3, 12  # rounds between which a fault strikes
LONGEST_S = 240.0
ROLES = ("Generator", "Learner", "Colocated", "DetailedGRPO")
SETTINGS = {
    "eval.prompts": 8,
    "eval.samples": 1,
    "eval.every": 4,
    "rollout.prompts": 4,
    "rollout.max_new_tokens": 24,
}
# What counts the fault itself.
OF_THE_FAULT = ("count/redispatched", "count/checkpoint_failures", "fleet/generators")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    survived: bool
    happened: str  # one line
    recovered_s: float | None = None  # the longest time without a row from the fault on
    rounds_repeated: int | None = None
    prompts_asked_again: int | None = None
    exact: bool | None = None  # rows and weights are an uninterrupted run's; None: not promised


@dataclass(frozen=True)
class Fault:
    name: str
    repeats: int
    strike: Callable[[random.Random, int], Outcome]  # the number of the repeat


class Lost(Exception):
    """The fault was not survived; says why."""


class Experiment:
    """One trial of `async_vs_sync` under `storage`, run by the command as a user runs it."""

    rounds, checkpoint_every = ROUNDS, CHECKPOINT_EVERY
    longest_s = LONGEST_S  # how long anything that is waited for may take

    def __init__(
        self, storage: Path, arm: str, kept_in: str | None = None, **settings: Any
    ) -> None:
        """`kept_in`: what --storage says, where the files are only brought to `storage`."""
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
        """Whole lines of the trial's result.json."""
        for path in self.directory.glob("*/result.json"):
            return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
        return []

    def start(self) -> Running:
        return Running(self, self.command)

    def resume(self) -> str:
        """Goes on to the end; what was printed. Lost when it does not end well."""
        with Running(self, self.resume_command) as running:
            return running.ends_well()

    def launch(self, command: Sequence[str], log: IO[bytes]) -> subprocess.Popen[Any]:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def uninterrupted(self) -> tuple[Any, ...]:
        """The fingerprint of the same trial when nothing happens to it."""
        return uninterrupted(self.arm, tuple(sorted(self.settings.items())))


class Running:
    """The command, as a process. Leaving it ends the process if it has not ended."""

    def __init__(self, experiment: Experiment, command: Sequence[str]) -> None:
        self.experiment = experiment
        self._log = TemporaryFile()  # noqa: SIM115  # closed on leaving
        self.process = experiment.launch(command, self._log)

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._log.close()

    def printed(self) -> str:
        """What the command has printed so far."""
        return os.pread(self._log.fileno(), 1 << 24, 0).decode()

    def wait_for(self, condition: Callable[[], Any], step_s: float = 0.02) -> Any:
        longest_s = self.experiment.longest_s
        end = time.monotonic() + longest_s
        while not (found := condition()):
            if self.process.poll() is not None:
                raise Lost(f"ended before: {self.printed()[-300:]}")
            if time.monotonic() > end:
                raise Lost(f"waited {longest_s:g} s in vain: {self.printed()[-300:]}")
            time.sleep(step_s)
        return found

    def wait_for_rounds(self, rounds: int) -> None:
        self.wait_for(lambda: len(self.experiment.rows()) >= rounds)

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def process_of(self, role: str) -> psutil.Process:
        for process in self.family():
            if is_ours(process, role):
                return process
        raise Lost(f"no process of {role} was found")

    def output(self) -> str:
        """Once it has ended."""
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
    """Wait for our processes of a family to end. Lost when one is left after 30 s."""
    _, left = psutil.wait_procs([p for p in family if is_ours(p)], timeout=30)
    if left:
        raise Lost(f"{len(left)} of our processes were left 30 s after the kill")


def judge(experiment: Experiment, happened: str, before: int, struck: float) -> Outcome:
    """What the files say of a trial that ran to its end. `before`: rows that stood there when the
    fault struck. Lost when a round is missing or there twice."""
    trial, results = experiment.trial, experiment.rows()
    check_rounds(experiment)
    # A part is written with each row, and again when a round is done again.
    times = sorted(path.stat().st_mtime for path in (trial / "rollouts").glob("*.parquet"))
    after = [struck, *(at for at in times if at > struck)]
    starts = [row["training_iteration"] for row in results if row["iterations_since_restore"] == 1]
    check_accounts(experiment)
    exact = equals_uninterrupted(experiment)
    if exact is False:
        raise Lost(f"{happened}; its rows or weights are not those of the uninterrupted run")
    return Outcome(
        survived=True,
        happened=happened,
        recovered_s=max((b - a for a, b in pairwise(after)), default=None),
        rounds_repeated=max(0, before - (starts[-1] - 1)) if starts[-1] > 1 else 0,
        prompts_asked_again=int(results[-1]["count/redispatched"]),
        exact=exact,
    )


def check_rounds(experiment: Experiment) -> None:
    """Lost when a file does not have every round once and in order."""
    every = list(range(1, experiment.rounds + 1))
    for name, found in rounds_on_disk(experiment.trial).items():
        if found != every:
            raise Lost(f"{name} holds rounds {found}")


def check_accounts(experiment: Experiment) -> None:
    """Lost when a prompt was neither trained on nor counted as dropped, in the last row and in what
    was written of every response."""
    import pyarrow.parquet as pq

    last = experiment.rows()[-1]
    counts = {
        name: int(last[f"count/{name}"])
        for name in ("requested", "trained", "dropped", "waiting", "in_flight")
    }
    requested = counts.pop("requested")
    if requested != sum(counts.values()):
        raise Lost(f"{requested} prompts were requested, but {counts}")
    cursors = {
        cursor
        for path in (experiment.trial / "rollouts").glob("*.parquet")
        for cursor in pq.read_table(path, columns=["cursor"]).column("cursor").to_pylist()
    }
    if len(cursors) != counts["trained"] or not cursors <= set(range(requested)):
        raise Lost(f"{counts['trained']} prompts were trained on, {len(cursors)} were written down")


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
    """Whether rows and last checkpoint are, bit for bit, those of a run that nothing happened to;
    None for an arm that does not promise it."""
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
    """Every row but what measures time, and the digests of policy, optimizer and buffer at the
    end."""
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
    """Press Ctrl-C. Lost when not all is gone in 25 s with status 130."""
    family, began = running.family(), time.monotonic()
    running.process.send_signal(signal.SIGINT)
    running.output()
    _, left = psutil.wait_procs(family, timeout=max(0.0, 25 - (time.monotonic() - began)))
    if running.process.returncode != 130 or left:
        raise Lost(f"Ctrl-C: status {running.process.returncode}, {len(left)} processes after 25 s")
