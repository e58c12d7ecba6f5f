"""The page of an evaluation: its figures, its categories, and a browser of all responses.

The responses may be hostile text. In the body, the responses are escaped. The list of all responses
is JSON, in a block that is never run as a script. The page's own script puts the responses into
text nodes, and the page's security policy allows no other script.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_trainable.config import GRPOConfig, flatten, shown
from grpo_trainable.text import shown_truth
from grpo_trainable.tools.evaluation.generation import Generation
from reports.document import NO_PLOTS, document, figure
from reports.evaluations.categories import categories_section
from reports.evaluations.measures import Measure, measures
from reports.evaluations.pairs import Difference
from reports.evaluations.record import EvaluationRecord
from reports.evaluations.summary import (
    DIFFERENCES,
    FIGURES,
    comparison_problems,
    difference_rows,
    figure_rows,
    policy_line,
    task_line,
)
from reports.markup import MAX_TEXT, escaped, html_list, html_table, moment, visible

if TYPE_CHECKING:
    from reports.canvas import Plot

SCRIPT = Path(__file__).with_name("browse.js").read_text("utf-8")
STYLE = Path(__file__).with_name("browse.css").read_text("utf-8")
# The fields of a row of the data block, in order. browse.js reads the fields by these names.
FIELDS = (
    *("prompt", "index", "response", "answer", "category", "reward", "format", "right"),
    *("finished", "tokens", "log_prob", "error"),
)


def render_page(
    record: EvaluationRecord,
    against: EvaluationRecord | None,
    paired: Sequence[Difference],
) -> str:
    """Return the whole HTML document.

    Args:
        record: The evaluation.
        against: The evaluation to compare with.
        paired: The `differences` between the two evaluations.
    """
    measured = measures(record)
    drawn, images, missing = _drawn(record, measured)
    compared = [] if against is None else comparison_problems(record, against)
    sections = [
        _head(record),
        _problems([*record.problems, *compared, *missing]),
        _figures_section(measured),
        _against_section(against, paired),
        _plots_section(drawn, images),
        categories_section(record),
        _browse_section(record),
        _settings_section(record),
        _origin_section(record),
    ]
    body = "\n".join(section for section in sections if section)
    return document(f"{record.name}: evaluation", body, style=STYLE, script=SCRIPT)


def _drawn(
    record: EvaluationRecord, measured: Mapping[str, Measure]
) -> tuple[list[Plot], dict[str, bytes], list[str]]:
    """Return the plots, their pictures, and a message for the page if they cannot be drawn."""
    try:
        from reports.canvas import render_all
        from reports.evaluations.plots import plots
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        return [], {}, [NO_PLOTS]
    drawn = plots(record, measured)
    return drawn, render_all(drawn), []


def _head(record: EvaluationRecord) -> str:
    facts = [policy_line(record), task_line(record)]
    if created := record.origin.get("created"):
        facts.append(f"evaluated {moment(created)}")
    lines = "".join(f'<p class="facts">{escaped(fact)}</p>\n' for fact in facts)
    return f"<header>\n<h1>Evaluation: {escaped(record.name)}</h1>\n{lines}</header>"


def _problems(problems: Sequence[str]) -> str:
    if not problems:
        return ""
    return (
        '<section class="box" id="missing">\n<h2>Missing or doubtful</h2>\n'
        "<p>Read this list before you rely on the figures below.</p>\n"
        f"{html_list(problems)}</section>"
    )


def _figures_section(measured: Mapping[str, Measure]) -> str:
    note = (
        "Each figure is a mean over the prompts. Its 95% interval says how much the mean would "
        "vary with other prompts of the same kind, answered by the same policy. The interval does "
        "not say how much the mean would vary from one training run to the next. If every value is "
        "between 0 and 1, the interval is Wilson's, computed with the effective sample size: the "
        "number of independent responses whose mean would have the same variance. Otherwise, the "
        "interval is Student's."
    )
    return (
        '<section id="figures">\n<h2>Figures</h2>\n'
        f"{html_table(FIGURES, figure_rows(measured), figures=True)}\n"
        f'<p class="note">{escaped(note)}</p>\n</section>'
    )


def _against_section(against: EvaluationRecord | None, paired: Sequence[Difference]) -> str:
    if against is None:
        return ""
    note = (
        f"The other policy: {policy_line(against)}. Differences are computed prompt by prompt, "
        f"over the {max((own.prompts for own in paired), default=0)} prompts that both "
        "policies answered. A difference is significant if its interval excludes 0 (a paired "
        "t-test at 5%). If there are many figures, one can be significant by chance alone."
    )
    return (
        f'<section id="against">\n<h2>Compared with {escaped(against.name)}</h2>\n'
        f"{html_table(DIFFERENCES, difference_rows(paired), figures=True)}\n"
        f'<p class="note">{escaped(note)}</p>\n</section>'
    )


def _plots_section(drawn: Sequence[Plot], images: Mapping[str, bytes]) -> str:
    if not drawn:
        return ""
    figures = "\n".join(figure(plot, images) for plot in drawn)
    return f'<section id="plots">\n<div class="plots">\n{figures}\n</div>\n</section>'


# ---- All responses ---------------------------------------------------------------------------

_PAGER = (
    '<nav class="pager" aria-label="pages" hidden><button type="button">previous</button>'
    '<span></span><button type="button">next</button></nav>'
)
_CARD = (
    '<template id="card"><li><h4><span class="tag" data-part="tag"></span> '
    '<span data-part="which"></span> · <span data-part="facts"></span></h4>'
    '<div class="pair"><div><pre data-part="prompt"></pre><h4>Ground truth</h4>'
    '<pre data-part="truth"></pre></div><div><pre data-part="response"></pre>'
    '<div data-part="answered"><h4>Answer</h4><pre data-part="answer"></pre></div>'
    "</div></div></li></template>"
)
_ORDERS = {
    "prompt": "by prompt",
    "low": "lowest reward first",
    "high": "highest reward first",
    "short": "shortest first",
    "long": "longest first",
    "unlikely": "least likely first",
}
_ENDS = {"": "any", "finished": "ended by the policy", "cut": "cut off by length"}


def _browse_section(record: EvaluationRecord) -> str:
    names = [name for name, own in (record.categories or {}).items() if own]
    categories = {"": "all"} | {name: f"{name} ({record.meanings[name]})" for name in names}
    controls = (
        f"{_select('category', 'category', categories)}"
        '<label>reward from <input id="least" type="number" step="any"></label>'
        '<label>to <input id="most" type="number" step="any"></label>'
        f"{_select('end', 'end', _ENDS)}{_select('order', 'order', _ORDERS)}"
        '<label class="wide">text in prompt, response or answer '
        '<input id="text" type="search" autocomplete="off" spellcheck="false"></label>'
    )
    return (
        '<section id="browse">\n<h2>All responses</h2>\n'
        "<noscript><p>Filters need JavaScript, which is off in this browser. The files "
        "generations.jsonl and generations.parquet contain every response.</p></noscript>\n"
        f'<div id="controls" hidden>\n<div class="filters" role="search">{controls}</div>\n'
        f'<p class="facts" id="count" aria-live="polite"></p>\n{_PAGER}\n</div>\n'
        f'<ol id="list"></ol>\n{_PAGER}\n{_CARD}\n'
        f'<script type="application/json" id="data">{data_block(record)}</script>\n</section>'
    )


def _select(name: str, label: str, options: Mapping[str, str]) -> str:
    listed = "".join(
        f'<option value="{escaped(value)}">{escaped(text)}</option>'
        for value, text in options.items()
    )
    return f'<label>{escaped(label)} <select id="{name}">{listed}</select></label>'


def data_block(record: EvaluationRecord) -> str:
    """Return the responses as JSON without `<`, so that no text can end the block in the HTML.

    Long texts are shortened. Control and invisible formatting characters are made visible.
    """
    places = {index: place for place, index in enumerate(record.by_prompt)}
    data = {
        "prompts": [
            {
                "index": index,
                "text": _cut(own[0].prompt),
                "truth": _cut(shown_truth(own[0].ground_truth)),
            }
            for index, own in record.by_prompt.items()
        ],
        "fields": FIELDS,
        "rows": [_row(own, places[own.prompt_index]) for own in record.generations],
    }
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _row(own: Generation, place: int) -> tuple[Any, ...]:
    return (
        place,
        own.response_index,
        _cut(own.response),
        None if own.answer is None else _cut(own.answer),
        "unscored" if own.error is not None else own.category,
        own.reward,
        own.format_reward,
        own.answer_reward,
        own.finished,
        own.tokens,
        own.log_prob,
        None if own.error is None else _cut(own.error),
    )


def _cut(text: str) -> str:
    """Return the part of a text that the page shows. generations.jsonl has the whole text."""
    text = text.strip("\n")
    rest = len(text) - MAX_TEXT
    return visible(text) if rest <= 0 else f"{visible(text[:MAX_TEXT])} … {rest} more characters"


# ---- Settings, origin ------------------------------------------------------------------------


def _settings_section(record: EvaluationRecord) -> str:
    defaults = flatten(GRPOConfig().to_dict())
    settings = flatten(record.config)
    changed = [(key, shown(v)) for key, v in settings.items() if v != defaults.get(key)]
    table = html_table(("key", "value"), changed) if changed else "<p>There are none.</p>"
    return (
        '<section id="settings">\n<h2>Settings that differ from the defaults</h2>\n'
        f"{table}\n<details><summary>All settings</summary>"
        f"<pre>{escaped(json.dumps(record.config, indent=1))}</pre></details>\n</section>"
    )


def _origin_section(record: EvaluationRecord) -> str:
    rows = [
        (key, value if isinstance(value, str) else json.dumps(value))
        for key, value in [*record.policy.items(), *record.origin.items()]
    ]
    return f'<section id="origin">\n<h2>Origin</h2>\n{html_table(("", ""), rows)}\n</section>'
