"""Canonical spellings of answers, for majority votes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from grpo_trainable.tasks.equality import (
    LONGEST_ANSWER,
    parts_of,
    plain,
    same_letters,
    without_name,
)
from grpo_trainable.tasks.quantities import quantity

# Returns the canonical spelling of a formula, or None if it cannot be read.
Spell: TypeAlias = Callable[[str], str | None]


def canonical(answer: str, spell: Spell = lambda formula: None) -> str:
    """Return the canonical text of an answer.

    Answers that are equal in value usually get the same text, but not always, because each answer
    is parsed independently of all others. A number becomes a fraction in lowest terms, without its
    unit, and 30% becomes 3/10. A set is sorted. Any other formula becomes the result of `spell`, or
    else its text without typographic markup. An answer that is too long is truncated.

    Args:
        answer: The answer in a response.
        spell: Returns the canonical spelling of a formula, or None.
    """
    if len(answer) > LONGEST_ANSWER:
        return answer[:LONGEST_ANSWER]
    return _canonical(without_name(plain(answer)), spell)


def _canonical(text: str, spell: Spell) -> str:
    found = quantity(text)
    if found is not None:
        return str(found.value / 100 if found.percent else found.value)
    parts = parts_of(text)
    if parts is None:
        return spell(text) or same_letters(text)
    items = [_canonical(item, spell) for item in parts.items]
    return f"{parts.kind} {', '.join(items if parts.is_ordered else sorted(items))}"
