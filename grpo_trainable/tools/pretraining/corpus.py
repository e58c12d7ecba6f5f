"""What a policy is pretrained on, and how a document becomes token ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from grpo_trainable.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from grpo_trainable.models.transformer import TransformerLM


@dataclass(frozen=True, slots=True)
class Document:
    """What a policy is given, and what it learns to answer."""

    prompt: str
    response: str


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """What was measured of a policy, for its card."""

    facts: dict[str, Any]  # name -> value, as JSON
    how: dict[str, str]  # name -> how it was measured
    rows: list[tuple[str, str, str]]  # rows of a table: what, its value in words, the fact's name
    sampling: str  # how the samples were sampled
    headline: str  # the most important of it, in a line


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The documents of a policy, and what the policy that was trained on them is measured by."""

    documents: Sequence[Document]  # documents to train on
    held_out: Sequence[Document]
    tokenizer_texts: Sequence[str]
    digits_alone: bool = False  # whether each digit is a token of its own
    shuffle: bool = False  # whether documents are used in random order, not in theirs
    places: Mapping[str, Document] = field(default_factory=dict)  # "FILE:LINE", to name one by
    files: Mapping[str, str] = field(default_factory=dict)  # name -> content, put beside the policy
    # Settings of a trial that starts from the policy, besides model.path; {out} is its directory.
    settings: Mapping[str, str] = field(default_factory=dict)
    # What is measured of a policy and its tokenizer, with a seed.
    measure: Callable[[TransformerLM, Tokenizer, int], Measurements]


@dataclass(frozen=True, slots=True)
class Row:
    """A document in token ids, end-of-text included, cut to the context."""

    ids: list[int]
    prompt_length: int


def encode(tokenizer: Tokenizer, document: Document, context_length: int) -> Row:
    prompt = tokenizer.encode(document.prompt)
    ids = [*prompt, *tokenizer.encode(document.response), tokenizer.eos_id]
    # One more than the context: the last id is only ever a target.
    return Row(ids[: context_length + 1], len(prompt))


def check_prompts(corpus: Corpus, tokenizer: Tokenizer, context_length: int) -> None:
    """Checks that every prompt of a file leaves room for a response.

    Raises:
        ValueError: one does not; names its file and line.
    """
    for place, document in corpus.places.items():
        length = len(tokenizer.encode(document.prompt))
        if length > context_length:
            raise ValueError(
                f"--corpus {place}: a prompt of {length} tokens leaves no room for a response in "
                f"the context of {context_length}"
            )
