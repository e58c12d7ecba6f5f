"""Let a model write a prompt set, batch by batch, so that an interrupted command can continue.

The directory contains:

- `asked.json`: the settings of the set;
- `written.jsonl`: one line per finished item, in order of completion;
- at the end, the set itself: `train.jsonl`, `eval.jsonl` and `prompts.parquet`.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from grpo_trainable.storage.atomic import replacing
from grpo_trainable.text import plural
from grpo_trainable.tools.asked import record_or_match
from grpo_trainable.tools.prompt_sets.keyword import Item, plain_prompt, prompt_in

ASKED, WRITTEN = "asked.json", "written.jsonl"
TRAIN, EVAL, TABLE = "train.jsonl", "eval.jsonl", "prompts.parquet"


class Writer(Protocol):
    """Interface of a language model that writes prompts."""

    def write(self, items: Sequence[Item], attempt: int) -> list[str]:
        """Return the model's answer to each item, in order. Each attempt gives a new text."""
        ...

    def close(self) -> None:
        """Release the resources of the model."""
        ...


@dataclass(frozen=True, kw_only=True)
class Made:
    """Counts of a finished prompt set."""

    train: int
    eval: int
    rejected: int  # items without a usable prompt after all attempts
    repeated: int  # prompts equal to an earlier prompt, except for case and punctuation


class PromptSet:
    """The directory of a new or interrupted prompt set.

    Raises:
        ValueError: If the directory contains something else, or a set with different settings. The
            message is one line.
        OSError: If the directory cannot be written.
    """

    def __init__(self, directory: Path, asked: Mapping[str, Any], items: Sequence[Item]) -> None:
        """Create or open the directory.

        Args:
            directory: Directory of the set.
            asked: All settings that determine the set, as plain data.
            items: Prompts to write.
        """
        self._directory, self._items = directory, items
        directory.mkdir(parents=True, exist_ok=True)
        record_or_match(
            directory / ASKED,
            asked,
            what="a set",
            advice="A set cannot be changed or enlarged: repeat",
        )
        self._prompts = self._read()  # item index -> prompt, or None if no answer was usable

    @property
    def done(self) -> int:
        """Number of finished items."""
        return len(self._prompts)

    def write(
        self, writer: Writer, *, batch: int, attempts: int, progress: Callable[[int], object]
    ) -> None:
        """Let the model write every unfinished item.

        Args:
            writer: The model.
            batch: Number of items in a batch.
            attempts: Maximum number of attempts per item.
            progress: Called after each batch with the number of items in the batch.
        """
        rest = [item for item in self._items if item.index not in self._prompts]
        with (self._directory / WRITTEN).open("ab") as log:
            for start in range(0, len(rest), batch):
                part = rest[start : start + batch]
                prompts = _written(writer, part, attempts)
                for item in part:
                    self._prompts[item.index] = prompts.get(item.index)
                    line = {"index": item.index, "prompt": prompts.get(item.index)}
                    log.write(json.dumps(line).encode() + b"\n")
                log.flush()
                os.fsync(log.fileno())
                progress(len(part))

    def finish(self) -> Made:
        """Write the set.

        Raises:
            ValueError: If the set has no training prompts or no held-out prompts. The message is
                one line.
        """
        written = [(item, self._prompts[item.index]) for item in self._items]
        usable = [(item, prompt) for item, prompt in written if prompt is not None]
        first: dict[str, tuple[Item, str]] = {}
        for item, prompt in usable:
            first.setdefault(plain_prompt(prompt), (item, prompt))
        rows = [
            {"prompt": prompt, "keywords": list(item.keywords), "heldout": item.heldout}
            for item, prompt in first.values()
        ]
        sides = Counter(row["heldout"] for row in rows)
        made = Made(
            train=sides[False],
            eval=sides[True],
            rejected=len(written) - len(usable),
            repeated=len(usable) - len(rows),
        )
        if not (made.train and made.eval):
            raise ValueError(
                f"{plural(made.train, 'prompt')} to train on and {made.eval} held out, but each "
                f"side needs one ({made.rejected} of {len(written)} had no usable answer, "
                f"{made.repeated} were repeated); request more prompts or use another model"
            )
        self._save(rows)
        return made

    def _read(self) -> dict[int, str | None]:
        """Read the finished items. Remove a partial last line that a killed process left."""
        file = self._directory / WRITTEN
        content = file.read_bytes() if file.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            os.truncate(file, len(whole))
        found: dict[int, str | None] = {}
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                row = json.loads(line)
                found[row["index"]] = row["prompt"]
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"{file}: line {number} is damaged; remove the line") from None
        return found

    def _save(self, rows: Sequence[Mapping[str, Any]]) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        for name, heldout in ((TRAIN, False), (EVAL, True)):
            lines = [
                json.dumps(
                    {"prompt": row["prompt"], "keywords": row["keywords"]}, ensure_ascii=False
                )
                for row in rows
                if row["heldout"] == heldout
            ]
            with replacing(self._directory / name, durable=True) as file:
                file.write("".join(f"{line}\n" for line in lines).encode())
        schema = pa.schema(
            [("prompt", pa.string()), ("keywords", pa.list_(pa.string())), ("heldout", pa.bool_())]
        )
        with replacing(self._directory / TABLE, durable=True) as file:
            pq.write_table(pa.Table.from_pylist(list(rows), schema), file)


def _written(writer: Writer, items: Sequence[Item], attempts: int) -> dict[int, str]:
    """Let the model try each item up to `attempts` times, and return the usable prompts."""
    found: dict[int, str] = {}
    for attempt in range(attempts):
        rest = [item for item in items if item.index not in found]
        if not rest:
            break
        for item, text in zip(rest, writer.write(rest, attempt), strict=True):
            prompt = prompt_in(text, item.keywords)
            if prompt is not None:
                found[item.index] = prompt
    return found
