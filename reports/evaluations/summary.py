"""An evaluation in a few lines: the policy, the task, the figures and the categories."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from grpo_trainable.config import shown
from grpo_trainable.text import plural, written
from reports.evaluations.categories import HEADER as CATEGORIES
from reports.evaluations.categories import table_rows
from reports.evaluations.changes import changes
from reports.evaluations.measures import Figure, Measure, measures
from reports.evaluations.pairs import Difference
from reports.evaluations.record import EvaluationRecord
from reports.intervals import identical

Row = TypeVar("Row", Measure, Difference)

FIGURES = ("figure", "mean", "95% interval")
DIFFERENCES = ("figure", "this", "the other", "difference", "95% interval", "significant")


def policy_line(record: EvaluationRecord) -> str:
    """Return a line that identifies the policy."""
    policy = record.policy
    source, trained = policy["source"], ""
    if source == "checkpoint":
        trained = f" after {plural(policy['round'], 'round')}"
    return f"{source} {policy['path']}{trained}, SHA-256 {policy['sha256'][:12]}…"


def task_line(record: EvaluationRecord) -> str:
    """Return a line that identifies the prompts and the sampling."""
    evaluation, task = record.config["eval"], record.config["task"]
    how = (
        "greedy" if evaluation["temperature"] == 0 else f"temperature {evaluation['temperature']:g}"
    )
    top_p = evaluation.get("top_p", 1)  # evaluations of earlier versions have no top_p
    how += f", top_p {top_p:g}" if top_p < 1 else ""
    file = task.get("eval_file") or task.get("train_file")
    of_file = f" of {os.path.basename(file)}" if file else ""
    return (
        f"task {task['name']}: {plural(len(record.by_prompt), 'held-out prompt')}{of_file} × "
        f"{plural(record.samples, 'response')}, {how}, seed {shown(record.config['seed'])}"
    )


def figure_rows(measured: Mapping[str, Measure]) -> list[tuple[str, str, str]]:
    """Return a row for each measure, with the columns `FIGURES`."""
    rows = []
    for measure in _distinct(list(measured.values())):
        own = measure.figure()
        between = _interval(measure.name, own) or _equal(len(measure.values))
        rows.append((measure.title, _shown(measure.name, own.value), between))
    return rows


def difference_rows(paired: Sequence[Difference]) -> list[tuple[str, ...]]:
    """Return a row for each measure that both evaluations have, with the columns `DIFFERENCES`."""
    answers = {True: "yes", False: "no", None: "unknown"}
    return [
        (
            own.title,
            _shown(own.name, own.own),
            _shown(own.name, own.other),
            _shown(own.name, own.value, signed=True),
            _interval(own.name, own, signed=True)
            or identical(own.prompts if own.identical else 0)
            or _equal(own.prompts),
            answers[own.told_apart],
        )
        for own in _distinct(paired)
    ]


def comparison_problems(record: EvaluationRecord, against: EvaluationRecord) -> list[str]:
    """Return reasons, one line each, why the differences may not be due to the policies alone."""
    found = changes(record, against)
    if not found:
        return []
    return [
        "the policies are not all that differs between the two evaluations, so the differences may "
        f"have other causes: {'; '.join(found)}"
    ]


def _distinct(found: Sequence[Row]) -> list[Row]:
    """Drop the answer reward if there is pass@1, because the two are equal."""
    names = {own.name for own in found}
    return [own for own in found if own.name != "answer_reward" or "pass@1" not in names]


def _equal(prompts: int) -> str:
    """Return the reason why a figure over this number of prompts has no interval."""
    return "none: only one prompt" if prompts == 1 else f"none: equal in all {prompts} prompts"


def _interval(name: str, own: Figure | Difference, *, signed: bool = False) -> str:
    """Return the interval as text; empty if there is none."""
    if own.low is None or own.high is None:
        return ""
    return f"{_shown(name, own.low, signed=signed)} to {_shown(name, own.high, signed=signed)}"


def _shown(name: str, value: float, *, signed: bool = False) -> str:
    digits = 1 if name == "response_tokens" else 3
    return written(value, f"{{:{'+' if signed else ''}.{digits}f}}")


# ---- The console -----------------------------------------------------------------------------


def console_lines(
    record: EvaluationRecord,
    against: EvaluationRecord | None = None,
    paired: Sequence[Difference] = (),
) -> Iterator[str]:
    """Yield the lines that launch/evaluate.py prints when it ends.

    Args:
        record: The evaluation.
        against: The evaluation to compare with.
        paired: The `differences` between the two evaluations.
    """
    yield policy_line(record)
    yield task_line(record)
    yield ""
    yield from _table(FIGURES, figure_rows(measures(record)))
    if record.categories is not None:
        yield ""
        yield from _table(CATEGORIES, table_rows(record))
    if against is not None:
        yield ""
        prompts = max((own.prompts for own in paired), default=0)
        both = f"{plural(prompts, 'prompt')} that both policies answered"
        yield f"compared with {against.name}, over {both}"
        yield from map("note: {}".format, comparison_problems(record, against))
        yield from _table(DIFFERENCES, difference_rows(paired))
    for problem in record.problems:
        yield f"note: {problem}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table: words aligned left, figures aligned right."""
    table = [header, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    words = [any(_is_word(row[i]) for row in rows) for i in range(len(header))]
    for row in table:
        cells = (
            cell.ljust(width) if is_words else cell.rjust(width)
            for cell, width, is_words in zip(row, widths, words, strict=True)
        )
        yield "  ".join(cells).rstrip()


def _is_word(cell: str) -> bool:
    return cell[:1].isalpha()
