"""Write TensorBoard files: metrics grouped by area, with a layout, histograms and texts."""

from __future__ import annotations

import html
import io
import math
import os
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from ray.tune.logger import TBXLoggerCallback
from ray.tune.utils import flatten_dict
from tensorboard.compat.proto import event_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

from callbacks import summaries
from callbacks.round_writer import RoundWriter
from callbacks.trial_files import continued_files, metrics_in, mixed_tasks, trial_directory
from grpo_trainable.protocol.round_records import SCHEMAS, RoundDetails, Row, details_of
from grpo_trainable.storage.atomic import append
from grpo_trainable.telemetry.metrics import KL_TO, RATIO_EDGES
from grpo_trainable.telemetry.stages import IDLE_SIDES, STAGES

EXAMPLES = 4  # held-out prompts shown as text
BINS = 30  # number of equal bins in a histogram, from its minimum to its maximum

# The CUSTOM SCALARS tab: category -> chart -> tags in this chart.
LAYOUT: dict[str, summaries.Charts] = {
    "reward": {
        "held-out and train": ["reward/eval_mean", "reward/train_mean"],
        # The length is shown beside the reward, because a policy may earn reward with longer or
        # shorter responses.
        "tokens per response": ["response/length_mean"],
        "format and answer": ["reward/format_mean", "reward/answer_mean"],
    },
    "KL, nats per response": {
        f"to the {other}": [f"kl/{other}_nats", f"kl/{other}_k3_nats"] for other in KL_TO
    },
    "time": {
        "seconds of each stage": [f"time/{stage}_s" for stage in STAGES],
        "shares of the work": [f"time/{stage}_fraction" for stage in STAGES],
        "waiting": [f"time/{side}_s" for side in IDLE_SIDES],
        "share of the machine taken by other work": ["time/disturbed_fraction"],
    },
    "lag and versions": {
        "lag at first training, rounds": ["lag/max", "lag/mean"],
        "versions": ["version/learner", "version/generator"],
        "gap, gradient steps": ["version/gap_max"],
    },
}


def layout(labels: Iterable[str]) -> dict[str, summaries.Charts]:
    """Return the layout for a trial.

    Args:
        labels: Labels of the tasks in `task.mix`. Empty if the trial has no mix.
    """
    charts = {label: [f"eval/{label}/reward_mean", f"task/{label}/reward_mean"] for label in labels}
    return {**LAYOUT, "tasks, held-out and train": charts} if charts else LAYOUT


class TensorBoardCallback(RoundWriter, TBXLoggerCallback):
    """Replaces Tune's TensorBoard callback.

    Tags are the metric names, without the prefix `ray/tune/`. Each round is on disk before the next
    round begins. When a trial starts again from a checkpoint, the points after the checkpoint are
    removed.
    """

    def __init__(self) -> None:
        RoundWriter.__init__(self)
        self._files: dict[str, EventFile] = {}  # trial id -> its file
        self._latest: dict[str, dict[str, float]] = {}  # trial id -> scalars of its last round

    def content(self, result: dict[str, Any]) -> Any:
        """Return a copy of the row, with its details."""
        return Row.of(result, details_of(result))

    def cut(self, trial: Any, last: int) -> None:
        """Remove the records after round `last`, and begin a new file."""
        for path in continued_files(trial, "events.out.tfevents.*"):
            cut_events(path, last)
        head = summaries.custom_scalars(layout(mixed_tasks(trial)))
        self._files[trial.trial_id] = EventFile(trial_directory(trial), last + 1, head)

    def write(self, trial: Any, iteration: int, content: dict[str, Any]) -> None:
        """Write the scalars, histograms and examples of a round."""
        scalars = metrics_in(content)
        self._latest[trial.trial_id] = scalars
        parts = [
            summaries.scalar(name, value) for name, value in scalars.items() if math.isfinite(value)
        ]
        details = details_of(content)
        if details is not None:
            parts += detail_summaries(details)
        # One record contains all summaries of a round.
        record = parts[0]
        for other in parts[1:]:
            record.MergeFrom(other)
        self._files[trial.trial_id].add([record], iteration)

    def finish(self, trial: Any) -> None:
        """Write the searched parameters, for the HPARAMS tab."""
        latest = self._latest.pop(trial.trial_id, {})
        searched = flatten_dict(trial.evaluated_params, delimiter="/")
        searched = {k: v for k, v in searched.items() if isinstance(v, bool | int | float | str)}
        if searched and latest:
            self._files[trial.trial_id].add(summaries.hparams(searched, list(latest)))


