r"""Compare an answer with the true answer: as text, as a number, or part by part.

The form of the true answer decides the comparison. If the true answer is a number, only a number is
right: `12*37` equals 444, but it only repeats the question. Lists, sets, tuples, intervals and
matrices are compared part by part. No mathematics parser is used for these, because a parser would
read `(1,2)` as an interval, but would not read `2\le x<5` as one. The caller's function `decide`
compares all other formulas. An answer is wrong if it leaves more calculation to do than the true
answer does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from grpo_trainable.tasks.quantities import as_number, quantity

# A number of characters. Few true answers are longer, and a parser may hang on longer text.
LONGEST_ANSWER = 512

# Returns True if an answer (first) equals a true answer (second), both in LaTeX.
Decide: TypeAlias = Callable[[str, str], bool]

_DELIMITERS = (
    *(("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**")),
    *((r"\boxed{", "}"), (r"\fbox{", "}")),
)
_DOLLAR = re.compile(r"(?<!\\)\$")
_PREFIX = re.compile(r"\A(?:the\s+)?(?:final\s+)?answer(?:\s+is|:)\s*:?\s*(?=\S)", re.IGNORECASE)
_COSMETICS = (
    (r"\\(?:left|right|displaystyle|limits)(?![a-zA-Z])", ""),
    (r",\\!\s*(?=\d{3})", ","),
    (r"(?<!\\)\\[!,;: ]|\{,\}(?=\d{3})", ""),
    (r"~|\\q?quad(?![a-zA-Z])", " "),
    (r"\\[cdt]frac(?![a-zA-Z])", r"\\frac"),
    (r"\{([^{}]*)\\over(?![a-zA-Z])([^{}]*)\}", r"\\frac{\1}{\2}"),
    (r"\\(?:text[a-z]+|mathrm|mathbf|mbox)(?=\s*\{)", r"\\text"),
    (r"\\operatorname\*?\s*\{([a-zA-Z]+)\}", r"\\\1 "),
    (r"\\mathbb\s+([A-Z])", r"\\mathbb{\1}"),
    (r"\\varnothing(?![a-zA-Z])", r"\\emptyset"),
    (r"\\approx(?![a-zA-Z])", "≈"),
    (r"^(\\(?!pi)[a-z]+|[a-zA-Z]*)\s*≈", r"\1="),
    (r"≈.*$", ""),
    ("\N{MINUS SIGN}", "-"),
    ("²", "^2"),
    ("³", "^3"),
    ("×", r"\\times "),
    ("·", r"\\cdot "),
    (r"π|(?<![\\a-zA-Z])pi(?![a-zA-Z])", r"\\pi "),
    (r"√|(?<![\\a-zA-Z])sqrt(?![a-zA-Z])", r"\\sqrt"),
    (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"∞|(?<![\\a-zA-Z])infinity(?![a-zA-Z])", r"\\infty "),
)


def equal(answer: str, truth: str, decide: Decide) -> bool:
    """Return True if `answer` equals `truth`, regardless of typography."""
    if len(answer) > max(LONGEST_ANSWER, 2 * len(truth)):
        return False
    return _equal(plain(answer), plain(truth), decide)


def decide_exactly(answer: str, truth: str) -> bool:
    """Return False, so formulas are unequal unless their text, number or parts are the same."""
    return False


def without_name(text: str) -> str:
    """Return the value of a named result, such as `3` for `x = 3`. `text` comes from `plain`."""
    return _named(text)[1]


def _equal(answer: str, truth: str, decide: Decide) -> bool:
    true_name, truth = _named(truth)
    name, answer = _named(answer, last_side="=" not in truth)
    if not answer or not truth:
        return False
    if name and true_name and name != true_name:
        return (name, answer) == (truth, true_name)  # x = y equals y = x
    if same_letters(answer) == same_letters(truth):
        return True
    number, true_number = quantity(answer), quantity(truth)
    if true_number is not None:
        number = number or quantity(as_number(answer))
        return number is not None and number.answers(true_number)
    parts, true_parts = parts_of(answer), parts_of(truth)
    if parts is not None and true_parts is not None:
        return parts.equals(true_parts, decide)
    if number is not None and true_parts is not None:
        return False  # one number cannot equal several values
    return not leaves_more(answer, truth) and decide(answer, truth)


# ---- Texts -----------------------------------------------------------------------------------


def plain(text: str) -> str:
    """Remove typographic markup from LaTeX, without changing the meaning."""
    text = _unwrapped(_PREFIX.sub("", _unwrapped(text)))
    if len(_DOLLAR.findall(text)) % 2 == 0:  # $ in pairs, perhaps around several formulas
        text = _DOLLAR.sub("", text)
    for pattern, replacement in _COSMETICS:
        text = re.sub(pattern, replacement, text)
    return " ".join(text.split())


def _unwrapped(text: str) -> str:
    """Remove the delimiters around a formula, and a full stop at its end."""
    text = text.strip().rstrip(".").strip()
    for opening, closing in _DELIMITERS:
        inner = text[len(opening) : -len(closing)]
        if text == f"{opening}{inner}{closing}" and opening not in inner:
            return inner.strip().rstrip(".").strip()
    return text


def same_letters(text: str) -> str:
    r"""Return text that is the same for different spellings of an answer.

    This normalises spaces, `\text` and the letter case of words.
    """
    text = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\s+", " ", text.strip())
    text = re.sub(r"(?<!\w) | (?!\w)|(?<=\d) (?=[A-Za-z])", "", text)
    text = re.sub(r"^\(([A-Za-z])\)$", r"\1", text)  # an option of a multiple-choice question
    return text.casefold() if re.fullmatch(r"[^\W\d_]{2,}(?: [^\W\d_]+)*", text) else text


# ---- Names -----------------------------------------------------------------------------------

_NAME = re.compile(r"[a-zA-Z](?:\([a-zA-Z]\))?")
# A name such as f(x), or a side of an equation without letters, such as 12*37.
_ANY_NAME = re.compile(r"[a-zA-Z](?:\^\{-1\})?\([a-zA-Z]\)|[^a-zA-Z]*")
_MEMBER = re.compile(r"^([a-zA-Z])\s*\\in(?![a-zA-Z])")


def _named(text: str, *, last_side: bool = False) -> tuple[str, str]:
    r"""Return the name and the value of a result: `("x", "3")` for `x = 3`, `3 = x` or `x\in 3`.

    The name is empty if the result has none. A name such as `f(x)` is also left out, because the
    true answer need not have it.

    Args:
        text: Result of `plain`.
        last_side: If True, the value is the last side of an equation, as in `A = 12*37 = 444`.
    """
    name, *others = _sides(text)
    if name and len(others) == 1 and _NAME.fullmatch(others[0]) and not _NAME.fullmatch(name):
        name, others = others[0], [name]
    is_named = len(others) == 1 and _NAME.fullmatch(name)
    if not is_named and not (last_side and others):
        return "", text
    return "" if _ANY_NAME.fullmatch(name) else name, others[-1]


def _sides(text: str) -> list[str]:
    """Return the sides of an equation, or the whole text if it is not exactly one equation."""
    sides = [side.strip() for side in _split(_MEMBER.sub(r"\1=", text), "=")]
    is_other_relation = re.search(r"[<>!≤≥≠]|\\not", text)
    are_several = any(parts_of(side) is not None for side in sides[1:-1])  # a = 2, b = 3
    if is_other_relation or are_several or not sides or not sides[-1]:
        return [text]
    return sides


# ---- Parts -----------------------------------------------------------------------------------

_SET, _UNION = "{}", "∪"
_SIGNS = (  # separators and brackets -> single characters
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
    """Parts of an answer, in LaTeX."""

    kind: str  # brackets of a tuple, interval or set; ∪ for a union; or row lengths of a matrix
    items: Sequence[str]

    @property
    def is_ordered(self) -> bool:
        """Return True if the order of the parts matters."""
        return self.kind not in (_SET, _UNION)

    def equals(self, other: Parts, decide: Decide) -> bool:
        """Return True if both answers have the same kind and equal parts."""
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
    """Return the parts of an answer, or None if it has fewer than two."""
    if matrix := _matrix(text):
        return matrix
    for pattern, sign in _SIGNS:
        text = re.sub(pattern, sign, text)
    text = text.strip()
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
    if kind == _SET:
        items = [signed for item in items for signed in _with_each_sign(item)]
        kind = _UNION if all(map(_interval, items)) else _SET  # such as x < -2 or x > 2
    return Parts(kind, [_in_latex(item) for item in items]) if len(items) > 1 else None


def _matrix(text: str) -> Parts | None:
    """Return the entries of a matrix row by row. The kind of a matrix contains its row lengths."""
    match = re.fullmatch(r"\\begin\{[bp]?matrix\}(.*)\\end\{[bp]?matrix\}", text, re.DOTALL)
    if match is None or r"\begin" in match[1]:
        return None
    rows = [row.split("&") for row in match[1].strip().removesuffix(r"\\").split(r"\\")]
    kind = f"matrix {[len(row) for row in rows]}"
    return Parts(kind, [entry.strip() for row in rows for entry in row])


def _with_each_sign(text: str) -> list[str]:
    r"""Expand a plus-minus sign: return `3` and `-3` for `\pm 3`."""
    halves = re.split(r"\\pm(?![a-zA-Z])|±", text)
    if len(halves) != 2:
        return [text]
    plus = "+" if re.search(r"[^=\s]\s*$", halves[0]) else ""
    return [f"{halves[0]}{sign}{halves[1]}".strip() for sign in (plus, "-")]


def _split(text: str, separator: str) -> list[str]:
    """Split `text` outside brackets. Return an empty list if the brackets do not match."""
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
    """Return the interval that an inequality in one variable describes, or None."""
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


# ---- Work that a formula leaves to do ------------------------------------------------------------

# `4\pi+5\pi` leaves more work than `9\pi`, and an integral leaves even more.
_POWERS = re.compile(r"[\^_]\{[^{}]*[a-zA-Z][^{}]*\}")  # the sum in x^{n+1} does not count as work
_WORK = (  # kinds of work, from the least to the most
    # Sums, relations, products of numerals, powers of numerals.
    re.compile(
        r"(?<=[\w)}\]!])\s*[-+±]|\\pm(?![a-zA-Z])|[=<>≤≥≠]|\\(?:[lg]eq?|neq?|[lg]t)(?![a-zA-Z])"
        r"|\d\s*(?:\*|\\cdot|\\times)\s*\d+(?!\s*[\d^])"
        r"|(?<![\w.])\d+\s*\^\s*(?:\d|\{\s*-?\d+\s*\})"
    ),
    re.compile(
        r"\\(?:(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|log|ln|lg|[dt]?binom|choose)(?![a-zA-Z])"
        r"|(?<=[\w)}])!"
    ),
    re.compile(
        r"\\(?:i*int|oint|sum|prod|lim|max|min|det|[bp]?mod|div|cap|setminus|[lr]floor|[lr]ceil)"
        r"(?![a-zA-Z])|(?<![a-zA-Z])(?:gcd|lcm|floor|ceil)(?![a-zA-Z])"
        r"|\\frac\s*\{\s*d[^{}]*\}\s*\{\s*d\s*[a-z]|÷"
        r"|\\begin\{vmatrix\}|\\end\{\w+\}\s*[^\s.]"  # matrices that are added or multiplied
    ),
)


def leaves_more(answer: str, truth: str) -> bool:
    r"""Return True if `answer` leaves more calculation to do than `truth`. Both are in LaTeX.

    An answer that merely restates the question, such as `4\pi+5\pi` for `9\pi`, has the same value
    as the true answer. Only its form shows that the work has not been done.
    """
    return _work(answer) > _work(truth)


def _work(formula: str) -> int:
    formula = _POWERS.sub("", formula)
    return max((rank for rank, kind in enumerate(_WORK, 1) if kind.search(formula)), default=0)
