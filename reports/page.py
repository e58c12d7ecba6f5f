"""Turns an experiment's directory into one HTML page with plots, tables and example responses.

The page asks for nothing from outside itself: no script, no font, no picture. Responses are text
that a model wrote, so all of it is escaped.
"""

from __future__ import annotations

import base64
import html
import json
import os
import re
import shlex
import sys
import time
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from grpo_trainable.config import GRPOConfig, flatten, shown
from reports import changes, experiment_files
from reports.answers import Answer, answer
from reports.experiment import (
    ExperimentError,
    ExperimentRecord,
    TrialFiles,
    TrialRecord,
    read_experiment,
    read_files,
)
from reports.report_data import report_data
from reports.summary import HEADER, Comparison, compare, ends
from reports.verdicts import quantities, verdicts
from search_spaces import SPACES

if TYPE_CHECKING:
    from reports.plots import Plot, Section

MAX_TEXT = 4000  # characters of a prompt or response that are shown
MAX_ITEMS = 60  # of what is missing


class ReportError(ValueError):
    """Why there can be no report, in one line."""


def _warn(text: str) -> None:
    print(f"report.py: warning: {text}", file=sys.stderr)


def write_report(directory: Path, warn: Callable[[str], object] = _warn) -> Path:
    """Writes the page, its plots and report.json, and gives the page's path. `warn` hears of
    damaged files.

    Raises:
        ReportError: there is no experiment, it has no row yet, matplotlib is missing, or the page
            cannot be written.
    """
    directory = Path(os.path.abspath(directory))  # "." has no name to show
    try:
        experiment = read_experiment(directory)
    except ExperimentError as error:
        raise ReportError(str(error)) from None
    damaged = [*experiment.problems]
    for trial in experiment.trials:
        damaged += trial.problems
    if not experiment.arms:
        why = f" ({damaged[0]})" if damaged else ""
        raise ReportError(f"{directory}: no trial has finished a round yet{why}")
    try:
        from reports import plots
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise ReportError(
            "matplotlib is missing; install it by: pip install 'grpo-trainable[report]'"
        ) from None
    files = {trial.name: read_files(trial) for trial in experiment.trials}
    for trial in experiment.trials:
        damaged += files[trial.name].damaged
    for text in damaged:
        warn(text)
    comparison = compare(experiment.trials)
    sections = plots.sections(experiment, comparison, files)
    drawn = [plot for section in sections for plot in section.plots if plot.missing is None]
    with warnings.catch_warnings():
        # Of letters that the font lacks and of axes without extent: nothing to be done about.
        warnings.simplefilter("ignore")
        images = {
            f"{plot.name}-{theme.name}": plots.render(plot, theme)
            for plot in drawn
            for theme in (plots.LIGHT, plots.DARK)
        }
        legend = plots.render_legend(list(comparison.arms), plots.LIGHT)
    try:
        experiment_files.make_directory(directory, "plots")
        for plot in drawn:
            content = images[f"{plot.name}-light"]
            experiment_files.write(directory, "plots", f"{plot.name}.png", content=content)
        experiment_files.write(directory, "plots", "legend.png", content=legend)
        # Of an earlier report that could draw more.
        not_drawn = {f"{p.name}.png" for section in sections for p in section.plots if p.missing}
        for name in not_drawn & experiment_files.entries(directory, "plots").keys():
            experiment_files.remove(directory, "plots", name)
        found = quantities(experiment, comparison, files)
        told = verdicts(found, comparison)
        data = report_data(experiment, comparison, found, told, damaged)
        page = render_page(experiment, comparison, files, sections, images, damaged, told)
        for name, text in (
            ("report.json", json.dumps(data, indent=1, allow_nan=False) + "\n"),
            ("report.html", page),
        ):
            content = text.encode("utf-8", errors="replace")
            experiment_files.write(directory, name, content=content)
    except OSError as error:
        raise ReportError(f"{directory}: cannot write there ({error.strerror})") from None
    return directory / "report.html"


# ---- The page --------------------------------------------------------------------------------


