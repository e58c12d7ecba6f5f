"""Write the files of an alignment run."""

from __future__ import annotations

import json
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
    """Return the figures of a run as JSON data."""
    accuracy = record.accuracy
    return {
        "format": FORMAT,
        "answer": record.answer,
        "train_rows": record.train_rows,
        "held_out_rows": len(record.held_out),
        "steps": record.steps,
        **{name: {"first": a, "last": b} for name, (a, b) in record.figures.items()},
        "accuracy": None if accuracy is None else {**asdict(accuracy), "level": LEVEL},
        "problems": record.problems,
        "asked": dict(record.asked),
        **record.origin,
        "log": list(record.log),
    }


def _write(path: Path, text: str) -> None:
    with replacing(path) as file:
        file.write(text.encode("utf-8", errors="replace"))
