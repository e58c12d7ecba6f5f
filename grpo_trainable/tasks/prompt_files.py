"""Read prompts from JSONL files and split them into training and held-out prompts."""

from __future__ import annotations

import codecs
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from grpo_trainable.tasks.messages import Prompt, as_text
from grpo_trainable.tasks.order import Rows
from grpo_trainable.tasks.task import Example, JSONValue

logger = logging.getLogger(__name__)

HELD_OUT_PROMPTS = 0.20  # held-out share of a file if only one of the two files is given

# Converts a line of a JSONL file to an example. Raises ValueError for a bad line.
ParseRow: TypeAlias = Callable[[Mapping[str, Any]], Example]


def numbered_lines(key: str, path: str | Path) -> Iterator[tuple[int, bytes]]:
    """Return the lines of a file with their numbers, counted from 1.

    Args:
        key: Setting that names the file, without `task.`.
        path: The file.

    Raises:
        ValueError: If the file cannot be read.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"task.{key}={path}: cannot be read: {error.strerror}") from None
    return enumerate(content.removeprefix(codecs.BOM_UTF8).splitlines(), start=1)


def read_examples(key: str, path: str | Path, parse: ParseRow, *, strict: bool) -> list[Example]:
    """Read the examples in a JSONL file, in order.

    Bad lines are skipped, with one warning for all of them. The warning names the file and
    the number of the first bad line.

    Args:
        key: Setting that names the file, without `task.`.
        path: The file.
        parse: Converts a line to an example.
        strict: Raise an error for the first bad line instead of skipping it.

    Raises:
        ValueError: If the file cannot be read or contains no example, or, with `strict`, if a line
            is bad.
    """
    examples, mistakes = [], []
    for number, line in numbered_lines(key, path):
        if not line.strip():
            continue
        try:
            examples.append(parse(json_object(line)))
        except ValueError as error:
            mistakes.append(f"line {number}: {error}")
            if strict:
                raise ValueError(f"task.{key}={path}: {mistakes[0]}") from None
    examples = _with_equal_columns(examples)
    if not examples:
        first = f"; {mistakes[0]}" if mistakes else ""
        raise ValueError(f"task.{key}={path}: has no valid line{first}")
    if mistakes:
        rest = f", and {len(mistakes) - 1} more such lines" if len(mistakes) > 1 else ""
        logger.warning("task.%s=%s: %s%s; skipped", key, path, mistakes[0], rest)
    return examples


def json_object(line: bytes) -> Mapping[str, Any]:
    """Parse a line of a JSONL file as a JSON object.

    Raises:
        ValueError: If the line is not a JSON object. The message states the mistake.
    """
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"must be a JSON object, got {type(row).__name__}")
    return row


def _with_equal_columns(examples: list[Example]) -> list[Example]:
    """Give all examples the same columns. A column that a row lacks is None."""
    columns = {name: None for example in examples for name in example.columns}
    return [
        example
        if example.columns.keys() == columns.keys()
        else replace(example, columns={**columns, **example.columns})
        for example in examples
    ]


def true_answer(row: Mapping[str, Any]) -> JSONValue:
    """Return the true answer of a row for a user's reward function: any JSON value, or None.

    The answer is in the first of the columns `keywords`, `answer` and `ground_truth` that is not
    None, or under `ground_truth` in verl's column `reward_model`.
    """
    for name in ("keywords", "answer", "ground_truth"):
        if row.get(name) is not None:
            return row[name]
    of_verl = row.get("reward_model")
    return of_verl.get("ground_truth") if isinstance(of_verl, Mapping) else None


def split_files(
    train_file: str | Path | None, eval_file: str | Path | None, parse: ParseRow, *, strict: bool
) -> tuple[Rows, Rows]:
    """Return the training examples and the held-out examples.

    Two files are used as they are. A single file is split by a hash of each prompt.

    Raises:
        ValueError: If a file is missing, empty or malformed, or too small to split.
    """
    if train_file is not None and eval_file is not None:
        return (
            Rows(read_examples("train_file", train_file, parse, strict=strict)),
            Rows(read_examples("eval_file", eval_file, parse, strict=strict)),
        )
    key, path = ("eval_file", eval_file) if train_file is None else ("train_file", train_file)
    assert path is not None
    rows = read_examples(key, path, parse, strict=strict)
    train = [row for row in rows if not is_held_out(row.prompt)]
    heldout = [row for row in rows if is_held_out(row.prompt)]
    if not train or not heldout:
        other = "train_file" if key == "eval_file" else "eval_file"
        raise ValueError(
            f"task.{key}={path}: too few prompts; the hash assigns {len(train)} to training and "
            f"{len(heldout)} to evaluation, but each side needs one; add prompts or set "
            f"task.{other}"
        )
    return Rows(train), Rows(heldout)


def is_held_out(prompt: Prompt) -> bool:
    """Return True if a prompt is held out.

    Only the prompt's hash decides, so a prompt is held out in every file and run or in none.
    """
    return hash_fraction(as_text(prompt)) < HELD_OUT_PROMPTS


def hash_fraction(text: str) -> float:
    """Hash `text` to a number in [0, 1)."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48
