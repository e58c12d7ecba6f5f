"""Make the page that lists every file of the packages, with the first paragraph of its docstring.

To update the page, run `python docs/files.py > docs/architecture/files.md`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = "grpo_trainable"
BESIDE = ("launch", "tuning", "reports", "callbacks", "search_spaces")
HEAD = f"""\
# Every file

Each file of the product, by package, with the first sentences of its docstring.
[Architecture](../architecture.md) says what each package is for and which packages may import
which. `python docs/files.py > docs/architecture/files.md` makes this page. An `__init__.py` without
code is left out.

## The root of {PRODUCT}/
"""


def page() -> str:
    """Return the page as Markdown."""
    root = ROOT / PRODUCT
    rooms = sorted(path for path in root.iterdir() if (path / "__init__.py").is_file())
    lines = [HEAD, *_table(root.glob("*.py"))]
    for room in [*rooms, *(ROOT / name for name in BESIDE)]:
        lines += ["", f"## {room.name}/", "", *_table(room.rglob("*.py"))]
    return "\n".join(lines) + "\n"


def _table(paths: Iterable[Path]) -> list[str]:
    rows = [row for path in sorted(paths) if (row := _row(path)) is not None]
    return ["| file | what it holds |", "|---|---|", *rows]


def _row(path: Path) -> str | None:
    """Return the row of a file, or None for an `__init__.py` without code."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if path.name == "__init__.py" and len(tree.body) == 1:
        return None
    summary = (ast.get_docstring(tree) or "").split("\n\n")[0]
    words = " ".join(summary.split()).replace("|", "\\|").replace("<", "&lt;")
    return f"| `{path.relative_to(ROOT).as_posix()}` | {words} |"


if __name__ == "__main__":
    print(page(), end="")
