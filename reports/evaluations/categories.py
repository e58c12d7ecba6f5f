"""The table of categories and up to ten responses in each category, as Markdown and as HTML.

The categories are both right, only the format right, and both wrong. They apply if the rewards for
format and answer are 0 or 1. If the reward does not judge the format, there are only right and
wrong answers. A model wrote the responses, so nothing in them may become markup.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter
from collections.abc import Iterator, Sequence

from grpo_trainable.text import plural, shown_truth
from grpo_trainable.tools.evaluation.generation import Generation
from reports.evaluations.record import EvaluationRecord
from reports.markup import MAX_TEXT, escaped, html_table, shortened, visible

EXAMPLES = 10  # maximum number of examples of each category
HEADER = ("category", "meaning", "responses", "share")


def table_rows(record: EvaluationRecord) -> list[tuple[str, str, str, str]]:
    """Return a row for each category, or no rows if the evaluation has no categories."""
    total = len(record.generations)
    return [
        (name, record.meanings[name], str(len(own)), f"{len(own) / total:.1%}")
        for name, own in (record.categories or {}).items()
    ]


def examples(responses: Sequence[Generation]) -> list[Generation]:
    """Choose the responses to show, without regard to their content.

    The first response to each prompt comes first, in the order of prompts. The second responses
    follow, and so on.
    """
    seen: Counter[int] = Counter()
    ranked = []
    for own in responses:
        ranked.append((seen[own.prompt_index], own.prompt_index, own))
        seen[own.prompt_index] += 1
    chosen = heapq.nsmallest(EXAMPLES, ranked, key=lambda place: place[:2])
    return [own for _, _, own in chosen]


# ---- Markdown --------------------------------------------------------------------------------


def categories_page(record: EvaluationRecord) -> str:
    """Return the content of `categories.md`."""
    return "\n".join(_markdown(record)) + "\n"


def _markdown(record: EvaluationRecord) -> Iterator[str]:
    yield "# Categories\n"
    yield f"| {' | '.join(HEADER)} |\n|---|---|---|---|"
    for row in table_rows(record):
        yield f"| {' | '.join(row)} |"
    for name, responses in (record.categories or {}).items():
        yield f"\n## {name}: {record.meanings[name]}\n"
        shown = examples(responses)
        yield f"{len(shown)} of {len(responses)}."
        for own in shown:
            yield f"\n### Prompt {own.prompt_index}, response {own.response_index}\n"
            yield from _markdown_response(own)


def _markdown_response(own: Generation) -> Iterator[str]:
    yield fenced(own.prompt)
    cut = "" if own.finished else "cut off, "
    yield f"\nresponse, {plural(own.tokens, 'token')}, {cut}{_scores(own)}:\n"
    yield fenced(own.response)
    yield f"\nground truth:\n\n{fenced(shown_truth(own.ground_truth))}"


def _scores(own: Generation) -> str:
    if own.error is not None:
        return "not scored"
    parts = {"format": own.format_reward, "answer": own.answer_reward}
    whole = {"reward": own.reward, **({} if None in parts.values() else parts)}
    return ", ".join(f"{name} {value:g}" for name, value in whole.items())


def fenced(text: str) -> str:
    """Return the text in a code block, whose fence is longer than any run of backticks inside."""
    text = visible(text.strip("\n"))
    rest = len(text) - MAX_TEXT
    if rest > 0:
        text = f"{text[:MAX_TEXT]} … {rest} more characters"
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


# ---- HTML ------------------------------------------------------------------------------------


def categories_section(record: EvaluationRecord) -> str:
    """Return the section on categories, or the reason why there are no categories."""
    found = record.categories
    if found is None:
        content = (
            '<p class="absent">There are no categories: the format and answer rewards of some '
            "responses fit no category.</p>"
        )
    else:
        blocks = [
            _examples(f"{name} ({record.meanings[name]})", own, open_=name == "correct")
            for name, own in found.items()
        ]
        content = html_table(HEADER, table_rows(record)) + "\n" + "\n".join(blocks)
    return f'<section id="categories">\n<h2>Categories</h2>\n{content}\n</section>'


def _examples(category: str, responses: Sequence[Generation], *, open_: bool) -> str:
    shown = examples(responses)
    title = f"{category}: {len(shown)} of {len(responses)}"
    articles = "\n".join(map(_article, shown)) or '<p class="absent">None.</p>'
    return (
        f"<details{' open' if open_ else ''}><summary>{escaped(title)}</summary>\n"
        f"{articles}</details>"
    )


def _article(own: Generation) -> str:
    cut = "" if own.finished else ", cut off"
    return (
        f'<article><div class="pair"><div><h4>Prompt {own.prompt_index}</h4>'
        f"<pre>{shortened(own.prompt)}</pre><h4>Ground truth</h4>"
        f"<pre>{shortened(shown_truth(own.ground_truth))}</pre></div>"
        f"<div><h4>Response {own.response_index} · {plural(own.tokens, 'token')}{cut} · "
        f"{escaped(_scores(own))}</h4><pre>{shortened(own.response)}</pre></div></div></article>"
    )
