"""The page of an alignment run: the answer, the figures, the plots and examples.

Everything from the data and from the model is escaped. The page has no script.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from grpo_trainable.tasks.messages import as_text
from grpo_trainable.text import plural, written
from grpo_trainable.tools.alignment.rows import MeasuredRow
from reports.alignment.record import AlignmentRecord
from reports.document import NO_PLOTS, document, figure
from reports.markup import escaped, html_list, html_table, moment, shortened

EXAMPLES = 8
TITLES = {
    "training_loss": "training loss",
    "held_out_loss": "held-out loss",
    "held_out_accuracy": "held-out accuracy",
    "held_out_margin": "held-out margin",
}


def render_page(record: AlignmentRecord) -> str:
    """Return the whole HTML document."""
    figures, missing = _plots_section(record)
    sections = [
        _head(record),
        _problems([*record.problems, *missing]),
        _figures_section(record),
        figures,
        _examples_section(record),
        _settings_section(record),
    ]
    body = "\n".join(section for section in sections if section)
    return document(f"{record.name}: {record.stage.name}", body)


def _head(record: AlignmentRecord) -> str:
    asked = record.asked
    facts = [
        f"{record.stage.trainer} of TRL, from {asked['model']}: {record.parameters:,} parameters, "
        f"{plural(record.steps, 'gradient step')}, seed {asked['seed']}",
        f"{asked['train_file']}: {plural(record.train_rows, 'row')} to train on, "
        f"{len(record.held_out)} held out",
    ]
    if created := record.origin.get("created"):
        facts.append(f"finished {moment(created)}")
    lines = "".join(f'<p class="facts">{escaped(fact)}</p>\n' for fact in facts)
    return (
        f"<header>\n<h1>{escaped(record.stage.name)}: {escaped(record.name)}</h1>\n"
        f'<p class="answer">{escaped(record.answer)}</p>\n{lines}</header>'
    )


def _problems(problems: Sequence[str]) -> str:
    if not problems:
        return ""
    return (
        '<section class="box" id="missing">\n<h2>Missing or doubtful</h2>\n'
        f"{html_list(problems)}</section>"
    )


def _figures_section(record: AlignmentRecord) -> str:
    note = "The first held-out figures are from the initial model. The loss is as TRL logs it"
    if record.stage.has_pairs:
        note += (
            ". A pair counts as right if its chosen response has the higher score. The interval of "
            "the accuracy is Wilson's: it says how much the accuracy would vary with other "
            "held-out pairs of the same kind, but not how much it would vary from one training "
            "run to the next."
        )
        if record.stage.writes_text:
            note += (
                " The initial policy is the reference, so each pair starts as a tie, and "
                "the accuracy before training is undefined."
            )
    else:
        note += ", in nats per token."
    rows = [
        (TITLES[name], *("" if value is None else written(value, "{:.3f}") for value in values))
        for name, values in record.figures.items()
    ]
    return (
        '<section id="figures">\n<h2>Figures</h2>\n'
        f"{html_table(('figure', 'first', 'last'), rows, figures=True)}\n"
        f'<p class="note">{escaped(note)}</p>\n</section>'
    )


def _plots_section(record: AlignmentRecord) -> tuple[str, list[str]]:
    """Return the plots, and a message for the page if they cannot be drawn."""
    try:
        from reports.alignment.plots import plots
        from reports.canvas import render_all
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        return "", [NO_PLOTS]
    drawn = plots(record)
    images = render_all(drawn)
    figures = "\n".join(figure(plot, images) for plot in drawn)
    return f'<section id="plots">\n<div class="plots">\n{figures}\n</div>\n</section>', []


def examples(record: AlignmentRecord) -> list[MeasuredRow]:
    """Return held-out rows for the page.

    Without pairs, the examples are the first rows. With pairs, half of the examples are the first
    rows, and the others are the remaining pairs with the lowest margins.
    """
    if not record.stage.has_pairs:
        return list(record.held_out[:EXAMPLES])
    first = list(record.held_out[: EXAMPLES // 2])
    rest = record.held_out[EXAMPLES // 2 :]
    return first + sorted(rest, key=lambda row: row.margin or 0.0)[: EXAMPLES // 2]


def _examples_section(record: AlignmentRecord) -> str:
    note = "The first held-out rows"
    if record.stage.has_pairs:
        note += ", followed by the pairs with the lowest margins"
    cards = "".join(_card(i, row) for i, row in enumerate(examples(record), start=1))
    return (
        f'<section id="examples">\n<h2>Examples</h2>\n<p class="note">{note}.</p>\n{cards}'
        "</section>"
    )


def _card(number: int, row: MeasuredRow) -> str:
    title = f"Example {number}"
    if row.margin is not None:
        verdict = "right" if row.margin > 0 else "wrong"
        title += f": {verdict}, margin {written(row.margin, '{:.3f}')}"
    texts = "".join(
        f"<h4>{escaped(name)}</h4><pre>{shortened(text)}</pre>" for name, text in _texts(row)
    )
    return f"<article><h3>{escaped(title)}</h3>\n{texts}</article>\n"


def _texts(row: MeasuredRow) -> Iterator[tuple[str, str]]:
    """Yield a heading and a text for each column of the row, and for the new response."""
    names = ("chosen", "rejected")
    scores = {} if row.scores is None else dict(zip(names, row.scores, strict=True))
    for name, value in row.row.items():
        yield f"{name}, score {scores[name]:.3f}" if name in scores else name, as_text(value)
    if row.response is not None:
        yield "most likely response after training", row.response


def _settings_section(record: AlignmentRecord) -> str:
    rows = [
        (key, value if isinstance(value, str) else json.dumps(value))
        for key, value in [*record.asked.items(), *record.origin.items()]
    ]
    table = html_table(("", ""), rows)
    return f'<section id="origin">\n<h2>Settings and origin</h2>\n{table}\n</section>'
