"""A corpus of the user's: a JSONL file with `prompt` and `response` a line."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random

from grpo_trainable.tools.pretraining.corpus import Corpus, Document
from grpo_trainable.tools.pretraining.recipe import Recipe
from grpo_trainable.tools.pretraining.story_corpus import measure_stories

HELD_OUT_SHARE = 0.05  # share of the lines, at most MOST_HELD_OUT of them
MOST_HELD_OUT = 1000
TOKENIZER_DOCUMENTS = 20_000  # they train as good a tokenizer as all documents, and sooner


def file_corpus(path: str, recipe: Recipe) -> Corpus:
    """The corpus of a file, a share of it held out.

    Raises:
        ValueError: one line, with file and line number where a line is at fault.
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
    """The documents of a JSONL file, each under its place, "FILE:LINE".

    A prompt gets a closing newline if it has none, as a task's prompts do. Blank lines are
    skipped.

    Raises:
        ValueError: one line, with file and line number where a line is at fault.
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
            f"--corpus {path}: holds {len(documents)} documents; at least 2 are needed, "
            "one of which is held out to measure the loss"
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
        raise ValueError(f"must be an object with prompt and response, got {type(row).__name__}")
    for key in ("prompt", "response"):
        text = row.get(key)
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{key} must be non-empty text")
        # JSON can spell half a surrogate pair, which is no text.
        if re.search("[\ud800-\udfff]", text):
            raise ValueError(f"{key} holds an unpaired surrogate, which UTF-8 cannot encode")
    prompt = row["prompt"]
    return Document(prompt if prompt.endswith("\n") else prompt + "\n", row["response"])


def split_documents(
    documents: Sequence[Document], seed: int
) -> tuple[list[Document], list[Document]]:
    """Training and held-out documents, both in random order."""
    shuffled = Random(f"split {seed}").sample(documents, len(documents))
    held_out = min(MOST_HELD_OUT, max(1, round(len(documents) * HELD_OUT_SHARE)))
    return shuffled[held_out:], shuffled[:held_out]
