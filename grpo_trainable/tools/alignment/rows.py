"""Read and check the rows of a training file, in the formats of TRL's documentation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from grpo_trainable.tasks.messages import (
    NO_PROMPT,
    is_text,
    mistake_in_messages,
    mistake_in_prompt,
)
from grpo_trainable.tasks.row_files import Row, rows_in
from grpo_trainable.text import plural
from grpo_trainable.tools.alignment.stages import Stage

HELD_OUT_SHARE = 0.1  # held-out share of the rows, but at most MOST_HELD_OUT rows
MOST_HELD_OUT = 1000
# Columns that change the text of a row. Without them, the model would train on a different text.
UNSUPPORTED = ("tools", "chat_template_kwargs", "images", "image", "margin")


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of one layout."""

    rows: Sequence[Row]
    conversations: bool  # True: lists of messages. False: texts
    unused: Sequence[str] = ()  # other columns of the file

    @property
    def layout(self) -> str:
        """The columns and the kind of values, as a phrase."""
        kind = "conversations" if self.conversations else "texts"
        return f"{_listed(tuple(self.rows[0]))} as {kind}"


@dataclass(frozen=True, kw_only=True)
class MeasuredRow:
    """A held-out row with the scores and the response of the trained model."""

    row: Row
    scores: tuple[float, float] | None = None  # scores of the chosen and the rejected response
    response: str | None = None  # the most likely response of the trained policy

    @property
    def margin(self) -> float | None:
        """The score of the chosen response minus the score of the rejected response."""
        return None if self.scores is None else self.scores[0] - self.scores[1]


def read_rows(option: str, path: str, stage: Stage) -> Rows:
    """Read a JSONL file, a Parquet file, or a directory that `datasets` saved.

    Args:
        option: The option that names the file, for messages.
        path: The file or directory.
        stage: Decides which layouts are valid.

    Raises:
        ValueError: If the file cannot be read, has no rows, or has a row that is malformed or
            differs in layout from the first row. The message is one line that names the row.
    """
    rows: list[Row] = []
    unused: dict[str, None] = {}
    kinds = set()
    try:
        for place, read in rows_in("train_file", path):
            try:
                row = read()
                columns = _layout(row, stage)
                if rows and columns != tuple(rows[0]):
                    raise ValueError(
                        f"has the columns {_listed(columns)}, but the first row has "
                        f"{_listed(tuple(rows[0]))}"
                    )
                kinds.add(_is_conversation(row, columns))
                if len(kinds) > 1:
                    raise ValueError("all rows must be texts, or all rows must be conversations")
            except ValueError as error:
                raise ValueError(f"{option} {path}: {place}: {error}") from None
            rows.append({name: row[name] for name in columns})
            unused |= dict.fromkeys(name for name in row if name not in columns)
    except ValueError as error:
        # The file reader's message names a setting of a task instead of the option.
        raise ValueError(str(error).replace("task.train_file=", f"{option} ")) from None
    if not rows:
        raise ValueError(f"{option} {path}: has no rows")
    return Rows(rows=rows, conversations=kinds == {True}, unused=tuple(unused))


def _layout(row: Any, stage: Stage) -> tuple[str, ...]:
    """Return the columns of the first layout that the row has."""
    if not isinstance(row, dict):
        raise ValueError(f"must be an object, got {type(row).__name__}")
    for name in UNSUPPORTED:
        if row.get(name) is not None:
            raise ValueError(f"the column {name} is not supported")
    for columns in stage.layouts:
        if set(columns) <= set(row):
            return columns
    valid = ", or ".join(_listed(columns) for columns in stage.layouts)
    raise ValueError(f"has the columns {_listed(tuple(row))}; {stage.name} needs {valid}")


def _listed(names: Sequence[str]) -> str:
    return " + ".join(names)


def _is_conversation(row: Row, columns: Sequence[str]) -> bool:
    """Return True if the values are lists of messages, and False if they are texts.

    Raises:
        ValueError: If a value is neither, or if the values differ in kind.
    """
    found = {isinstance(row[name], list) for name in columns}
    if len(found) > 1:
        raise ValueError(f"{_listed(columns)} must all be texts, or all be lists of messages")
    (conversation,) = found
    for name in columns:
        value = row[name]
        if not conversation:
            mistake = None if is_text(value) else NO_PROMPT
        elif name == "prompt":
            mistake = mistake_in_prompt(value, tools=True)
        else:
            mistake = _mistake_in_response(value)
        if mistake is not None:
            raise ValueError(f"{name} {mistake}")
    return conversation


def _mistake_in_response(messages: Sequence[Any]) -> str | None:
    """Return the mistake in a conversation, or None. The last message must be the model's."""
    if not messages:
        return "must have a message"
    mistake = mistake_in_messages(messages, tools=True)
    if mistake is None and messages[-1]["role"] != "assistant":
        mistake = "must end with a message whose role is assistant"
    return mistake


def hold_out(rows: Rows, seed: int) -> tuple[Rows, Rows]:
    """Return the rows to train on and the held-out rows. Both keep the order of the file.

    Raises:
        ValueError: If there is only one row. The message completes a sentence about the file.
    """
    count = len(rows.rows)
    if count < 2:
        raise ValueError(
            f"has {plural(count, 'row')}; at least 2 are needed, because one is held out"
        )
    share = min(MOST_HELD_OUT, max(1, round(count * HELD_OUT_SHARE)))
    held_out = set(Random(f"held out {seed}").sample(range(count), share))
    parts: tuple[list[Row], list[Row]] = ([], [])
    for i, row in enumerate(rows.rows):
        parts[i in held_out].append(row)
    train, other = (replace(rows, rows=part) for part in parts)
    return train, other
