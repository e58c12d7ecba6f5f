"""Write the files of an alignment run. `result.json` is written last."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from grpo_trainable.storage.atomic import replacing
from grpo_trainable.tools.alignment.run import RESULT
from reports.alignment.page import render_page
from reports.alignment.record import AlignmentRecord
from reports.intervals import LEVEL

FORMAT = 1
ROWS, PAGE = "held_out.jsonl", "report.html"


def write_result(out: Path, record: AlignmentRecord) -> None:
    """Write the held-out rows, the page and the figures.

    Raises:
        OSError: The directory cannot be written to.
    """
    rows = (asdict(row) | {"margin": row.margin} for row in record.held_out)
    _write(out / ROWS, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    _write(out / PAGE, render_page(record))
    _write(out / RESULT, json.dumps(result_data(record), indent=1) + "\n")


def result_data(record: AlignmentRecord) -> dict[str, Any]:
    """Return the figures of a run as JSON data, leaving out figures that the run does not have."""
    return {
        "format": FORMAT,
        "answer": record.answer,
        "train_rows": record.train_rows,
        "held_out_rows": len(record.held_out),
        "steps": record.training["steps"],
        "level": LEVEL,
        **_figures(record),
        "problems": record.problems,
        "asked": dict(record.asked),
        **record.origin,
    }


def _figures(record: AlignmentRecord) -> Mapping[str, Any]:
    losses = {
        name: {"first": points[0][1], "last": points[-1][1]}
        for name, metric in (("train_loss", "loss"), ("held_out_loss", "eval_loss"))
        if (points := record.series(metric))
    }
    if record.accuracy is None:
        return losses
    margin = sum(record.margins) / len(record.margins)
    return {**losses, "accuracy": asdict(record.accuracy), "margin": margin}


def _write(path: Path, text: str) -> None:
    with replacing(path) as file:
        file.write(text.encode("utf-8", errors="replace"))
