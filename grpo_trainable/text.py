"""Words of which sentences for people are made."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def plural(number: int, noun: str) -> str:
    """`1 trial`, `2 trials`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def written(value: float, form: str) -> str:
    """`form.format(value)`, in which what is rounded to zero has no minus."""
    text = form.format(value)
    return form.format(0.0) if text.startswith("-") and not set("123456789") & set(text) else text


def did_you_mean(text: str, names: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """`did you mean NAME?` with the name nearest to a text; None where none is as similar as
    `cutoff`, between 0 and 1."""
    near = difflib.get_close_matches(text, list(names), n=1, cutoff=cutoff)
    return f"did you mean {near[0]}?" if near else None
