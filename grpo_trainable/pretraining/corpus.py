"""The documents a policy is pretrained on: generated stories, or lines of a JSONL file.

The story corpus comes in an order, and the order is what makes it work: documents that all hold
their keyword teach copying; then come documents of which only a share holds it, and that share sets
the inclusion rate that GRPO starts from. Without the first ones the policy is fluent but never
copies, and GRPO learns nothing. All are of one length, so that nothing but the keyword itself tells
a story that holds it from one that does not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from grpo_trainable.models.tokenizer import Tokenizer
from grpo_trainable.pretraining.recipe import Recipe
from grpo_trainable.pretraining.stories import Document, Storyteller
from grpo_trainable.tasks.keyword import NOUNS_FILE, read_keywords

FRONT_SEVERAL_SHARE = 2 / 3  # prompts with several keywords: copying is learned sooner with more
HELD_OUT_STORIES = 1000
HELD_OUT_SHARE = 0.05  # the share of lines of --corpus, at most HELD_OUT_STORIES


@dataclass(frozen=True, slots=True)
class Row:
    """A document in token ids, end-of-text included, cut to the context."""

    ids: list[int]
    prompt_length: int


def story_corpus(recipe: Recipe) -> tuple[list[Document], list[Document]]:
    """Training documents in the order they are to be seen, and fresh ones held out."""
    nouns = read_keywords(NOUNS_FILE)
    count = recipe.steps * recipe.batch_size
    teller = Storyteller(nouns, Random(f"corpus {recipe.seed}"))
    front = round(count * recipe.front_share)
    documents = [teller.document(1.0, FRONT_SEVERAL_SHARE) for _ in range(front)]
    documents += [teller.document(recipe.keyword_share) for _ in range(count - front)]
    fresh = Storyteller(nouns, Random(f"held-out {recipe.seed}"))
    return documents, [fresh.document(recipe.keyword_share) for _ in range(HELD_OUT_STORIES)]


def read_corpus(path: str | Path) -> dict[str, Document]:
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


def split_corpus(documents: Sequence[Document], seed: int) -> tuple[list[Document], list[Document]]:
    """Training and held-out documents, both in random order."""
    shuffled = Random(f"split {seed}").sample(documents, len(documents))
    held_out = min(HELD_OUT_STORIES, max(1, round(len(documents) * HELD_OUT_SHARE)))
    return shuffled[held_out:], shuffled[:held_out]


def check_prompts(
    tokenizer: Tokenizer, documents: dict[str, Document], context_length: int
) -> None:
    """Checks that every prompt leaves room for a response.

    Raises:
        ValueError: one does not; names its file and line.
    """
    for place, document in documents.items():
        length = len(tokenizer.encode(document.prompt))
        if length > context_length:
            raise ValueError(
                f"--corpus {place}: a prompt of {length} tokens leaves no room for a response in "
                f"the context of {context_length}"
            )


def encode(tokenizer: Tokenizer, document: Document, context_length: int) -> Row:
    prompt = tokenizer.encode(document.prompt)
    ids = [*prompt, *tokenizer.encode(document.response), tokenizer.eos_id]
    # One more than the context: the last id is only ever a target.
    return Row(ids[: context_length + 1], len(prompt))
