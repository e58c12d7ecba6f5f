r"""Whether an answer equals the true one: as a text, as a number, or part by part.

Lists, sets, tuples and intervals are compared here part by part, because a parser of mathematics
takes `(1,2)` for an interval and does not see that `2\le x<5` is one. What is left open, a formula
of any other kind, is for `decide` to say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from grpo_trainable.tasks.quantities import quantity

LONGEST_ANSWER = 512  # characters; no true answer is as long, and a parser may choke on it

Decide: TypeAlias = Callable[[str, str], bool]  # whether an answer equals a truth, both in LaTeX

_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"))
_DOLLAR = re.compile(r"(?<!\\)\$")
_PREFIX = re.compile(r"\A(?:the\s+)?(?:final\s+)?answer(?:\s+is|:)\s*:?\s*(?=\S)", re.IGNORECASE)
_COSMETICS = (
    (r"\\(?:left|right|displaystyle|limits)(?![a-zA-Z])", ""),
    (r"(?<!\\)\\[!,;: ]|\{,\}(?=\d{3})", ""),
    (r"~|\\q?quad(?![a-zA-Z])", " "),
    (r"\\[dt]frac(?![a-zA-Z])", r"\\frac"),
    (r"\\(?:textbf|textit|textrm|mathrm|mathbf|mbox)(?=\s*\{)", r"\\text"),
    ("\N{MINUS SIGN}", "-"),
    ("π", r"\\pi "),
    (r"∞|(?<![\\a-zA-Z])infinity(?![a-zA-Z])", r"\\infty "),
)


def equal(answer: str, truth: str, decide: Decide) -> bool:
    """Whether `answer` equals `truth`, whatever their typography."""
    if len(answer) > max(LONGEST_ANSWER, 2 * len(truth)):
        return False
    return _equal(plain(answer), plain(truth), decide)


def decide_exactly(answer: str, truth: str) -> bool:
    """Leaves nothing open: what is neither the same text nor the same number is not equal."""
    return False


def without_name(text: str) -> str:
    """`3` of a plain `x = 3`."""
    return _named(text)[1]


def _equal(answer: str, truth: str, decide: Decide) -> bool:
    (name, answer), (true_name, truth) = _named(answer), _named(truth)
    if not answer or not truth or (name and true_name and name != true_name):
        return False
    if same_letters(answer) == same_letters(truth):
        return True
    ours, theirs = quantity(answer), quantity(truth)
    if ours is not None and theirs is not None:
        return ours.equals(theirs)
    parts, true_parts = parts_of(answer), parts_of(truth)
    if parts is not None and true_parts is not None:
        return parts.equals(true_parts, decide)
    if (parts is None or theirs is None) and (true_parts is None or ours is None):
        return decide(answer, truth)
    return False  # several values are not one number


# ---- Texts -----------------------------------------------------------------------------------


def plain(text: str) -> str:
    """LaTeX that means the same, without what is only typography."""
    text = _unwrapped(_PREFIX.sub("", _unwrapped(text)))
    if len(_DOLLAR.findall(text)) % 2 == 0:  # more formulas, with words between them
        text = _DOLLAR.sub("", text)
    for pattern, replacement in _COSMETICS:
        text = re.sub(pattern, replacement, text)
    return text.strip()


def _unwrapped(text: str) -> str:
    """`text` without the marks of a formula around it, nor a full stop."""
    text = text.strip().rstrip(".").strip()
    for opening, closing in _DELIMITERS:
        inner = text[len(opening) : -len(closing)]
        if text == f"{opening}{inner}{closing}" and opening not in inner:
            return inner.strip().rstrip(".").strip()
    return text


def same_letters(text: str) -> str:
    """What two spellings of the same text have in common."""
    text = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\s+", " ", text.strip())
    text = re.sub(r"(?<!\w) | (?!\w)", "", text)
    text = re.sub(r"^\(([A-Za-z])\)$", r"\1", text)  # a choice among several
    return text.casefold() if re.fullmatch(r"[^\W\d_]{2,}(?: [^\W\d_]+)*", text) else text


def _named(text: str) -> tuple[str, str]:
    """`("x", "3")` from `x = 3`; an empty name where there is none."""
    match = re.fullmatch(r"([a-zA-Z])\s*=\s*([^=]+)", text)
    return (match[1], match[2]) if match else ("", text)


# ---- Parts -----------------------------------------------------------------------------------

_SET, _UNION = "{}", "∪"
_SIGNS = (  # what separates and encloses parts, as single characters
    (r"\\leq?(?:slant)?(?![a-zA-Z])|<=", "≤"),
    (r"\\geq?(?:slant)?(?![a-zA-Z])|>=", "≥"),
    (r"\\lt(?![a-zA-Z])", "<"),
    (r"\\gt(?![a-zA-Z])", ">"),
    (r"\\cup(?![a-zA-Z])", _UNION),
    (r"\\\{", "⦃"),
    (r"\\\}", "⦄"),
    (r"\\text\s*\{\s*(and|or)\s*\}", r" \1 "),
    (r"\s*,?\s+(?:and|or)\s+", ","),
)
_LATEX = {"≤": r"\le ", "≥": r"\ge ", _UNION: r"\cup ", "⦃": r"\{", "⦄": r"\}"}
_OPENING, _CLOSING = "([{⦃", ")]}⦄"
_RISING = re.compile(r"([^<>≤≥=]+)([<≤])[a-zA-Z]([<≤])([^<>≤≥=]+)")
_FALLING = re.compile(r"([^<>≤≥=]+)([>≥])[a-zA-Z]([>≥])([^<>≤≥=]+)")
_ABOVE = re.compile(r"(?:[a-zA-Z]([>≥])([^<>≤≥=]+)|([^<>≤≥=]+)([<≤])[a-zA-Z])")
_BELOW = re.compile(r"(?:[a-zA-Z]([<≤])([^<>≤≥=]+)|([^<>≤≥=]+)([>≥])[a-zA-Z])")


@dataclass(frozen=True, slots=True)
class Parts:
    """What an answer is made of, in LaTeX."""

    kind: str  # the brackets of a tuple or an interval; else a set, or a union
    items: Sequence[str]

    @property
    def is_ordered(self) -> bool:
        return self.kind not in (_SET, _UNION)

    def equals(self, other: Parts, decide: Decide) -> bool:
        if self.kind != other.kind or len(self.items) != len(other.items):
            return False
        if self.is_ordered:
            pairs = zip(self.items, other.items, strict=True)
            return all(_equal(item, true, decide) for item, true in pairs)
        left = list(other.items)
        for item in self.items:
            pairs = ((true, how) for how in (decide_exactly, decide) for true in left)
            same = next((true for true, how in pairs if _equal(item, true, how)), None)
            if same is None:
                return False
            left.remove(same)
        return True


def parts_of(text: str) -> Parts | None:
    """The parts of an answer that has several; None of one that has not."""
    for pattern, sign in _SIGNS:
        text = re.sub(pattern, sign, text)
    text = re.sub(r"^[a-zA-Z]\s*\\in(?![a-zA-Z])", "", text).strip()
    kind, items = _UNION, _split(text, _UNION)
    if len(items) < 2:
        interval = _interval(text)
        if interval is not None:
            return interval
        kind, items = _SET, _split(text, ",")
    if len(items) < 2 and text[:1] in _OPENING and text[-1:] in _CLOSING:
        brackets = text[:1] + text[-1:]
        kind = _SET if brackets in ("⦃⦄", "{}") else brackets
        items = _split(text[1:-1], ",")
    return Parts(kind, [_in_latex(item) for item in items]) if len(items) > 1 else None


def _split(text: str, separator: str) -> list[str]:
    """`text` split where no bracket is open; nothing where brackets do not match."""
    items, depth = [""], 0
    for character in text:
        depth += (character in _OPENING) - (character in _CLOSING)
        if depth < 0:
            return []
        if character == separator and depth == 0:
            items.append("")
        else:
            items[-1] += character
    return items if depth == 0 else []


def _interval(text: str) -> Parts | None:
    """The interval that an inequality for one letter means."""
    text = re.sub(r"\s", "", text)
    if match := _RISING.fullmatch(text):
        low, from_, to, high = match.groups()
    elif match := _FALLING.fullmatch(text):
        high, to, from_, low = match.groups()
    elif match := _ABOVE.fullmatch(text):
        low, from_, to, high = match[2] or match[3], match[1] or match[4], "<", r"\infty"
    elif match := _BELOW.fullmatch(text):
        low, from_, to, high = r"-\infty", "<", match[1] or match[4], match[2] or match[3]
    else:
        return None
    brackets = ("[" if from_ in "≤≥" else "(") + ("]" if to in "≤≥" else ")")
    return Parts(brackets, [_in_latex(low), _in_latex(high)])


def _in_latex(text: str) -> str:
    for sign, latex in _LATEX.items():
        text = text.replace(sign, latex)
    return text.strip()
