r"""Numbers as answers have them: `1,234`, `-\frac{3}{4}`, `2\frac12`, `30\%`, `5\text{ cm}`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

LONGEST_NUMBER = 100  # characters

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d*)?|\d+(?:\.\d*)?|\.\d+)"
_WORDS = r"(?:(?:square|cubic)\s+)?[A-Za-z]{2,}(?:\s+per\s+[A-Za-z]+)?"
_QUANTITY = re.compile(
    r"(?P<sign>[+-]?)\s*"
    r"(?:(?P<whole>\d+)(?:\s*(?=\\frac)|\s+(?=\d+\s*/\s*\d)))?"  # whole part of a mixed number
    rf"(?:\\frac\s*(?:\{{\s*(?P<over>-?{_DIGITS})\s*\}}|(?P<over1>\d))"
    rf"\s*(?:\{{\s*(?P<under>{_DIGITS})\s*\}}|(?P<under1>\d))"
    rf"|(?P<number>{_DIGITS})(?:\s*/\s*(?P<divisor>{_DIGITS}))?)"
    r"\s*(?P<percent>%|percent\b)?"
    rf"(?:(?:\s*\\text\s*\{{(?P<text>[^{{}}]*)\}}|\s+(?P<words>{_WORDS}))"
    r"(?:\^\{?(?P<power>[23])\}?)?)?"
)
_AS_WRITTEN = (  # what a quantity may be written with -> what the pattern reads
    (r"\\%", "%"),
    (r"\\?[$€£]", ""),
    (r"\^\s*\{?\s*\\circ\s*\}?|°", r"\\text{degrees}"),
    (r"\\text\s*\{\s*(?:%|percent)\s*\}", "%"),
)
# Words after a number that make another number of it, or another statement.
_NO_UNITS = frozenset(
    (
        *("hundred", "thousand", "million", "billion", "trillion", "dozen", "half", "halves"),
        *("third", "thirds", "quarter", "quarters", "fourths", "percent", "pi", "sqrt", "infinity"),
        *("and", "or", "plus", "minus", "times", "over", "to", "mod", "more", "less", "than"),
        *("sin", "cos", "tan", "log", "ln", "exp", "cdot", "if", "for", "not", "where", "when"),
    )
)


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number, with what follows it."""

    value: Fraction
    percent: bool
    unit: str  # lower case, no spaces; empty where there is none

    def equals(self, other: Quantity) -> bool:
        """Whether both are the same. A unit or a percent sign that only one of them has says
        nothing, save that 30% is also 0.3."""
        if self.unit and other.unit and not _same_unit(self.unit, other.unit):
            return False
        if self.percent == other.percent:
            return self.value == other.value
        percent, number = (self, other) if self.percent else (other, self)
        return number.value in (percent.value, percent.value / 100)


def quantity(text: str) -> Quantity | None:
    """The number that a text is; None where it is anything else."""
    if len(text) > LONGEST_NUMBER:
        return None
    for written, read in _AS_WRITTEN:
        text = re.sub(written, read, text)
    match = _QUANTITY.fullmatch(text.strip())
    if match is None:
        return None
    unit = match["text"] or match["words"] or ""
    over = match["over"] or match["over1"] or match["number"]
    under = _number(match["under"] or match["under1"] or match["divisor"] or "1")
    if under == 0 or not _NO_UNITS.isdisjoint(re.findall(r"[a-z]+", unit.lower())):
        return None
    value = Fraction(match["whole"] or 0) + _number(over) / under
    return Quantity(
        value=-value if match["sign"] == "-" else value,
        percent=match["percent"] is not None,
        unit=re.sub(r"[\s.]", "", unit).lower() + (match["power"] or ""),
    )


def _number(digits: str) -> Fraction:
    return Fraction(digits.replace(",", "").removesuffix("."))


def _same_unit(first: str, second: str) -> bool:
    return first == second or any(
        one + plural == other
        for one, other in ((first, second), (second, first))
        for plural in ("s", "es")
    )
