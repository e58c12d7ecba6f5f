"""The corpus that a policy is pretrained on, and its encoding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from grpo_trainable.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from grpo_trainable.models.transformer import TransformerLM


@dataclass(frozen=True, slots=True)
class Document:
    """A prompt and the response that a policy learns."""

    prompt: str
    response: str


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """Measurements of a policy, for its model card."""

    facts: dict[str, Any]  # name -> value, as JSON
    how: dict[str, str]  # name -> method of measurement
    rows: list[tuple[str, str, str]]  # table rows: (description, formatted value, name of the fact)
    sampling: str  # the settings with which samples were drawn
    headline: str  # the most important values, in one line


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Documents to train a policy on, and the measurements to make afterwards."""

    documents: Sequence[Document]  # documents to train on
    held_out: Sequence[Document]
    tokenizer_texts: Sequence[str]
    digits_alone: bool = False  # True: each digit is a separate token
    shuffle: bool = False  # True: train on the documents in random order
    places: Mapping[str, Document] = field(default_factory=dict)  # "FILE:LINE" -> document
    files: Mapping[str, str] = field(default_factory=dict)  # files to write next to the policy
    # Settings of a trial that starts from the policy, in addition to model.path. {out} is the
    # directory of the policy.
    settings: Mapping[str, str] = field(default_factory=dict)
    # Measures a policy, given its tokenizer and a seed.
    measure: Callable[[TransformerLM, Tokenizer, int], Measurements]


@dataclass(frozen=True, slots=True)
class Row:
    """Token ids of a document, including end-of-text, truncated to fit the context."""

    ids: list[int]
    prompt_length: int


def encode(tokenizer: Tokenizer, document: Document, context_length: int) -> Row:
    """Encode a document, and truncate it to fit the context."""
    prompt = tokenizer.encode(document.prompt)
    ids = [*prompt, *tokenizer.encode(document.response), tokenizer.eos_id]
    # Keep one more id than the context length, because the last id is only a target.
    return Row(ids[: context_length + 1], len(prompt))


def check_prompts(corpus: Corpus, tokenizer: Tokenizer, context_length: int) -> None:
    """Check that every prompt from a file leaves room for a response.

    Raises:
        ValueError: If a prompt leaves no room. The message names the file and the line.
    """
    for place, document in corpus.places.items():
        length = len(tokenizer.encode(document.prompt))
        if length > context_length:
            raise ValueError(
                f"--corpus {place}: a prompt of {length} tokens leaves no room for a response in "
                f"the context of {context_length} tokens"
            )