def render_page(
    experiment: ExperimentRecord,
    comparison: Comparison,
    files: Mapping[str, TrialFiles],
    sections: Sequence[Section],
    images: Mapping[str, bytes],
    damaged: Sequence[str],
    told: Sequence[str],
) -> str:
    """The whole HTML document. `images` by plot and theme: "speed_up-dark"."""
    name = experiment.directory.name
    parts = [
        _head(experiment, name, comparison),
        _missing(experiment, files, damaged),
        _table_section(comparison),
        _told_section(told),
        _answer_section(answer(experiment, comparison, files)),
        _changes_section(comparison),
        *(_plot_section(section, list(comparison.arms), images) for section in sections),
        _examples_section(experiment, files),
        _settings_section(experiment),
        _machine_section(experiment),
        _files_section(experiment),
    ]
    body = "\n".join(part for part in parts if part)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # Text of a model stands on this page: were an escape missing, it could still do nothing.
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "img-src data:; style-src 'unsafe-inline'\">\n"
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{_text(name)}: report</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _head(experiment: ExperimentRecord, name: str, comparison: Comparison) -> str:
    space = SPACES.get(str(experiment.description.get("space")))
    question = space.question if space else f"experiment {name}"
    trials = experiment.trials
    seeds = len({trial.config.seed for trial in trials})
    arms = len({trial.arm for trial in trials})
    done = sum(trial.done for trial in trials)
    failed = sum(trial.failed for trial in trials)
    open_ = len(trials) - done - failed
    counts = [f"{done} finished"]
    counts += [f"{failed} failed"] if failed else []
    counts += [f"{open_} still running, interrupted or not begun"] if open_ else []
    started = experiment.description.get("started")
    facts = [
        ("experiment", name),
        ("space", str(experiment.description.get("space", "not recorded"))),
        ("started", _moment(started) if started else "not recorded"),
        ("report written", time.strftime("%Y-%m-%d %H:%M")),
    ]
    line = " · ".join(f"{_text(key)} <b>{_text(value)}</b>" for key, value in facts)
    size = (
        f"{_plural(arms, 'arm')} × {_plural(seeds, 'seed')}: {_plural(len(trials), 'trial')}, "
        f"{', '.join(counts)}"
    )
    state = "good" if done == len(trials) else "bad"
    return (
        f"<header>\n<h1>{_text(question[:1].upper() + question[1:])}</h1>\n"
        f'<p class="facts">{line}</p>\n<p class="status {state}">{_text(size)}</p>\n'
        f"{_warning(comparison)}</header>"
    )


def _warning(comparison: Comparison) -> str:
    """On the first screen: a reward that rose may not mean what it seems to."""
    moved = any(change.moved for own in comparison.changes.values() for change in own)
    if not moved:
        return ""
    return (
        '<p class="status bad">Beside the reward <a href="#changes">something changed that it did '
        f"not ask for</a>: {_text(changes.moved_in(comparison.changes))}</p>\n"
    )


def _missing(
    experiment: ExperimentRecord, files: Mapping[str, TrialFiles], damaged: Sequence[str]
) -> str:
    """What a reader must know before trusting the numbers; nothing when all is there."""
    items = []
    for trial in experiment.trials:
        if not trial.done or trial.status != "finished":
            items.append(f"{trial.name}: {trial.status}")
        elif trial.error is not None:
            items.append(f"{trial.name}: finished after a retry; it had failed: {trial.error}")
    with_rows = [trial for trial in experiment.trials if trial.rows]

    def lacking(what: str, lacks: Callable[[TrialRecord], bool]) -> None:
        names = [trial.name for trial in with_rows if lacks(trial)]
        if names:
            items.append(f"{what}: {_some(names, len(with_rows))}")

    def without_kl(trial: TrialRecord) -> bool:
        return not trial.column("kl/reference_nats")

    lacking(
        "KL was not monitored (loss.kl_monitor=false)",
        lambda trial: without_kl(trial) and not trial.config.loss.kl_monitor,
    )
    lacking("no KL in the rows", lambda t: without_kl(t) and t.config.loss.kl_monitor)
    lacking(
        "other work on the machine was not measured",
        lambda trial: not trial.column("time/disturbed_fraction"),
    )
    lacking("no rollouts were kept", lambda trial: not files[trial.name].lags)
    lacking("no version changes were recorded", lambda trial: not files[trial.name].changes)
    lacking("no held-out responses were kept", lambda trial: not files[trial.name].examples.round)
    for key in ("packages", "machine", "started"):
        if not experiment.description.get(key):
            items.append(f"{key} not recorded: the experiment was started by an older version")
    items += [text for text in damaged if text not in items]
    if not items:
        return ""
    more = len(items) - MAX_ITEMS
    items = items[:MAX_ITEMS] + ([f"and {more} more of the kind"] if more > 0 else [])
    listed = "".join(f"<li>{_text(item)}</li>" for item in items)
    return (
        f'<section class="box" id="missing">\n<h2>Missing or incomplete</h2>\n'
        f"<ul>{listed}</ul>\n</section>"
    )


