"""What is odd about files of problems, though every line of them can be read."""

from __future__ import annotations

import json
from pathlib import Path

from grpo_trainable.tasks.prompt_files import numbered_lines

MARK = "####"  # GSM8K's, before the true answer


def lines_without_mark(key: str, path: str | Path) -> list[int]:
    """The numbers of the lines whose `answer` is a worked one without `MARK`, in a file in which
    most answers have it; none in any other file.

    Raises:
        ValueError: the file cannot be read.
    """
    marked, others = 0, []
    for number, row in _rows(key, path):
        answer = row.get("answer")
        if isinstance(answer, str) and MARK in answer:
            marked += 1
        elif isinstance(answer, str) and r"\boxed" not in answer:
            others.append(number)
    return others if len(others) < marked else []


def shared_questions(train: str | Path, heldout: str | Path) -> int:
    """How many questions of the held-out file are in the file to train on as well.

    Raises:
        ValueError: a file cannot be read.
    """
    trained = _questions("train_file", train)
    return len(trained & _questions("eval_file", heldout))


def _questions(key: str, path: str | Path) -> set[str]:
    found = (row.get("problem", row.get("question")) for _, row in _rows(key, path))
    return {question.strip() for question in found if isinstance(question, str)}


def _rows(key: str, path: str | Path) -> list[tuple[int, dict]]:
    """The lines that hold a JSON object, with their numbers; the task names the others."""
    rows = []
    for number, line in numbered_lines(key, path):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            rows.append((number, row))
    return rows
