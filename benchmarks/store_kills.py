"""The command is killed again and again while its trial is kept in a slow object store."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any
from unittest.mock import patch

from measure import ROOT
from survival import Experiment, Fault, Lost, Outcome, Running, check_accounts, none_left
from survival import rounds_on_disk as rounds_of

from callbacks.trial_files import read_rows
from grpo_trainable.storage import fetched, stored_path

KILLS = 5  # of one experiment
FEWEST, MOST = 10, 60  # rounds from a start to a kill
PUT_S = 0.05
BOUND_S = 10.0  # rows are at most so far behind
RUNS = "s3://bucket/runs"
SETTINGS = {
    "rollout.prompts": 1,
    "rollout.group_size": 2,
    "rollout.max_new_tokens": 4,
    "eval.every": 100,
}


class InSlowStore(Experiment):
    """A trial of short rounds. Its rows are those that the present command has written here."""

    checkpoint_every = 5
    longest_s = 480.0

    def __init__(self, directory: Path, arm: str, rounds: int) -> None:
        self.rounds = rounds
        super().__init__(directory, arm, RUNS, **SETTINGS)
        self._sessions = directory
        self._began = 0.0

    def launch(self, command: Sequence[str], log: IO[bytes]) -> subprocess.Popen[Any]:
        self._began = time.time()
        environment = {**os.environ, "RAY_TMPDIR": str(self._sessions)}
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)

    def rows(self) -> list[dict[str, Any]]:
        if self.directory.exists():
            return super().rows()
        here = self._sessions.glob("ray/session_2*/artifacts/*/*/*-mirrored/*/result.json")
        newest = max(here, key=os.path.getmtime, default=None)
        rows = [] if newest is None else read_rows(newest)
        return [row for row in rows if row["timestamp"] >= int(self._began)]


@contextmanager
def slow_store() -> Iterator[None]:
    """A store for this process and its children, which takes a PUT in `PUT_S`."""
    sys.path.append(str(ROOT / "tests" / "integration" / "extras"))
    from s3_server import s3_store

    with s3_store() as store, patch.dict(os.environ, store.environment):
        store.make_bucket(stored_path(RUNS).path.partition("/")[0])
        store.refuses = lambda method, path: time.sleep(PUT_S) if method == "PUT" else None
        yield


def kill_again_and_again(rng: random.Random, repeat: int) -> Outcome:
    """Each time the command goes on from a checkpoint that is not too old."""
    arm = ("colocated_k1", "async_k1")[repeat % 2]
    kills = [rng.randint(FEWEST, MOST) for _ in range(KILLS)]
    with (
        tempfile.TemporaryDirectory(prefix="k", ignore_cleanup_errors=True) as directory,
        slow_store(),
    ):
        experiment = InSlowStore(Path(directory), arm, sum(kills) + FEWEST)
        command, before, done_again = experiment.command, [], []
        for rounds in kills:
            with Running(experiment, command) as running:
                running.wait_for(lambda: len(experiment.rows()) >= rounds, step_s=0.2)  # noqa: B023
                time.sleep(rng.random() * 0.3)
                family = running.family()
                running.process.send_signal(signal.SIGKILL)
                running.output()
                none_left(family)
            rows = experiment.rows()
            done_again += lost_between(before, rows)
            command, before = experiment.resume_command, rows
        with Running(experiment, command) as running:
            running.ends_well()
        done_again += lost_between(before, experiment.rows())
        check_end(experiment)
    round_s = sorted(row["time_this_iter_s"] for row in before)[len(before) // 2]
    happened = f"{arm}, rounds of {round_s:.2f} s, rounds done again after each kill: {done_again}"
    return Outcome(survived=True, happened=happened, rounds_repeated=max(done_again))


def lost_between(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[int]:
    """How many rounds were done again after a kill. Lost when they are too many."""
    if not before:
        return []
    last, start = before[-1]["training_iteration"], after[0]["training_iteration"] - 1
    recent = sum(row["timestamp"] >= before[-1]["timestamp"] - BOUND_S for row in before)
    allowed = InSlowStore.checkpoint_every + recent
    if last - start > allowed:
        raise Lost(f"killed at round {last}, went on from {start}: {allowed} rounds are allowed")
    return [last - start]


def check_end(experiment: InSlowStore) -> None:
    """Lost when the store does not have each round once."""
    with fetched(stored_path(RUNS) / experiment.directory.name) as copy:
        copy.rename(experiment.directory)
        every = list(range(1, experiment.rounds + 1))
        for name, found in rounds_of(experiment.trial).items():
            if found != every:
                missing = sorted(set(every) ^ set(found))
                raise Lost(f"{name} holds {len(found)} rounds; missing or too many: {missing}")
        check_accounts(experiment)


FAULTS = (
    Fault(
        name="driver SIGKILL, slow object store, then --resume",
        repeats=10,
        strike=kill_again_and_again,
    ),
)
# Without the packages of the tests there is no store.
FAULTS = FAULTS if find_spec("moto") else ()