def _some(names: Sequence[str], total: int) -> str:
    return "all trials" if len(names) == total else ", ".join(names)


def _table_section(comparison: Comparison) -> str:
    notes = [comparison.note(), *comparison.footnotes()]
    return (
        f'<section id="arms">\n<h2>The arms compared</h2>\n'
        f"{_table(HEADER, comparison.rows(), figures=True)}\n"
        + "".join(f'<p class="note">{_text(note)}</p>\n' for note in notes)
        + "</section>"
    )


def _told_section(told: Sequence[str]) -> str:
    if not told:
        return ""
    return f'<section id="told">\n<h2>What can be told apart</h2>\n{_sentences(told)}</section>'


def _sentences(said: Sequence[str]) -> str:
    """A list; nothing when it would be empty."""
    items = "".join(f"<li>{_text(sentence)}</li>\n" for sentence in said)
    return f"<ul>{items}</ul>\n" if items else ""


def _answer_section(found: Answer | None) -> str:
    if found is None:
        return ""
    return (
        f'<section id="answer">\n<h2>What was asked</h2>\n{_sentences(found.said)}'
        f"{_table(found.header, found.rows(), figures=True)}\n"
        f'<p class="note">{_text(found.note)}</p>\n</section>'
    )


def _changes_section(comparison: Comparison) -> str:
    """What moved by more than its threshold, and all quantities folded below."""
    said = []
    for arm, own in comparison.changes.items():
        moved = [sentence for change in own for sentence in change.sentences()]
        missing = changes.not_known(own)
        moved += [f"not known in every trial: {', '.join(missing)}"] if missing else []
        told = "; ".join(moved) or "nothing beyond the thresholds"
        said.append(f"<li><b>{_text(arm)}</b>: {_text(told).replace('-&gt;', '→')}.</li>")
    quantities = changes.QUANTITIES
    rows = [
        (arm, *(ends(c.before, c.after, c.quantity.form) for c in own))
        for arm, own in comparison.changes.items()
    ]
    rows.append(("named beyond", *(quantity.shown_threshold for quantity in quantities)))
    explained = [
        (q.title, f"{q.measured}.", q.shown_threshold, f"{q.because}.") for q in quantities
    ]
    return (
        '<section id="changes">\n<h2>What changed that the reward did not ask for</h2>\n'
        "<p>A reward can be won by another kind of text than the one it was meant for. Named is "
        "every quantity that moved, from before training to now, by more than its threshold, "
        "whichever way and in whichever seed.</p>\n"
        f"<ul>{''.join(said)}</ul>\n<details><summary>All quantities and their thresholds"
        f"</summary>\n{_table(('arm', *(q.title for q in quantities)), rows, figures=True)}\n"
        f"{_table(('quantity', 'how it is measured', 'threshold', 'because'), explained)}\n"
        '<p class="note">Words are runs of letters and digits in lower case; where a language is '
        "written without spaces, a run is a phrase.</p></details>\n</section>"
    )


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], *, figures: bool = False) -> str:
    show = _figures if figures else _text
    head = "".join(f'<th scope="col">{_text(cell)}</th>' for cell in header)
    body = "".join(
        f'<tr><th scope="row">{_text(row[0])}</th>'
        + "".join(f"<td>{show(cell)}</td>" for cell in row[1:])
        + "</tr>\n"
        for row in rows
    )
    kind = "figures" if figures else "words"
    # With a tab stop the keyboard can scroll it.
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="table">'
        f'<table class="{kind}">\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody>\n</table></div>"
    )


def _figures(cell: str) -> str:
    """`0.3 (0.2-0.4)` on two lines, so that twelve columns fit side by side."""
    middle, spread = re.sub(r" \([^)]*\)", "", cell), re.findall(r"\(([^)]*)\)", cell)
    below = f"<small>{_text(' -> '.join(spread))}</small>" if spread else ""
    return (_text(middle) + below).replace("-&gt;", "→")


# ---- Plots -----------------------------------------------------------------------------------

