"""Text, lists and tables as HTML. Whatever comes from an experiment is escaped here."""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

MAX_TEXT = 4000  # characters of a prompt or response that are shown


class _Visible(dict[int, str]):
    """What each character is shown as, by its number, for `str.translate`; filled as asked."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        if character not in "\n\t" and unicodedata.category(character) in ("Cc", "Cf", "Cs"):
            self[code] = chr(0x2400 + code) if code < 0x20 else f"[U+{code:04X}]"
        else:
            self[code] = character
        return self[code]


_VISIBLE = _Visible()


def visible(text: str) -> str:
    """The text, with what a reader could not see or what would turn the line round visible."""
    return text.translate(_VISIBLE)


def escaped(text: str) -> str:
    """Visible text, escaped."""
    return html.escape(visible(text), quote=True)


def shortened(text: str) -> str:
    rest = len(text) - MAX_TEXT
    text = text.strip("\n")
    if not text.strip():
        return '<span class="absent">(empty)</span>'
    if rest <= 0:
        return escaped(text)
    return f'{escaped(text[:MAX_TEXT])}<span class="absent"> … {rest} more characters</span>'


def moment(started: Any) -> str:
    """`2026-11-20 15:00` of an ISO time, its zone kept; anything else as it is."""
    found = re.fullmatch(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d)(?::[\d.]+)?(.*)", str(started))
    if found is None:
        return str(started)
    zone = "UTC" if found[3] in ("Z", "+00:00") else found[3]
    return f"{found[1]} {found[2]} {zone}".strip()


def html_list(said: Sequence[str]) -> str:
    """A list; nothing when it would be empty."""
    items = "".join(f"<li>{escaped(sentence)}</li>\n" for sentence in said)
    return f"<ul>{items}</ul>\n" if items else ""


def html_table(
    header: Sequence[str], rows: Iterable[Sequence[str]], *, figures: bool = False
) -> str:
    show = _figures if figures else escaped
    head = "".join(f'<th scope="col">{escaped(cell)}</th>' for cell in header)
    body = "".join(
        f'<tr><th scope="row">{escaped(row[0])}</th>'
        + "".join(f"<td>{show(cell)}</td>" for cell in row[1:])
        + "</tr>\n"
        for row in rows
    )
    kind = "figures" if figures else "words"
    # A tab stop lets the keyboard scroll it.
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="table">'
        f'<table class="{kind}">\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody>\n</table></div>"
    )


def _figures(cell: str) -> str:
    """`0.3 (0.2-0.4)` on two lines, so that twelve columns fit side by side."""
    middle, spread = re.sub(r" \([^)]*\)", "", cell), re.findall(r"\(([^)]*)\)", cell)
    below = f"<small>{escaped(' -> '.join(spread))}</small>" if spread else ""
    return (escaped(middle) + below).replace("-&gt;", "→")
