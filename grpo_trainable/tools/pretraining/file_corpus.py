"""A user's corpus: a JSONL file with `prompt` and `response` on each line."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random

from grpo_trainable.text import plural
from grpo_trainable.tools.pretraining.corpus import Corpus, Document
from grpo_trainable.tools.pretraining.recipe import Recipe
from grpo_trainable.tools.pretraining.story_corpus import measure_stories

HELD_OUT_SHARE = 0.05  # held-out share of the lines, but at most MOST_HELD_OUT lines
MOST_HELD_OUT = 1000
TOKENIZER_DOCUMENTS = 20_000  # more documents take more time and give no better tokenizer


def file_corpus(path: str, recipe: Recipe) -> Corpus:
    """Read a corpus from a file, and hold out a share of it.

    Raises:
        ValueError: If the file cannot be used. The message is one line. For a bad line, the message
            gives the file and the line number.
    """
    places = read_documents(path)
    documents, held_out = split_documents(list(places.values()), recipe.seed)
    return Corpus(
        documents=documents,
        held_out=held_out,
        tokenizer_texts=[d.prompt + d.response for d in documents[:TOKENIZER_DOCUMENTS]],
        shuffle=True,
        places=places,
        measure=partial(measure_stories, held_out, f"lines of {path} that were not trained on"),
    )


def read_documents(path: str | Path) -> dict[str, Document]:
    """Read a JSONL file, and return its documents, keyed by "FILE:LINE".

    A prompt gets a final newline if it has none, as the prompts of a task do. Blank lines are
    skipped.

    Raises:
        ValueError: If the file cannot be used. The message is one line. For a bad line, the message
            gives the file and the line number.
    """
    try:
        lines = Path(path).read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        raise ValueError(f"--corpus {path}: cannot be read: {error.strerror}") from None
    documents = {}
    for number, line in enumerate(lines, start=1):
        if line.strip():
            place = f"{path}:{number}"
            try:
                documents[place] = _parse_document(line)
            except ValueError as error:
                raise ValueError(f"--corpus {place}: {error}") from None
    if len(documents) < 2:
        raise ValueError(
            f"--corpus {path}: has {plural(len(documents), 'document')}; at least 2 are needed, "
            "because one is held out to measure the loss"
        )
    return documents


def _parse_document(line: bytes) -> Document:
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte 0x{line[error.start]:02x})") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(
            f"must be an object with `prompt` and `response`, got {type(row).__name__}"
        )
    for key in ("prompt", "response"):
        text = row.get(key)
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{key} must be non-empty text")
        # JSON can contain half a surrogate pair, which is not valid text.
        if re.search("[\ud800-\udfff]", text):
            raise ValueError(f"{key} contains an unpaired surrogate, which UTF-8 cannot encode")
    prompt = row["prompt"]
    return Document(prompt if prompt.endswith("\n") else prompt + "\n", row["response"])


def split_documents(
    documents: Sequence[Document], seed: int
) -> tuple[list[Document], list[Document]]:
    """Return training and held-out documents, both in random order."""
    shuffled = Random(f"split {seed}").sample(documents, len(documents))
    held_out = min(MOST_HELD_OUT, max(1, round(len(documents) * HELD_OUT_SHARE)))
    return shuffled[held_out:], shuffled[:held_out]