# By the names matplotlib has for them, in a square of 12.
SHAPES = {
    "o": '<circle cx="12" cy="6" r="4"/>',
    "s": '<path d="M8.5 2.5h7v7h-7z"/>',
    "^": '<path d="M12 1.6l4.4 8h-8.8z"/>',
    "D": '<path d="M12 1.2l4.6 4.8-4.6 4.8-4.6-4.8z"/>',
    "v": '<path d="M12 10.4l4.4-8h-8.8z"/>',
    "P": '<path d="M10.4 1.6h3.2v2.8h2.8v3.2h-2.8v2.8h-3.2v-2.8h-2.8v-3.2h2.8z"/>',
    "X": '<path d="M9.6 1.6l2.4 2.2 2.4-2.2 2.2 2.2-2.3 2.2 2.3 2.2-2.2 2.2-2.4-2.2-2.4 2.2'
    '-2.2-2.2 2.3-2.2-2.3-2.2z"/>',
    "*": '<path d="M12 0.8l1.5 3.6 3.9.3-3 2.5.9 3.8-3.3-2-3.3 2 .9-3.8-3-2.5 3.9-.3z"/>',
}


def _plot_section(section: Section, arms: Sequence[str], images: Mapping[str, bytes]) -> str:
    figures = "\n".join(_figure(plot, images) for plot in section.plots)
    legend = _legend(arms) if section.legend and len(arms) > 1 else ""
    return (
        f"<section>\n<h2>{_text(section.title)}</h2>\n{legend}"
        f'<div class="plots">\n{figures}\n</div>\n</section>'
    )


def _legend(arms: Sequence[str]) -> str:
    """One for all plots of a section, in text: seven lines in every plot would hide the data."""
    from reports.plots import colour, marker

    items = "".join(
        f'<li><svg width="24" height="12" aria-hidden="true" fill="{colour(i)}">'
        f'<path d="M0 5h24v2h-24z"/>{SHAPES[marker(i)]}</svg>{_text(arm)}</li>'
        for i, arm in enumerate(arms)
    )
    return f'<ul class="legend" aria-label="arms">{items}</ul>\n'


def _figure(plot: Plot, images: Mapping[str, bytes]) -> str:
    size = "tall" if plot.height > 4.5 else "low"
    opening = f'<figure id="{_text(plot.name)}" class="{size}">'
    if plot.missing is not None:
        return (
            f"{opening}<h3>{_text(plot.title)}</h3>"
            f'<p class="absent">Not drawn. {_text(plot.missing)}</p></figure>'
        )
    light, dark = (
        "data:image/png;base64," + base64.b64encode(images[f"{plot.name}-{theme}"]).decode()
        for theme in ("light", "dark")
    )
    return (
        f"{opening}<h3>{_text(plot.title)}</h3><p>{_text(plot.look)}</p>\n<picture>"
        f'<source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img src="{light}" alt="{_text(plot.alt)}" width="720" '
        f'height="{round(144 * plot.height)}"></picture></figure>'
    )


# ---- Responses -------------------------------------------------------------------------------


def _examples_section(experiment: ExperimentRecord, files: Mapping[str, TrialFiles]) -> str:
    blocks = []
    for place, (arm, trials) in enumerate(experiment.arms.items()):
        trial = trials[0]
        examples = files[trial.name].examples
        if not examples.pairs:
            why = (
                "no evaluation after the first was kept"
                if examples.round == 0
                else "no prompt was kept both at round 0 and later"
            )
            content = f'<p class="absent">Nothing to compare: {why}.</p>'
        else:
            content = "\n".join(
                f'<article><h4>Prompt</h4><pre>{_long(pair.prompt)}</pre><div class="pair">'
                f"<div><h4>Round 0 · reward {pair.before_reward:.2f}</h4>"
                f"<pre>{_long(pair.before)}</pre></div>"
                f"<div><h4>Round {examples.round} · reward {pair.after_reward:.2f}</h4>"
                f"<pre>{_long(pair.after)}</pre></div></div></article>"
                for pair in examples.pairs
            )
        opened = " open" if place == 0 else ""
        title = f"{arm}, seed {trial.config.seed}"
        blocks.append(f"<details{opened}><summary>{_text(title)}</summary>\n{content}</details>")
    return (
        '<section id="examples">\n<h2>Before and after</h2>\n'
        "<p>The first held-out prompts, not the best, with the first response to each.</p>\n"
        + "\n".join(blocks)
        + "\n</section>"
    )


# ---- Settings, machine, files ----------------------------------------------------------------


