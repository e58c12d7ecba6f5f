"""One text for all spellings of an answer, so that a vote can be taken among responses."""

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

# What a formula is, in a spelling of its own; None where it cannot be read.
Spell: TypeAlias = Callable[[str], str | None]


def canonical(answer: str, spell: Spell = lambda formula: None) -> str:
    """The text that stands for `answer`: equal answers have equal ones, as far as each can be read
    by itself.

    A number is a fraction in lowest terms without its unit, 30% is 3/10; a set is sorted; any other
    formula is as `spell` has it, or else its own text without typography. Too long an answer is
    cut.
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
