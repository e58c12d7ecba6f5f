"""Read prompts from data files and split them into training and held-out prompts."""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from grpo_trainable.config import shown
from grpo_trainable.tasks.messages import Prompt, as_text
from grpo_trainable.tasks.order import Rows
from grpo_trainable.tasks.row_files import Row, rows_in
from grpo_trainable.tasks.task import Example, JSONValue
from grpo_trainable.text import plural

logger = logging.getLogger(__name__)

MOST_COLUMNS = 20  # maximum number of columns that an error names
HELD_OUT_PROMPTS = 0.20  # held-out share of `train_file` if `eval_file` is not set

# Converts a row of a data file to an example. Raises ValueError for a bad row.
ParseRow: TypeAlias = Callable[[Row], Example]


def read_examples(key: str, path: str | Path, parse: ParseRow, *, strict: bool) -> list[Example]:
    """Read the examples in a data file, in order.

    Bad rows are skipped, with one warning for all of them. The warning names the file and the place
    of the first bad row.

    Args:
        key: Setting that names the file, without the prefix `task.`.
        path: The file.
        parse: Converts a row to an example.
        strict: Raise an error for the first bad row instead of skipping it.

    Raises:
        ValueError: If the file cannot be read or contains no example. With `strict`, also raised if
            a row is bad.
    """
    examples, mistakes, columns = [], [], []
    for place, row in rows_in(key, path):
        try:
            fields = row()
            columns = columns or sorted(fields)
            examples.append(parse(fields))
        except ValueError as error:
            mistakes.append(f"{place}: {error}")
            if strict:
                raise ValueError(f"task.{key}={path}: {mistakes[0]}{_named(columns)}") from None
    examples = _with_equal_columns(examples)
    if not examples:
        first = f"; {mistakes[0]}" if mistakes else ""
        raise ValueError(f"task.{key}={path}: has no valid row{first}{_named(columns)}")
    if mistakes:
        more = len(mistakes) - 1
        rest = f", and {plural(more, 'more bad row')}" if more else ""
        _warn(f"task.{key}={path}: {mistakes[0]}{rest}; skipped")
    return examples


@functools.cache
def _warn(text: str) -> None:
    """Warn only once in each process, because planning reads the same file for every trial."""
    logger.warning(text)


def _named(columns: Sequence[str]) -> str:
    """Return the names of the columns as one line in brackets."""
    names = [shown(name) for name in columns[:MOST_COLUMNS]]
    rest = [f"{len(columns) - MOST_COLUMNS} more"] if len(columns) > MOST_COLUMNS else []
    return f" (columns: {', '.join([*names, *rest])})" if columns else ""


def _with_equal_columns(examples: list[Example]) -> list[Example]:
    """Give all examples the same columns. A column that an example lacks becomes None."""
    columns = {name: None for example in examples for name in example.columns}
    return [
        example
        if example.columns.keys() == columns.keys()
        else replace(example, columns={**columns, **example.columns})
        for example in examples
    ]


def true_answer(row: Row) -> JSONValue:
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
    train_file: str | Path, eval_file: str | Path | None, parse: ParseRow, *, strict: bool
) -> tuple[Rows, Rows]:
    """Return the training examples and the held-out examples.

    All prompts in `eval_file` are held out. Without `eval_file`, a hash of each prompt decides
    which prompts in `train_file` are held out.

    Raises:
        ValueError: If a file is missing, empty or malformed, or too small to split.
    """
    rows = read_examples("train_file", train_file, parse, strict=strict)
    if eval_file is not None:
        return Rows(rows), Rows(read_examples("eval_file", eval_file, parse, strict=strict))
    train = [row for row in rows if not is_held_out(row.prompt)]
    heldout = [row for row in rows if is_held_out(row.prompt)]
    if not train or not heldout:
        raise ValueError(
            f"task.train_file={train_file}: too few prompts; a hash of each prompt assigns "
            f"{len(train)} to training and {len(heldout)} to evaluation, but each side needs one; "
            "add prompts or set task.eval_file"
        )
    return Rows(train), Rows(heldout)


def sources_in_files(
    train_file: str | None, eval_file: str | None, otherwise: str
) -> tuple[str, str] | None:
    """Describe, for the user, the sources of the training and the held-out examples.

    The result is None if neither file is set.

    Args:
        train_file: Value of `task.train_file`.
        eval_file: Value of `task.eval_file`.
        otherwise: Source of the training examples if `train_file` is None.
    """
    if train_file is None and eval_file is None:
        return None
    train = otherwise if train_file is None else f"from {Path(train_file).name}"
    if eval_file is None:
        return train, "by a hash of each prompt; task.eval_file=FILE holds out a whole file"
    return train, f"all of {Path(eval_file).name}"


def note_on_shared(
    train: Rows, heldout: Rows, train_file: str, eval_file: str | None
) -> str | None:
    """Return a note if prompts in the files are both trained on and held out, else None."""
    trained = {as_text(example.prompt) for example in train.rows}
    both = sum(as_text(example.prompt) in trained for example in heldout.rows)
    if not both:
        return None
    return (
        f"note: {both:,} of the {heldout.size:,} held-out prompts of task.eval_file={eval_file} "
        f"are also trained on, because they are in task.train_file={train_file}"
    )


def is_held_out(prompt: Prompt) -> bool:
    """Return True if a prompt is held out.

    Only the prompt's hash decides. So a prompt is held out in all files and runs, or in none.
    """
    return hash_fraction(as_text(prompt)) < HELD_OUT_PROMPTS


def hash_fraction(text: str) -> float:
    """Hash `text` to a number in [0, 1)."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48
