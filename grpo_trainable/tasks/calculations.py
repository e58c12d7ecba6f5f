r"""What a formula leaves to be worked out: `4\pi+5\pi` more than `9\pi`, an integral more still."""

from __future__ import annotations

import re

_POWERS = re.compile(r"[\^_]\{[^{}]*[a-zA-Z][^{}]*\}")  # the sum in x^{n+1} stays one
_WORK = (  # kinds of it, the least first
    # Sums and relations; products and powers of numerals.
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
    r"""Return whether `answer` leaves work of a kind that `truth`, in LaTeX as well, does not.

    A restated question equals the truth, so nothing but its form tells it from an answer.
    """
    return _work(answer) > _work(truth)


def _work(formula: str) -> int:
    formula = _POWERS.sub("", formula)
    return max((rank for rank, kind in enumerate(_WORK, 1) if kind.search(formula)), default=0)
