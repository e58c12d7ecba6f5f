"""Helpers for text that people read."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any


def plural(number: int, noun: str) -> str:
    """Return the number with its noun: `1 trial`, `2 trials`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def joined(words: Sequence[str]) -> str:
    """Join words as in a sentence: `a`, `a and b`, `a, b and c`."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def written(value: float, form: str) -> str:
    """Return `form.format(value)`, without a minus sign if the value rounds to zero."""
    text = form.format(value)
    return form.format(0.0) if text.startswith("-") and not set("123456789") & set(text) else text


def rate(value: float) -> str:
    """Return a rate with at least two significant digits: `80`, `1.4`, `0.053`."""
    return f"{value:.0f}" if value >= 9.95 else f"{value:.2g}"


def shown_truth(truth: Any) -> str:
    """Return a ground truth in readable form.

    A string, or a list of strings, becomes plain text. Any other value becomes JSON.
    """
    texts = truth if isinstance(truth, list) else [truth]
    words = [text for text in texts if isinstance(text, str)]
    return ", ".join(words) if words == texts else json.dumps(truth, ensure_ascii=False)


def without_module(error: str) -> str:
    """Return the last line of a traceback without the module of the error's class.

    `grpo_trainable.protocol.calls.ActorFailed: rollout failed` becomes `ActorFailed: rollout
    failed`.
    """
    return re.sub(r"^(?:\w+\.)+(?=[A-Z]\w*(?:: |$))", "", error)


def did_you_mean(text: str, names: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return `did you mean NAME?` with the names that begin with `text`, or the most similar name.

    Return None if no name is similar enough.

    Args:
        text: A name that does not exist.
        names: The names to choose from.
        cutoff: Minimum similarity between the text and the name, from 0 to 1.
    """
    names = list(names)
    near = [name for name in names if text and name.startswith(text)]
    near = near or difflib.get_close_matches(text, names, n=1, cutoff=cutoff)
    return f"did you mean {' or '.join(near)}?" if near else None
