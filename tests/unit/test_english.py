"""Docstrings and comments are plain sentences (CONTRIBUTING.md, section English)."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    *("grpo_trainable", "callbacks", "search_spaces", "reports", "tuning", "launch"),
    "tests",
)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
NOUN_CLAUSE = re.compile(r"(?:What|Whether|How|Which)\b")
END_OF_SENTENCE = re.compile(r"[.?!](?=\s|$)")
NEVER = re.compile(r"\bNone\s+where\b")
# Matches any source with a mistake, and few others. A search takes far less time than parsing.
SUSPECT = re.compile(rf'"""\\?\s*{NOUN_CLAUSE.pattern}|\bNone[\s#]+where\b')


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line number and the text of each docstring."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)) is not None:
            yield node.body[0].lineno, text


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line number and text of each comment. Comments on adjacent lines count as one."""
    begin, last, lines = 0, -1, []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if lines and token.start[0] != last + 1:
            yield begin, " ".join(lines)
            lines = []
        if not lines:
            begin = token.start[0]
        last = token.start[0]
        lines.append(token.string.lstrip("# "))
    if lines:
        yield begin, " ".join(lines)


def opens_with_noun_clause(text: str) -> bool:
    """Return True if the first sentence begins as a noun clause and is not a question."""
    end = END_OF_SENTENCE.search(text)
    return NOUN_CLAUSE.match(text) is not None and (end is None or end[0] != "?")


def mistakes(source: str) -> list[tuple[int, str]]:
    """Return the line number and the kind of each mistake."""
    if SUSPECT.search(source) is None:
        return []
    documented = list(docstrings(source))
    found = [
        (line, "a docstring opens with What, Whether, How or Which")
        for line, text in documented
        if opens_with_noun_clause(text)
    ]
    texts = [*documented, *comments(source)]
    found += [(line, "None where") for line, text in texts if NEVER.search(text)]
    return sorted(found)


def test_docstrings_and_comments_are_plain_sentences():
    found = [
        f"{path.relative_to(ROOT)}:{line}: {mistake}"
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for line, mistake in mistakes(path.read_text(encoding="utf-8"))
    ]
    assert found == [], "\n".join(found)


# The test joins the words `None` and `where`, so that this file itself has no mistake.
@pytest.mark.parametrize(
    ("source", "kinds"),
    [
        ('"""What a trial leaves."""', ["opens"]),
        ('"""Whether it is one. Is it?"""', ["opens"]),
        ('"""Which loss?"""', []),
        ('"""However it ends."""', []),
        ('def f():\n    """How it ends"""', ["opens"]),
        ('class A:\n    """Return it.\n\n    What follows is allowed.\n    """', []),
        ('"""Return it, {} there is none."""', ["None"]),
        ("x = 1  # its value, {} there is none", ["None"]),
        ("# its value, None\n# where there is none", ["None"]),
        ('x = "{} text"', []),
    ],
)
def test_each_mistake_is_found_and_nothing_else(source: str, kinds: list[str]):
    found = mistakes(source.replace("{}", " ".join(("None", "where"))))
    assert [kind for _, mistake in found for kind in kinds if kind in mistake] == kinds
    assert len(found) == len(kinds)
