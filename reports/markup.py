"""Text, lists and tables as HTML. Everything from an experiment is escaped here."""

from __future__ import annotations

import html
import math
import re
import unicodedata
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

MAX_TEXT = 4000  # maximum number of characters to show of a prompt or response
MAX_COLUMNS = 8  # maximum number of columns that a reader can take in at a glance


class _Visible(dict[int, str]):
    """Visible form of characters, keyed by code point, for `str.translate`; filled on demand."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        if character not in "\n\t" and unicodedata.category(character) in ("Cc", "Cf", "Cs"):
            self[code] = chr(0x2400 + code) if code < 0x20 else f"[U+{code:04X}]"
        else:
            self[code] = character
        return self[code]


_VISIBLE = _Visible()


def visible(text: str) -> str:
    """Replace control and invisible formatting characters with visible text."""
    return text.translate(_VISIBLE)


def escaped(text: str) -> str:
    """Return the visible form of a text, escaped for HTML."""
    return html.escape(visible(text), quote=True)


def shortened(text: str) -> str:
    """Return at most `MAX_TEXT` characters of a text as HTML."""
    rest = len(text) - MAX_TEXT
    text = text.strip("\n")
    if not text.strip():
        return '<span class="absent">(empty)</span>'
    if rest <= 0:
        return escaped(text)
    return f'{escaped(text[:MAX_TEXT])}<span class="absent"> … {rest} more characters</span>'


def moment(started: Any) -> str:
    """Return an ISO time as `2026-11-20 15:00 UTC` in its own zone, and any other value as text."""
    found = re.fullmatch(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d)(?::[\d.]+)?(.*)", str(started))
    if found is None:
        return str(started)
    zone = "UTC" if found[3] in ("Z", "+00:00", "+0000") else found[3]
    return f"{found[1]} {found[2]} {zone}".strip()


def html_list(said: Sequence[str]) -> str:
    """Return sentences as an HTML list, or an empty string if there are none."""
    items = "".join(f"<li>{escaped(sentence)}</li>\n" for sentence in said)
    return f"<ul>{items}</ul>\n" if items else ""


def html_table(
    header: Sequence[str], rows: Iterable[Sequence[str]], *, figures: bool = False
) -> str:
    """Return an HTML table.

    Args:
        header: The titles of the columns.
        rows: The cells of each row, as plain text.
        figures: Show cells as numbers, with their spread on a second line.
    """
    show = _figures if figures else escaped
    head = "".join(f'<th scope="col">{escaped(cell)}</th>' for cell in header)
    body = "".join(
        f'<tr><th scope="row">{escaped(row[0])}</th>'
        + "".join(f"<td>{show(cell)}</td>" for cell in row[1:])
        + "</tr>\n"
        for row in rows
    )
    kind = "figures" if figures else "words"
    # The tab stop lets a user scroll the table by keyboard.
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="table">'
        f'<table class="{kind}">\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody>\n</table></div>"
    )


def narrow_tables(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, figures: bool = True
) -> str:
    """Divide a table into tables of at most `MAX_COLUMNS` columns.

    Each of these tables begins with the first column of the original table.

    Args:
        header: The titles of the columns.
        rows: The cells of each row, as plain text.
        figures: Show cells as numbers, with their spread on a second line.
    """
    count = math.ceil((len(header) - 1) / (MAX_COLUMNS - 1))
    edges = [1 + round(i * (len(header) - 1) / count) for i in range(count + 1)]
    return "\n".join(
        html_table(
            [header[0], *header[first:last]],
            [[row[0], *row[first:last]] for row in rows],
            figures=figures,
        )
        for first, last in pairwise(edges)
    )


def _figures(cell: str) -> str:
    """Return `0.3 (0.2 to 0.4)` on two lines, so that many columns fit side by side."""
    spread = r" \(([^)]*)\)"
    parts = cell.split(" -> ")
    middle = " -> ".join(re.sub(spread, "", part) for part in parts)
    # Without a spread, all values are equal.
    spreads = [found[1] if (found := re.search(spread, part)) else part for part in parts]
    below = f"<small>{escaped(' -> '.join(spreads))}</small>" if spreads != parts else ""
    return (escaped(middle) + below).replace("-&gt;", "→")
