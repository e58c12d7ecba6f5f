"""Write a timeline of every actor for https://ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

from callbacks.round_writer import RoundWriter
from callbacks.trial_files import (
    continued_file,
    cut_lines,
    label,
    trial_directory,
)
from grpo_trainable.protocol.round_records import RoundDetails
from grpo_trainable.storage.atomic import append, replacing
from grpo_trainable.telemetry.stages import OTHER_THREADS, TRACE_NAMES

FILE = "trace.json"
OPEN, END = b"[\n", b"]\n"


class TraceCallback(RoundWriter):
    """Appends the spans of each round to `trace.json`.

    A viewer shows a row for the trial, then a row per actor. Work that an actor's other threads do
    during its calls (fetching weights, scoring) has a separate row. The file is a JSON array with
    one event per line, and the array is closed after every round.
    Times are in microseconds since 1970, by the clock of the trial's process.
    """

    def __init__(self) -> None:
        super().__init__()
        self._rows: dict[str, list[str]] = {}  # trial id -> names of the trace's rows, in order

    def cut(self, trial: Any, last: int) -> None:
        """Remove the events after round `last`, and close the array."""
        path = continued_file(trial, FILE)
        cut_lines(path, last, _round_of)
        events = [_event(line) for line in path.open("rb")] if path.exists() else []
        self._rows[trial.trial_id] = [
            event["args"]["name"] for event in events if event and event["name"] == "thread_name"
        ]
        if any(events):
            append(path, END)
        else:
            path.unlink(missing_ok=True)

    def write(self, trial: Any, iteration: int, details: RoundDetails) -> None:
        """Append the events of a round."""
        path = trial_directory(trial) / FILE
        events = []
        if not path.exists():
            events.append(_named("process_name", label(trial), 0, details.round))
        rows = list(self._rows[trial.trial_id])
        # The trial's row comes first.
        for item in sorted(details.spans, key=lambda s: (s.actor != "trial", s.span.start)):
            row = f"{item.actor}{OTHER_THREADS if item.span.concurrent else ''}"
            if row not in rows:
                rows.append(row)
                events.append(_named("thread_name", row, len(rows), details.round))
            stage = item.span.stage
            events.append(
                {
                    "name": TRACE_NAMES.get(stage, stage),
                    "cat": item.role,
                    "ph": "X",
                    "pid": 1,
                    "tid": rows.index(row) + 1,
                    "ts": round(item.span.start * 1e6, 1),
                    "dur": round(item.span.seconds * 1e6, 1),
                    "args": {"round": details.round},
                }
            )
        append_events(path, events)
        self._rows[trial.trial_id] = rows


def _event(line: bytes) -> dict[str, Any] | None:
    """Return the event of a line, or None for the opening bracket.

    Raises:
        ValueError: The line is the closing bracket, or is cut short.
    """
    return None if line == OPEN else json.loads(line.lstrip(b","))


def _round_of(line: bytes) -> int | None:
    event = _event(line)
    return None if event is None else event["args"]["round"]


def _named(kind: str, name: str, row: int, round_: int) -> dict[str, Any]:
    return {
        "name": kind,
        "ph": "M",
        "pid": 1,
        "tid": row,
        "args": {"name": name, "round": round_},
    }


def append_events(path: Path, events: list[dict[str, Any]]) -> None:
    """Append events in place of the closing bracket, and close the array again."""
    lines = [json.dumps(event).encode() for event in events]
    if not path.exists():
        with replacing(path) as file:
            file.write(OPEN + b"\n,".join(lines) + b"\n" + END)
        return
    with path.open("r+b", buffering=0) as file:
        place = file.seek(-len(END), 2)
        if file.read() != END:
            raise OSError(f"{path}: is not a complete trace; an earlier round was cut short")
        data = b"".join(b"," + line + b"\n" for line in lines) + END
        file.seek(place)
        try:
            if file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            # Close the array where it ended before, so a later call can append to it.
            file.seek(place)
            file.write(END)
            file.truncate()
            raise
