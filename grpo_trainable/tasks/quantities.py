r"""Parse numbers in answers: `1,234`, `-\frac{3}{4}`, `2\frac12`, `30\%`, `5\text{ cm}`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

LONGEST_NUMBER = 100  # characters

_DIGITS = r"(?:\d{1,3}(?:(?:,\d{3})+|(?: \d{3})+)(?:\.\d*)?|\d+(?:\.\d*)?|\.\d+)"
_POWER = r"(?:\^\{?-?\d\}?)?"
_TEXTS = rf"(?:\s*(?:/\s*)?\\text\s*\{{[^{{}}]*\}}{_POWER})+"
_SYMBOL = r"(?:[ckm]m|[km]g|m[lL]|ft|in|yd|mi|lbs?|oz|hr|min|sec|mph|km/h|m/s)"
_WORDS = (  # two letters alone may be a product, as in 2 ab
    rf"\s+(?:[mgshL]|(?:sq\.?\s+)?(?:{_SYMBOL}|[A-Za-z]{{3,}})(?:[\s/-]+[A-Za-z]{{2,}})*){_POWER}"
)
_QUANTITY = re.compile(
    r"(?P<sign>[+-]?)\s*"
    r"(?:(?P<whole>\d+)(?:\s*(?=\\frac)|\s+(?=\d+\s*/\s*\d)))?"  # whole part of a mixed number
    rf"(?:\\frac\s*(?:\{{\s*(?P<over>-?{_DIGITS})\s*\}}|(?P<over1>\d))"
    rf"\s*(?:\{{\s*(?P<under>-?{_DIGITS})\s*\}}|(?P<under1>\d))"
    r"|(?P<start>\d+\.\d*)\\(?:overline|bar)\s*\{(?P<repeat>\d+)\}"
    rf"|(?P<number>{_DIGITS})(?:[eE](?P<exponent>[+-]?\d{{1,3}}))?"
    rf"(?:\s*/\s*(?P<divisor>-?{_DIGITS}))?)"
    r"\s*(?P<percent>%|percent\b)?"
    rf"(?P<unit>{_TEXTS}|{_WORDS}|(?:{_SYMBOL}|st|nd|rd|th){_POWER})?"
)
_UNIT = re.compile(rf"(?<=[\w)}}\]])(?:{_TEXTS}|{_WORDS})$")
_TENS = r"10\s*\^\s*(?:\{\s*([+-]?\d{1,3})\s*\}|([+-]?\d{1,3}))(?!\s*\d)"
_AS_WRITTEN = (  # notation of a quantity -> notation that `_QUANTITY` matches
    (r"^\\text\s*\{([^{}]*)\}$", r"\1"),
    (r"^(?:\\?\{|\[)([^,]*?)(?:\\?\}|\])$", r"\1"),
    (r"(^|[-+/{])\s*\(([^(),]*)\)\s*(?=$|[/}])", r"\1\2"),
    (r"\\%", "%"),
    (r"\\?[$€£]", ""),
    (r"(?:\^\s*\{?\s*\\circ\s*\}?|°)\s*([CF]?)(?![a-zA-Z])", r"\\text{degrees\1}"),
    (r"\\text\s*\{\s*(?:%|percent)\s*\}", "%"),
    (r"(?<=\d)_\s*(?:\{(\d+)\}|(\d))$", r"\\text{base\1\2}"),
    (rf"(?<=\d)\s*(?:\\times|\\cdot|\*)\s*{_TENS}", r"e\1\2"),
    (rf"^([+-]?)\s*{_TENS}", r"\g<1>1e\2\3"),
)
# Words that change the meaning of the number before them, so they are not units.
_NO_UNITS = frozenset(
    (
        *("hundred", "thousand", "million", "billion", "trillion", "dozen", "half", "halves"),
        *("third", "thirds", "quarter", "quarters", "fourths", "percent", "pi", "sqrt", "infinity"),
        *("and", "or", "plus", "minus", "times", "over", "to", "mod", "less", "than"),
        *("sin", "cos", "tan", "log", "ln", "exp", "cdot", "if", "for", "not", "where", "when"),
    )
)


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number with its unit or percent sign."""

    value: Fraction
    percent: bool
    unit: str  # lower case, no spaces; empty if there is no unit
    is_division: bool = False  # an integer written as a division, such as 144/12

    def answers(self, truth: Quantity) -> bool:
        """Return True if this number equals the true number.

        If only one of the two numbers has a unit, the unit is ignored. If only one of the numbers
        has a percent sign, 30% equals both 30 and 0.3.
        """
        if self.is_division and not truth.is_division:
            return False
        if self.unit and truth.unit and not _same_unit(self.unit, truth.unit):
            return False
        if self.percent == truth.percent:
            return self.value == truth.value
        percent, number = (self, truth) if self.percent else (truth, self)
        return number.value in (percent.value, percent.value / 100)


def quantity(text: str) -> Quantity | None:
    """Parse text that is a number. Return None for any other text."""
    if len(text) > LONGEST_NUMBER:
        return None
    text = text.strip()
    for written, read in _AS_WRITTEN:
        text = re.sub(written, read, text)
    match = _QUANTITY.fullmatch(text.strip())
    if match is None or not _is_unit(match["unit"] or ""):
        return None
    over = match["over"] or match["over1"] or match["number"] or match["start"]
    under = match["under"] or match["under1"] or match["divisor"] or "1"
    if _number(under) == 0:
        return None
    value = _number(over) * Fraction(10) ** int(match["exponent"] or 0) / _number(under)
    value += Fraction(match["whole"] or 0) + _repeating(match["start"], match["repeat"])
    return Quantity(
        value=-value if match["sign"] == "-" else value,
        percent=match["percent"] is not None,
        unit=re.sub(r"\\text|[\s.{}^]", "", match["unit"] or "").lower(),
        is_division=under != "1" and value.denominator == 1,
    )


def as_number(text: str) -> str:
    """Rewrite notations that are ambiguous unless a number is expected.

    `5m` becomes `5 m`, which is 5 metres, and `3:4` becomes `3/4`.
    """
    return re.sub(r"(?<=\d)\s*:\s*(?=\d)", "/", re.sub(r"(?<=\d)(?=[mgshL]$)", " ", text))


def without_unit(formula: str) -> str:
    r"""Remove the unit at the end of a formula: `9\pi\text{ cm}^2` becomes `9\pi`."""
    match = _UNIT.search(formula)
    if match is None or not _is_unit(match[0]):
        return formula
    measured = formula[: match.start()]
    is_formula = re.search(r"\d|\\(?!text)|^\S$", measured)  # "car" is not a unit in "red car"
    return measured if is_formula else formula


def _number(digits: str) -> Fraction:
    return Fraction(re.sub(r"[, ]", "", digits).removesuffix("."))


def _repeating(start: str | None, repeat: str | None) -> Fraction:
    """Return the value of the repeating digits, such as 1/300 for `repeat` 3 after `start` 0.00."""
    if start is None or repeat is None:
        return Fraction(0)
    decimals = len(start.partition(".")[2])
    return Fraction(int(repeat), (10 ** len(repeat) - 1) * 10**decimals)


def _is_unit(words: str) -> bool:
    return _NO_UNITS.isdisjoint(re.findall(r"[a-z]+", words.lower()))


def _same_unit(first: str, second: str) -> bool:
    return first == second or any(
        one + plural == other
        for one, other in ((first, second), (second, first))
        for plural in ("s", "es")
    )
