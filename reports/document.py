"""The HTML document around the content of a page, and the HTML of each plot.

A page loads nothing from outside: no font, no picture, and no script except its own.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from reports.markup import escaped

if TYPE_CHECKING:
    from reports.canvas import Plot

STYLE = Path(__file__).with_name("page.css").read_text("utf-8")
NO_MATPLOTLIB = "matplotlib is missing; install it with: pip install -e '.[report]'"
NO_PLOTS = f"no plots, because {NO_MATPLOTLIB}"


def document(title: str, body: str, *, style: str = "", script: str = "") -> str:
    """Return the whole HTML document.

    Args:
        title: The title of the page, as plain text.
        body: The HTML inside `<main>`.
        style: CSS to append to the style that all pages share.
        script: A script of this package, which runs at the end of the body. The page's security
            policy names the script's digest, so no other script can run.
    """
    # Even if text from a model were not escaped, it could not run a script.
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    element = ""
    if script:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        policy += f"; script-src 'sha256-{digest}'"
        element = f"<script>{script}</script>\n"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escaped(title)}</title>\n<style>{STYLE}{style}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n{element}</body>\n</html>\n"
    )


def figure(plot: Plot, images: Mapping[str, bytes]) -> str:
    """Return a plot as HTML, or the reason why it is not drawn.

    Args:
        plot: The plot.
        images: PNG images, keyed by plot and theme, such as "speed_up-dark".
    """
    size = "tall" if plot.height > 4.5 else "low"
    opening = f'<figure id="{escaped(plot.name)}" class="{size}">'
    if plot.missing is not None:
        return (
            f"{opening}<h3>{escaped(plot.title)}</h3>"
            f'<p class="absent">Not drawn. {escaped(plot.missing)}</p></figure>'
        )
    light, dark = (
        "data:image/png;base64," + base64.b64encode(images[f"{plot.name}-{theme}"]).decode()
        for theme in ("light", "dark")
    )
    return (
        f"{opening}<h3>{escaped(plot.title)}</h3><p>{escaped(plot.look)}</p>\n<picture>"
        f'<source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img src="{light}" alt="{escaped(plot.alt)}" width="720" '
        f'height="{round(144 * plot.height)}"></picture></figure>'
    )