class EventFile:
    """TensorBoard event file whose records are on disk when `add` returns.

    The writers of torch and of Tune (tensorboardX) pass records to a thread. A flush of Tune's
    writer does not wait for this thread, so a killed driver loses the end of a round. If the
    disk is full for a moment, torch's writer stops and never writes again.
    """

    def __init__(self, directory: Path, purge_step: int, head: Any) -> None:
        """Create the file.

        Args:
            directory: Directory of the file.
            purge_step: Readers should ignore this step and all later steps in earlier files.
            head: The first summary in the file.

        Raises:
            OSError: The file cannot be written, for example because there is no space.
        """
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._path = directory / name
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)  # pyright: ignore[reportAttributeAccessIssue]
        self._append(
            {"file_version": "brain.Event:2"},
            {"step": purge_step, "session_log": start},
            {"summary": head},
        )

    def add(self, records: Sequence[Any], step: int = 0) -> None:
        """Write either all of the summaries or none.

        Raises:
            OSError: The summaries cannot be written, for example because there is no space. None of
                them is in the file.
        """
        self._append(*({"summary": record, "step": step} for record in records))

    def _append(self, *events: dict[str, Any]) -> None:
        data = io.BytesIO()
        records = RecordWriter(data)
        for fields in events:
            event = event_pb2.Event(wall_time=time.time(), **fields)  # pyright: ignore[reportAttributeAccessIssue]
            records.write(event.SerializeToString())
        append(self._path, data.getvalue())


def detail_summaries(details: RoundDetails) -> list[Any]:
    """Return the histograms of a round, and examples if the round had an evaluation."""
    samples = {
        "reward": details.rollouts["reward"],
        "response_length": details.rollouts["tokens"],
        "lag": [lag for lag, groups in details.lags.items() for _ in range(groups)],
    }
    parts = []
    for name, values in samples.items():
        finite = np.array([value for value in values if math.isfinite(value)], dtype=np.float64)
        if len(finite):
            parts.append(summaries.histogram(f"rollouts/{name}", finite, BINS))
    counts = np.array(details.ratio_counts)
    if counts.sum():
        middles = np.sqrt(RATIO_EDGES[1:] * RATIO_EDGES[:-1])
        parts.append(
            summaries.binned(
                "rollouts/ratio",
                RATIO_EDGES,
                counts,
                least=float(RATIO_EDGES[0]),
                greatest=float(RATIO_EDGES[-1]),
                total=float((counts * middles).sum()),
                squares=float((counts * middles**2).sum()),
            )
        )
    if details.evaluations:
        parts.append(summaries.text("examples/held_out", examples_table(details.evaluations)))
    return parts


def cut_events(path: Path, last: int) -> None:
    """Truncate a file before the first record that is cut short or has a step after `last`.

    A purge step would not suffice: some readers would still show texts and histograms twice, and
    show old records after the last step of a resumed trial. The format of a record is TFRecord: the
    length, the checksum of the length, the data, and the checksum of the data.
    """
    kept, size = 0, path.stat().st_size
    with path.open("rb") as file:
        while len(header := file.read(12)) == 12:
            (length,) = struct.unpack("<Q", header[:8])
            end = file.tell() + length + 4
            if end > size:
                break
            try:
                event = event_pb2.Event.FromString(file.read(length))  # pyright: ignore[reportAttributeAccessIssue]
            except DecodeError:
                break
            if event.step > last:
                break
            kept = file.seek(end)
    os.truncate(path, kept)


def examples_table(evaluations: dict[str, list[Any]]) -> str:
    """Return a Markdown table: for each evaluation, the first response to each of a few prompts."""
    lines = ["| round | prompt | response | reward |", "|---|---|---|---|"]
    shown: dict[int, int] = {}
    names = SCHEMAS["evaluations"].names
    for row in zip(*(evaluations[name] for name in names), strict=True):
        example = dict(zip(names, row, strict=True))
        round_ = example["round"]
        if example["response_index"] != 0 or shown.get(round_, 0) == EXAMPLES:
            continue
        shown[round_] = shown.get(round_, 0) + 1
        prompt, response = (_cell(example[name]) for name in ("prompt", "response"))
        lines.append(f"| {round_} | {prompt} | {response} | {example['reward']:g} |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return html.escape(" ".join(text.split())).replace("|", "&#124;")
