"""An object store that fails while a trial on a cluster keeps its checkpoints and files there."""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs
from cluster_survival import WORKERS, Cluster, OnCluster, cluster_of, none_left_on
from measure import ROOT
from survival import CHECKPOINT_EVERY, Fault, Outcome, judge

from grpo_trainable.storage import StoredPath

sys.path.append(str(ROOT / "tests" / "integration" / "extras"))

from s3_server import Store, s3_store

ARMS = ("sync", "async_k1")
REPEATS = 5
BUCKET = "bucket"
TRAINED_MEANWHILE = 2  # rounds while the store fails

Refusal = Callable[[str, str], "str | None"]  # method, path -> the answer, see `Store.refuses`


class InStore(OnCluster):
    """A trial that is kept in a store. Until it is fetched from there, its rows are those that wait
    on the machine of the command."""

    def __init__(self, cluster: Cluster, store: Store, copy: Path, arm: str) -> None:
        super().__init__(cluster, copy, arm, f"s3://{BUCKET}/runs", store.environment)
        self._seen = cluster.machines[0].seen(cluster.disk)
        self._found: Path | None = None

    @property
    def _waiting(self) -> Path | None:
        """The files of the experiment that the callbacks wrote; None until there are any."""
        if self._found is None:
            self._found = next(self._seen.glob("ray/session_*/artifacts/**/*-mirrored"), None)
        return self._found

    def rows(self) -> list[dict[str, Any]]:
        if self.directory.exists():
            return super().rows()
        for path in self._waiting.glob("*/result.json") if self._waiting else ():
            return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
        return []

    def fetch(self, store: Store) -> None:
        """Copies what the store has. Files are as old as those that the callbacks wrote."""
        key, secret = (
            store.environment[f"AWS_{name}"] for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY")
        )
        filesystem = pafs.S3FileSystem(
            access_key=key, secret_key=secret, endpoint_override=store.address, region="us-east-1"
        )
        stored, waiting = (
            StoredPath(filesystem, f"{BUCKET}/runs/{self.directory.name}"),
            self._waiting,
        )
        contents = {name: (stored / name).read_bytes() for name in stored.files()}
        for name, content in contents.items():
            path = self.directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            if waiting is not None and (waiting / name).exists():
                written = (waiting / name).stat().st_mtime
                os.utime(path, (written, written))


@contextmanager
def stores(cluster: Cluster) -> Iterator[tuple[Store, Store]]:
    """A store that we may ask, and the same on the last machine, which the cluster asks."""
    with (
        s3_store() as ours,
        cluster.machines[-1].listen() as listener,
        s3_store(listener) as theirs,
    ):
        ours.make_bucket(BUCKET)
        yield ours, theirs


def fail(refuses: Refusal, rng: random.Random, repeat: int) -> Outcome:
    """From a random round on, until a checkpoint was given up and training has gone on."""
    with tempfile.TemporaryDirectory() as copy:
        with cluster_of(spare=1) as cluster, stores(cluster) as (ours, theirs):
            experiment = InStore(cluster, theirs, Path(copy), ARMS[repeat % len(ARMS)])
            with experiment.start() as running:
                running.wait_for_rounds(rng.randint(1, 2 * CHECKPOINT_EVERY - 1))
                time.sleep(rng.random() * 0.3)
                before, struck = len(experiment.rows()), time.time()
                theirs.refuses = refuses
                running.wait_for(lambda: "could not be written" in running.printed())
                noted = len(experiment.rows())
                running.wait_for_rounds(noted + TRAINED_MEANWHILE)
                theirs.refuses = lambda method, path: None
                failed_s = time.time() - struck
                running.ends_well()
            left = none_left_on(cluster.machines[: 1 + WORKERS])
            experiment.fetch(ours)
        failures = experiment.rows()[-1]["count/checkpoint_failures"]
        happened = (
            f"{experiment.arm}, round {before}, failed for {failed_s:.0f} s, "
            f"{failures:.0f} checkpoints not written, {left}"
        )
        return judge(experiment, happened, before, struck)


def failing(refuses: Refusal):
    return lambda rng, repeat: fail(refuses, rng, repeat)


def full(method: str, path: str) -> str | None:
    return "507 InsufficientStorage" if method in ("PUT", "POST") else None


FAULTS = (
    Fault(
        name="object store answers with errors",
        repeats=REPEATS,
        strike=failing(lambda method, path: "500 InternalError"),
    ),
    Fault(
        name="object store is silent",
        repeats=REPEATS,
        strike=failing(lambda method, path: "stall"),
    ),
    Fault(name="object store is full", repeats=REPEATS, strike=failing(full)),
)