def _settings_section(experiment: ExperimentRecord) -> str:
    by_arm: dict[str, list[Mapping[str, Any]]] = {}
    for trial in experiment.trials:
        by_arm.setdefault(trial.arm, []).append(flatten(trial.config.to_dict()))
    every = [flat for trials in by_arm.values() for flat in trials]
    keys = [key for key in every[0] if key not in ("arm", "seed")]
    shared = {key: every[0][key] for key in keys if all(f[key] == every[0][key] for f in every)}
    defaults = flatten(GRPOConfig().to_dict())
    changed = [f"{key}={shown(v)}" for key, v in shared.items() if v != defaults[key]]
    different = [
        (key, *(" | ".join(dict.fromkeys(shown(f[key]) for f in fs)) for fs in by_arm.values()))
        for key in keys
        if key not in shared
    ]
    seeds = sorted({trial.config.seed for trial in experiment.trials})
    fixed = "; ".join(changed) if changed else "none: all of them are the defaults"
    table = (
        f"<h3>What the arms set differently</h3>\n{_table(('key', *by_arm), different)}\n"
        if different
        else "<p>The trials differ in nothing but arm and seed.</p>\n"
    )
    jsons = "\n".join(
        f"<details><summary>params.json of {_text(trials[0].name)}</summary>"
        f"<pre>{_text(json.dumps(trials[0].params, indent=1))}</pre></details>"
        for trials in experiment.arms.values()
    )
    described = json.dumps(dict(experiment.description), indent=1)
    return (
        f'<section id="settings">\n<h2>Settings</h2>\n'
        f"<p>Seeds: {_text(', '.join(map(str, seeds)))}. "
        f"Shared settings that are not the defaults: {_text(fixed)}.</p>\n{table}"
        f"<details><summary>All {len(shared)} settings that the trials share</summary>\n"
        f"{_table(('key', 'value'), [(key, shown(value)) for key, value in shared.items()])}"
        f"</details>\n{jsons}\n"
        f"<details><summary>experiment.json</summary><pre>{_text(described)}</pre></details>\n"
        "</section>"
    )


def _machine_section(experiment: ExperimentRecord) -> str:
    tables = []
    for key in ("machine", "packages"):
        value = experiment.description.get(key)
        if isinstance(value, Mapping) and value:
            rows = [(str(name), str(item)) for name, item in value.items()]
            rows += (
                [("grpo_trainable", str(experiment.description["grpo_trainable"]))]
                if key == "packages"
                and "grpo_trainable" in experiment.description
                and "grpo_trainable" not in value
                else []
            )
            tables.append(_table((key, ""), rows))
        else:
            tables.append(f'<p class="absent">{key.capitalize()} not recorded.</p>')
    both = "\n".join(f"<div>{table}</div>" for table in tables)
    return (
        '<section id="machine">\n<h2>Machine and packages</h2>\n'
        f'<div class="pair">{both}</div>\n</section>'
    )


def _files_section(experiment: ExperimentRecord) -> str:
    directory = experiment.directory
    commands = [
        ("Watch every metric", ["tensorboard", "--logdir", str(directory)]),
        ("Write this page anew", ["python", "launch/report.py", str(directory)]),
    ]
    if experiment.description.get("space"):
        resume = [
            *("python", "launch/tune.py", "--space", str(experiment.description["space"])),
            *("--resume", "must", "--name", directory.name, "--storage", str(directory.parent)),
        ]
        commands.append(("Go on where it stopped (only with experiments that you own)", resume))
    listed = "\n".join(
        f"<p>{_text(title)}:</p><pre>{_text(shlex.join(words))}</pre>" for title, words in commands
    )
    traces = [trial.name for trial in experiment.trials if trial.has_trace]
    links = "".join(
        f'<li><a href="{_text(quote(os.fsencode(name)))}/trace.json" download>'
        f"{_text(name)}/trace.json</a></li>"
        for name in traces
    )
    trace = (
        "<p>Traces of what every actor did when; open https://ui.perfetto.dev in a browser and "
        f"drop the file there:</p><ul>{links}</ul>"
        if traces
        else '<p class="absent">No trace.json was written.</p>'
    )
    return f'<section id="files">\n<h2>Go on from here</h2>\n{listed}\n{trace}\n</section>'


# ---- Text ------------------------------------------------------------------------------------


def _text(text: str) -> str:
    """Escaped; what a reader could not see, or what would turn the line round, made visible."""

    def visible(character: str) -> str:
        if character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cf", "Cs"):
            return character
        code = ord(character)
        return chr(0x2400 + code) if code < 0x20 else f"[U+{code:04X}]"

    return html.escape("".join(map(visible, text)), quote=True)


