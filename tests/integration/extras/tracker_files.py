"""Read the local files of trackers: the steps and the report of each run.

Each function returns two dicts by run: the `(step, reward)` pairs of the stored steps, in order,
and the names of the attached files.
"""

from __future__ import annotations

import json
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

REWARD = "reward/train_mean"
BLOCK = 32768  # a file of W&B consists of blocks, and each record of a block has a header
HEADER = 7
LAST_PARTS = (1, 4)  # a record is stored whole (1) or in parts: first (2), middle (3), last (4)

Steps: TypeAlias = dict[str, list[tuple[int, float]]]
Files: TypeAlias = dict[str, set[str]]


def stored(tracker: str, directory: Path) -> tuple[Steps, Files]:
    """Read the files that a tracker has written to a directory."""
    return {"wandb": wandb_files, "mlflow": mlflow_files, "trackio": trackio_files}[tracker](
        directory
    )


def wandb_files(directory: Path) -> tuple[Steps, Files]:
    """Read the directories of offline runs."""
    from wandb.proto.wandb_internal_pb2 import Record

    steps: Steps = {}
    files: Files = {}
    for path in sorted((directory / "wandb").glob("offline-run-*/run-*.wandb")):
        run = path.stem.removeprefix("run-")
        steps.setdefault(run, [])
        files.setdefault(run, set())
        for data in wandb_records(path.read_bytes()):
            record = Record.FromString(data)
            if record.HasField("history"):
                items = {i.key or i.nested_key[0]: i.value_json for i in record.history.item}
                steps[run].append((int(items["_step"]), float(items[REWARD])))
            if record.request.HasField("log_artifact"):
                files[run] |= {
                    e.path for e in record.request.log_artifact.artifact.manifest.contents
                }
            if record.HasField("artifact"):
                files[run] |= {entry.path for entry in record.artifact.manifest.contents}
    return steps, files


def wandb_records(content: bytes) -> Iterator[bytes]:
    """Yield the complete records of a file in the format of LevelDB's log."""
    place, data = HEADER, b""
    while len(content) - place >= HEADER:
        left = BLOCK - place % BLOCK
        if left < HEADER:
            place += left  # padding
            continue
        _, size, kind = struct.unpack("<IHB", content[place : place + HEADER])
        data += content[place + HEADER : place + HEADER + size]
        place += HEADER + size
        if kind in LAST_PARTS:
            yield data
            data = b""


def mlflow_files(directory: Path) -> tuple[Steps, Files]:
    """Read the database and the artifacts."""
    connection = sqlite3.connect(directory / "mlflow.db")
    query = (
        "SELECT tags.value, metrics.step, metrics.value FROM metrics JOIN tags USING (run_uuid) "
        "WHERE metrics.key = ? AND tags.key = 'grpo_trainable.trial' ORDER BY timestamp, step"
    )
    steps: Steps = {}
    for run, step, reward in connection.execute(query, [REWARD]):
        steps.setdefault(run, []).append((step, reward))
    query = (
        "SELECT tags.value, runs.artifact_uri FROM runs JOIN tags USING (run_uuid) "
        "WHERE tags.key = 'grpo_trainable.trial'"
    )
    files: Files = {}
    for run, place in connection.execute(query):
        report = Path(place.removeprefix("file://")) / "report"
        found = (path for path in report.rglob("*") if path.is_file())
        assert run not in files, "a trial has two runs"
        files[run] = {path.relative_to(report).as_posix() for path in found}
    return steps, files


def trackio_files(directory: Path) -> tuple[Steps, Files]:
    """Read the database, which names the files of each artifact."""
    connection = sqlite3.connect(directory / "grpo-trainable.db")
    steps: Steps = {}
    query = "SELECT run_name, run_id, step, metrics FROM metrics ORDER BY id"
    ids: dict[str, set[str]] = {}
    for run, id_, step, metrics in connection.execute(query):
        steps.setdefault(run, []).append((step, json.loads(metrics)[REWARD]))
        ids.setdefault(run, set()).add(id_)
    assert all(len(found) == 1 for found in ids.values()), "a trial has two runs"
    files: Files = {run: set() for run in steps}
    query = "SELECT producer_run_name, manifest FROM artifact_versions"
    for run, manifest in connection.execute(query):
        files[run] |= {entry["path"] for entry in json.loads(manifest)}
    return steps, files