def _long(text: str) -> str:
    rest = len(text) - MAX_TEXT
    text = text.strip("\n")
    if not text.strip():
        return '<span class="absent">(empty)</span>'
    if rest <= 0:
        return _text(text)
    return f'{_text(text[:MAX_TEXT])}<span class="absent"> … {rest} more characters</span>'


def _moment(started: Any) -> str:
    """`2026-11-20 15:00` of an ISO time, its zone kept; anything else as it is."""
    found = re.fullmatch(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d)(?::[\d.]+)?(.*)", str(started))
    if found is None:
        return str(started)
    zone = "UTC" if found[3] in ("Z", "+00:00") else found[3]
    return f"{found[1]} {found[2]} {zone}".strip()


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


STYLE = """
:root { --back: #f6f7f9; --card: #ffffff; --text: #24292f; --dim: #57606a; --line: #d8dee4;
  --good: #1a7f37; --bad: #9a6700; --box: #fff8e5; --boxline: #e0c068; --link: #0969da; }
@media (prefers-color-scheme: dark) {
  :root { --back: #121519; --card: #1b1f24; --text: #d5dae0; --dim: #9aa4af; --line: #3a424c;
    --good: #57c06d; --bad: #e0b34f; --box: #2a2517; --boxline: #6b5a26; --link: #79b8ff; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--text); line-height: 1.5;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
main { max-width: 78rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; overflow-wrap: anywhere; }
h1 { font-size: 1.65rem; line-height: 1.25; margin: .5rem 0; text-wrap: balance; }
h2 { font-size: 1.25rem; margin: 2.4rem 0 .6rem; }
h3 { font-size: 1rem; margin: 0 0 .2rem; }
h4 { font-size: .8rem; margin: .6rem 0 .2rem; color: var(--dim); font-weight: 600; }
p { margin: .3rem 0 .6rem; }
a { color: var(--link); }
.facts, .note, .absent, figure p { color: var(--dim); font-size: .9rem; }
.facts b { color: var(--text); font-weight: 600; }
.status { font-weight: 600; }
.status.good { color: var(--good); }
.status.bad { color: var(--bad); }
.box { background: var(--box); border: 1px solid var(--boxline); border-radius: .5rem;
  padding: .8rem 1rem; margin: 1rem 0; }
.box h2 { margin: 0 0 .3rem; font-size: 1rem; }
.box ul { margin: 0; padding-left: 1.2rem; font-size: .9rem; }
.scroll { overflow-x: auto; max-width: 100%; background: var(--card);
  border: 1px solid var(--line); border-radius: .5rem; margin: .4rem 0; }
table { border-collapse: collapse; font-size: .82rem; overflow-wrap: normal; width: 100%; }
th, td { padding: .4rem .5rem; text-align: left; vertical-align: top; white-space: nowrap; }
th { font-weight: 600; }
thead th { color: var(--dim); border-bottom: 1px solid var(--line); vertical-align: bottom; }
tbody tr + tr > * { border-top: 1px solid var(--line); }
.figures { font-variant-numeric: tabular-nums; }
.figures th:not(:first-child), .figures td { text-align: right; }
small { display: block; color: var(--dim); font-size: .78rem; }
.words td { white-space: normal; min-width: 5rem; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; padding: 0;
  margin: .2rem 0 .7rem; font-size: .9rem; }
.legend li { display: flex; align-items: center; gap: .4rem; }
.legend svg { flex: none; }
.plots { display: grid; grid-template-columns: minmax(0, 1fr); gap: 1rem; }
figure { margin: 0; background: var(--card); border: 1px solid var(--line);
  border-radius: .5rem; padding: .8rem; display: flex; flex-direction: column; }
figure.low picture { margin-top: auto; }
figure img { display: block; width: 100%; height: auto; }
.pair { display: grid; grid-template-columns: minmax(0, 1fr); gap: 0 1rem; align-items: start; }
@media (min-width: 50rem) {
  .plots, .pair { grid-template-columns: repeat(2, minmax(0, 1fr)); }
  figure.tall { grid-row: span 2; } }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--back); margin: 0 0 .6rem;
  border: 1px solid var(--line); border-radius: .4rem; padding: .5rem .7rem; font-size: .85rem;
  font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
details { background: var(--card); border: 1px solid var(--line); border-radius: .5rem;
  padding: .5rem .9rem; margin: .5rem 0; }
summary { cursor: pointer; font-weight: 600; font-size: .95rem; }
article { border-top: 1px solid var(--line); margin-top: .7rem; padding-top: .2rem; }
"""
