"""The HTML page that compares the arms of an experiment, section by section.

The page loads nothing from outside: no script, no font, no picture. A model wrote the responses, so
all text is escaped.
"""

from __future__ import annotations

import os
import shlex
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING
from urllib.parse import quote

from grpo_trainable.command_line import command
from grpo_trainable.config import GRPOConfig, resources
from grpo_trainable.text import joined, plural
from grpo_trainable.tools.evaluation.settings import must_name
from reports import audit, changes, menu_text
from reports.answers import Answer
from reports.audit import Audit
from reports.document import document, figure
from reports.every_pair import HEADER as PAIRS
from reports.every_pair import NEIGHBOURS, ArmPair, neighbours
from reports.markup import escaped, html_list, html_table, moment, narrow_tables, shortened
from reports.menu import Menu
from reports.menu_text import paragraph
from reports.own_files import changed_code
from reports.parquet_reader import TrialFiles
from reports.population import HEADER as LINEAGE
from reports.population import SAID
from reports.records import ExperimentRecord, TrialRecord, count_stopped
from reports.settings import MAX_OPEN, run_section, settings_section
from reports.summary import EXPLAINED, EXPLAINED_MARK, MARK, Comparison, ends
from reports.verdicts import REWARD
from search_spaces.columns import SHARES

if TYPE_CHECKING:
    from reports.canvas import Section

MAX_ITEMS = 60  # maximum number of lines in the list of missing data


def render_page(
    experiment: ExperimentRecord,
    comparison: Comparison,
    asked: Answer | None,
    files: Mapping[str, TrialFiles],
    sections: Sequence[Section],
    images: Mapping[str, bytes],
    damaged: Sequence[str],
    short: Sequence[str],
    told: Sequence[str],
    pairs: Sequence[ArmPair],
    audits: Mapping[str, Audit],
    menu: Menu | None = None,
    menu_plots: Sequence[Section] = (),
    no_verdict: str | None = None,
) -> str:
    """Return the whole HTML document.

    Args:
        experiment: The experiment as it was read.
        comparison: The comparison of its arms.
        asked: The table that answers the question that the search space asks, or None.
        files: Figures from the trials' Parquet files, by trial name.
        sections: The plots, in sections with headings.
        images: PNG images by plot and theme, such as "speed_up-dark".
        damaged: One line for each file that could not be read.
        short: The short answer at the top of the page.
        told: The sentences about the differences between arms.
        pairs: The comparisons of every pair of arms.
        audits: The audit of each arm.
        menu: The verdicts with a margin, or None if there are none.
        menu_plots: The plots of the menu.
        no_verdict: The reason why there are no verdicts, or how to get them.
    """
    name = experiment.directory.name
    beside = neighbours(pairs, experiment.arms)
    parts = [
        _head(
            experiment,
            name,
            comparison,
            menu,
            short,
            no_verdict,
            has_neighbours=bool(beside and told),
        ),
        _menu_section(menu),
        *(
            _plot_section(section, list(comparison.arms), images)
            for section in menu_plots
            if any(plot.missing is None for plot in section.plots)
        ),
        run_section(experiment),
        _audit_section(audits, experiment),
        _missing(experiment, files, damaged),
        _table_section(comparison, experiment),
        _population_section(comparison),
        _told_section(
            *(told, pairs, beside, comparison.baseline),
            has_menu=menu is not None,
            seeds=comparison.seeds,
        ),
        _answer_section(asked),
        _changes_section(comparison),
        *(_plot_section(section, list(comparison.arms), images) for section in sections),
        _examples_section(experiment, comparison, files),
        settings_section(experiment),
        _extensions_section(experiment),
        _machine_section(experiment),
        _files_section(experiment),
    ]
    body = "\n".join(part for part in parts if part)
    return document(f"{name}: report", body)


def _head(
    experiment: ExperimentRecord,
    name: str,
    comparison: Comparison,
    menu: Menu | None,
    short: Sequence[str],
    no_verdict: str | None,
    *,
    has_neighbours: bool,
) -> str:
    trials = experiment.trials
    not_begun = experiment.not_begun
    left = len(not_begun) + (experiment.waiting or 0)
    planned = len(trials) + left
    seeds = len({trial.config.seed for trial in trials} | {seed for _, seed in not_begun})
    begun_arms = {trial.config.arm for trial in trials}
    arms = len({trial.arm for trial in trials}) + len({arm for arm, _ in not_begun} - begun_arms)
    asked = experiment.question
    # A single arm cannot answer the question that the space asks.
    question = f"experiment {name}" if asked is None or arms == 1 else asked.text
    done = sum(trial.done for trial in trials)
    failed = sum(trial.failed for trial in trials)
    open_ = len(trials) - done - failed
    counts = [f"{sum(trial.finished for trial in trials)} finished"]
    counts += count_stopped(trials)
    counts += [f"{failed} failed"] if failed else []
    counts += [f"{open_} still running or interrupted"] if open_ else []
    counts += [f"{left} not started"] if left else []
    started = experiment.description.get("started")
    origin = [
        ("space", str(experiment.description.get("space", "not recorded"))),
        ("started", moment(started) if started else "not recorded"),
    ]
    facts = [
        ("experiment", name),
        *_trained(experiment),
        *([("run by", "your own Tuner")] if experiment.own_tuner else origin),
        ("report written", time.strftime("%Y-%m-%d %H:%M %Z")),
    ]
    line = " · ".join(f"{escaped(key)} <b>{escaped(value)}</b>" for key, value in facts)
    if any(trial.member for trial in trials):
        size = f"a population of {plural(planned, 'member')}, {', '.join(counts)}"
    else:
        most = "up to " if arms * seeds > planned else ""  # decided arms get no more seeds
        size = (
            f"{plural(arms, 'arm')} × {most}{plural(seeds, 'seed')}: {plural(planned, 'trial')}, "
            f"{', '.join(counts)}"
        )
    state = "good" if experiment.all_done else "bad"
    first = paragraph(menu) if menu else short
    answered = f'<p class="answer">{escaped(" ".join(first))}</p>\n' if first else ""
    notes = [] if menu else [" ".join(comparison.on_equal_devices)]
    notes.append(no_verdict or "")
    answered += "".join(f'<p class="note">{escaped(note)}</p>\n' for note in notes if note)
    if arms > 1:
        answered += '<p class="note">Settings of the arms: <a href="#run">What was run</a>'
        if has_neighbours:
            answered += '. Similar arms compared: <a href="#single">What single settings do</a>'
        answered += ".</p>\n"
    return (
        f"<header>\n<h1>{escaped(question[:1].upper() + question[1:])}</h1>\n"
        f"{_arms_run(experiment)}"
        f'<p class="facts">{line}</p>\n<p class="status {state}">{escaped(size)}</p>\n'
        f"{answered}{_warnings(comparison, experiment)}</header>"
    )


def _trained(experiment: ExperimentRecord) -> list[tuple[str, str]]:
    """Return the task, the model and the samples per trial, as far as all trials share them."""
    configs = [trial.config for trial in experiment.trials]
    facts = {
        "task": {f"{own.task.name}{_range_of_reward(own)}{_prompts_of(own)}" for own in configs},
        "model": {own.model.path or own.model.preset or "" for own in configs},
        "samples per trial": {str(experiment.description.get("samples") or "")},
    }
    return [(key, min(values)) for key, values in facts.items() if len(values) == 1 and all(values)]


def _prompts_of(config: GRPOConfig) -> str:
    """Name the user's file of training prompts, or return "" if there is none."""
    path = config.task.train_file
    return f" with the prompts of {os.path.basename(path)}" if path else ""


def _range_of_reward(config: GRPOConfig) -> str:
    """Return the rewards that a response can earn, in brackets, or "" if they are not known."""
    task = config.task
    own = task.has_custom_reward or task.part_weights or task.length_penalty
    return "" if own or task.name != "keyword" else " (reward 0 or 1)"


def _arms_run(experiment: ExperimentRecord) -> str:
    """Say, as HTML, how many arms of the search space the experiment has, unless it has all."""
    if experiment.question is None:
        return ""
    asked = set(experiment.question.arms)
    run = {trial.config.arm for trial in experiment.trials}
    run = asked & (run | {arm for arm, _ in experiment.not_begun})
    if not run or run == asked:
        return ""
    return (
        f'<p class="note">This experiment has {len(run)} of the {len(asked)} arms of its search '
        f"space.{escaped(_effect_of_lag(experiment))}</p>\n"
    )


def _effect_of_lag(experiment: ExperimentRecord) -> str:
    """Name the arms that differ only in lag; empty if there are none."""
    groups: dict[str, dict[str, int]] = {}
    for trial in experiment.trials:
        alike = trial.config.to_dict() | dict.fromkeys(("arm", "seed", "lag"))
        groups.setdefault(repr(alike), {})[trial.arm] = trial.config.lag
    found = [f"between {joined(list(g))}" for g in groups.values() if len(set(g.values())) > 1]
    if not found:
        return ""
    if len(groups) == 1:
        return " These arms differ only in lag."
    return (
        f" The effect of a lag can be seen only {joined(found)}, because all other pairs of arms "
        "differ in other settings."
    )


def _menu_section(menu: Menu | None) -> str:
    if menu is None:
        return ""
    header, *rows = menu_text.shown(menu)
    return (
        '<section id="menu">\n<h2>Menu</h2>\n'
        f"{narrow_tables(header, rows)}\n"
        f"{_notes(menu_text.notes(menu))}</section>"
    )


def _audit_section(audits: Mapping[str, Audit], experiment: ExperimentRecord) -> str:
    failed = audit.reasons(audits)
    waiting = [arm for arm, _ in experiment.not_begun if arm not in audits]
    passed = audit.passed(audits, [*audits, *waiting])
    passed = passed or ("" if failed else "No trial is complete yet.")
    return (
        '<section id="audit">\n<h2>Audit</h2>\n'
        "<p>The audit checks that the complete trials of each arm were trained as the arm's "
        f"settings ask. {escaped(passed)}</p>\n{html_list(failed)}"
        f"<details{' open' if failed else ''}><summary>Figures of the audit</summary>\n"
        f"{html_table(audit.CHECKS, audit.check_rows(audits), figures=True)}\n"
        f'<p class="note">{escaped(audit.CHECKS_NOTE)}</p>\n'
        f"{html_table(audit.CONSEQUENCES, audit.consequence_rows(audits), figures=True)}\n"
        f'<p class="note">{escaped(audit.CONSEQUENCES_NOTE)}</p>\n</details>\n</section>'
    )


def _warnings(comparison: Comparison, experiment: ExperimentRecord) -> str:
    """Return the warnings for the first screen, as HTML.

    The warnings concern changed code, cut-off responses, and changes in quantities other than the
    reward.
    """
    found = [escaped(note) for note in (changed_code(experiment), *comparison.truncated()) if note]
    said = "".join(f'<p class="status bad">{text}</p>\n' for text in found)
    moved = [arm for arm, own in comparison.changes.items() if any(c.moved for c in own)]
    if not moved:
        return said
    base = comparison.baseline
    shared = (
        f" A change that the baseline {base} shows too may not come from the settings in which the "
        "arms differ."
        if base in moved and len(moved) > 1
        else ""
    )
    return (
        f'{said}<div class="status bad">Before you trust the reward, check <a href="#changes">the '
        f"other quantities that changed</a>.{escaped(shared)}\n"
        f"{html_list([f'{line}.' for line in changes.moved_in(comparison.changes)])}</div>\n"
    )


def _missing(
    experiment: ExperimentRecord, files: Mapping[str, TrialFiles], damaged: Sequence[str]
) -> str:
    """Return, as HTML, a list of missing data that makes figures less reliable; may be empty."""
    items = []
    for trial in experiment.trials:
        if not trial.finished:
            items.append(f"{trial.label}: {trial.status}")
        elif trial.error is not None:
            items.append(f"{trial.label}: finished after a retry; earlier error: {trial.error}")
    if experiment.not_begun:
        waiting = [f"{arm}/{seed}" for arm, seed in experiment.not_begun]
        items.append(f"not started: {', '.join(waiting)}")
    if experiment.waiting:
        items.append(f"not started: {plural(experiment.waiting, 'trial')}")
    with_rows = [trial for trial in experiment.trials if trial.rows]
    runs = Counter((trial.arm, trial.config.seed) for trial in with_rows if not trial.member)
    items += [
        f"{arm}: {count} trials have seed {seed}, and all of them count. To measure the scatter, "
        "give each trial its own seed. Give each run of Tuner.fit() its own name, because the "
        "reward function may have changed between two runs."
        for (arm, seed), count in runs.items()
        if count > 1
    ]

    def lacking(what: str, lacks: Callable[[TrialRecord], bool]) -> None:
        names = [trial.label for trial in with_rows if lacks(trial)]
        if names:
            items.append(f"{what}: {_some(names, len(with_rows))}")

    def without_kl(trial: TrialRecord) -> bool:
        return not trial.column("kl/reference_nats")

    lacking(
        "KL was not monitored (loss.kl_monitor=false)",
        lambda trial: without_kl(trial) and not trial.config.loss.kl_monitor,
    )
    lacking(
        "the KL was monitored, but no round recorded it",
        lambda t: without_kl(t) and t.config.loss.kl_monitor,
    )
    lacking(
        "the load from other processes was not measured, so speeds may be wrong",
        lambda trial: not trial.column("time/disturbed_fraction"),
    )
    lacking(
        "GPU use by other processes was not measured, so speeds may be wrong",
        lambda t: resources.uses_gpus(t.config),
    )
    lacking("no rollouts were kept", lambda trial: not files[trial.name].lags)
    lacking("no version changes were recorded", lambda trial: not files[trial.name].changes)
    lacking(
        "no held-out responses after round 0 were kept",
        lambda trial: not files[trial.name].examples.round,
    )
    for key in ("packages", "machine", "started"):
        if not (experiment.description.get(key) or experiment.own_tuner):
            items.append(f"{key} not recorded: an older version of this package ran the trials")
    items += [text for text in damaged if text not in items]
    if not items:
        return ""
    more = len(items) - MAX_ITEMS
    items = items[:MAX_ITEMS] + ([f"and {more} more like these"] if more > 0 else [])
    listed = "".join(f"<li>{escaped(item)}</li>" for item in items)
    return (
        f'<section class="box" id="missing">\n<h2>Missing or incomplete</h2>\n'
        "<p>Read this list before you rely on the figures below.</p>\n"
        f"<ul>{listed}</ul>\n</section>"
    )


def _some(names: Sequence[str], total: int) -> str:
    return "all trials" if len(names) == total else ", ".join(names)


def _table_section(comparison: Comparison, experiment: ExperimentRecord) -> str:
    several = len(comparison.arms) > 1
    title = "Comparison of the arms" if several else "The arm"
    usual = GRPOConfig.from_dict({}).loss
    see = ""
    if any(trial.config.loss != usual for trial in experiment.trials):
        see = f" docs/algorithms.md explains {'their objectives' if several else 'its objective'}."
    notes = [note for note in (comparison.note(), *comparison.warnings()) if note]
    of_others = comparison.notes_on_other_work()
    others = ", and what other processes disturbed" if of_others else ""
    return (
        f'<section id="arms">\n<h2>{title}</h2>\n'
        "<p>One row per arm. Samples/s is the arm's speed, and device-hours are its cost. The "
        f"held-out reward shows what the arm learned.{see}</p>\n"
        f"{narrow_tables(comparison.header, comparison.rows())}\n"
        f"{_notes(notes)}<details><summary>What the columns mean{others}</summary>\n"
        f"{_notes([comparison.columns_explained(), *of_others])}</details>\n</section>"
    )


def _notes(notes: Sequence[str]) -> str:
    """Return notes as paragraphs; the second line of a note is a command."""
    said = ""
    for note in notes:
        prose, _, command = note.partition("\n")
        said += f'<p class="note">{escaped(prose)}</p>\n'
        said += f"<pre>{escaped(command)}</pre>\n" if command else ""
    return said


def _population_section(comparison: Comparison) -> str:
    """Return the lineage of a population as HTML; empty if the trials are independent."""
    if not comparison.lineage:
        return ""
    return (
        f'<section id="population">\n<h2>The population</h2>\n<p>{escaped(SAID)}</p>\n'
        f"{html_table(LINEAGE, comparison.lineage)}\n</section>"
    )


def _told_section(
    told: Sequence[str],
    pairs: Sequence[ArmPair],
    beside: Sequence[tuple[str, ...]],
    baseline: str | None,
    *,
    has_menu: bool,
    seeds: int,
) -> str:
    if not told:
        return ""
    bounds = ""
    if has_menu:
        bounds = (
            " The menu's bounds are computed differently (one-sided, corrected for the number of "
            "arms, over seeds only), so they can disagree with these intervals. Decide by the menu."
        )
    widths = ""
    rewards = [
        own
        for pair in pairs
        for quantity in pair.quantities
        if quantity.key == REWARD
        for own in quantity.contrasts.values()
    ]
    if any(own.interval is not None and len(own.seeds) > 1 for own in rewards):
        widths = (
            " The interval of a difference in reward is narrow if the seeds agree about as well as "
            "the noise of the evaluation allows. Otherwise it is wide, because a few seeds show "
            "little about their own spread."
        )
    every = ""
    if beside:
        opened = " open" if len(beside) <= MAX_OPEN else ""
        of_machine = (
            " With one seed, a difference in speed can also come from the machine, whose speed can "
            "change from trial to trial."
            if seeds == 1
            else ""
        )
        every = (
            '<h3 id="single">What single settings do</h3>\n'
            f"<details{opened}><summary>Pairs of similar arms</summary>\n"
            "<p>Each row compares two arms that differ in only one or two settings, apart from "
            "rounds and eval.every. Settings that only one of the two arms reads are not listed. "
            f"No other arm lies between them.{of_machine}</p>\n"
            f"{_without_empty_columns(NEIGHBOURS, beside)}\n{_why_marked(pairs)}</details>\n"
        )
    if len(pairs) > 1:  # a single pair is already in the list above
        every += (
            f"<details><summary>Every pair of arms{_clear_elsewhere(pairs, baseline)}</summary>\n"
            f"{_without_empty_columns(PAIRS, [pair.cells() for pair in pairs])}\n"
            f"{_why_marked(pairs)}</details>\n"
        )
    return (
        '<section id="told">\n<h2>Which arms differ</h2>\n'
        "<p>A difference is clear if its 95% interval excludes the value that two equal arms would "
        "have: 1 for a ratio, 0 for a difference in reward. “No clear difference” does not mean "
        "that two arms are equal. It means that these runs cannot show which arm is better."
        f"{widths}{bounds}</p>\n"
        f"{html_list(told)}{every}</section>"
    )


def _clear_elsewhere(pairs: Sequence[ArmPair], baseline: str | None) -> str:
    """Say how many clear differences there are between arms other than the baseline, if any."""
    clear = sum(
        bool(quantity.contrasts[pair.arm].told_apart)
        for pair in pairs
        if baseline not in (pair.arm, pair.over)
        for quantity in pair.quantities
        if pair.arm in quantity.contrasts
    )
    said = f" ({plural(clear, 'clear difference')} between arms other than the baseline)"
    return said if clear else ""


def _without_empty_columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as HTML, without the columns that have no figure."""
    columns = zip(header, *rows, strict=True)
    header, *rows = zip(*(own for own in columns if set(own[1:]) != {"-"}), strict=True)
    return html_table(header, rows, figures=True)


def _why_marked(pairs: Sequence[ArmPair]) -> str:
    said = ""
    if any(own.by_machine for pair in pairs for own in pair.quantities):
        said += f'<p class="note">{EXPLAINED_MARK}: {EXPLAINED}.</p>\n'
    if not any(own.not_comparable for pair in pairs for own in pair.quantities):
        return said
    return said + (
        f'<p class="note">{MARK}: not comparable, because other processes used the machine while '
        'one of the two arms ran. The notes below the <a href="#arms">first table</a> say how much '
        "of the machine those processes took.</p>\n"
    )


def _answer_section(found: Answer | None) -> str:
    if found is None:
        return ""
    header, rows = found.header, found.rows()
    several = any(len(values) > 1 for own in found.arms.values() for values in own.values())
    ranges = (
        " Ranges go from the lowest to the highest seed, and are not intervals. Rewards are "
        "medians over the seeds, and differences are means."
        if several
        else ""
    )
    first = len(header) - sum(column in SHARES for column in found.shown)
    shares = [(row[0], *row[first:]) for row in rows]
    of_stages = ""
    if first < len(header):
        of_stages = (
            "<p>Each stage's share of a round's work, including the rounds that other processes "
            "disturbed:</p>\n"
            f"{narrow_tables((header[0], *header[first:]), shares)}\n"
        )
    return (
        '<section id="answer">\n<h2>The question, arm by arm</h2>\n'
        f"<p>These columns help to answer the question that the search space asks.{ranges}</p>\n"
        f"{html_list(found.said)}"
        f"{narrow_tables(header[:first], [row[:first] for row in rows])}\n"
        f"{of_stages}"
        f"<details><summary>How these figures are computed</summary>\n{_notes([found.note])}"
        f'<div class="note">{html_list(found.measured)}</div>\n</details>\n'
        f"{_notes(found.caveats)}</section>"
    )


def _changes_section(comparison: Comparison) -> str:
    """Return the section on quantities that moved, with a collapsed table of every quantity."""
    said: dict[str, list[str]] = {}
    for arm, own in comparison.changes.items():
        moved = [sentence for change in own for sentence in change.sentences()]
        missing = changes.not_known(own)
        moved += [f"not measured in every trial: {', '.join(missing)}"] if missing else []
        told = "; ".join(moved) or "no quantity moved by more than its threshold"
        said.setdefault(told, []).append(arm)
    items = "".join(
        f"<li><b>{escaped(', '.join(arms))}</b>: {escaped(told).replace('-&gt;', '→')}.</li>"
        for told, arms in said.items()
    )
    found = (
        " The figures are medians over the trials in which the quantity moved. A change can be "
        'harmless: to find out, read <a href="#examples">responses</a>. The Parquet files in the '
        "directory evaluations/ of a trial have all its held-out responses."
        if any(change.moved for own in comparison.changes.values() for change in own)
        else ""
    )
    quantities = changes.QUANTITIES
    rows = [
        (arm, *(ends(c.before, c.after, c.quantity.form) for c in own))
        for arm, own in comparison.changes.items()
    ]
    thresholds = [f"± {quantity.shown(quantity.threshold)}" for quantity in quantities]
    rows.append(("threshold", *thresholds))
    explained = [
        (q.title, f"{q.measured}.", threshold, f"{q.because}.")
        for q, threshold in zip(quantities, thresholds, strict=True)
    ]
    return (
        '<section id="changes">\n<h2>Side effects of training</h2>\n'
        "<p>A policy can earn reward by changing something you did not intend. This section lists "
        "every quantity that moved by more than its threshold in any trial, up or down, between "
        f"the start of training and the latest round.{found}</p>\n"
        f"<ul>{items}</ul>\n<details><summary>All quantities and their thresholds"
        f"</summary>\n{narrow_tables(('arm', *(q.title for q in quantities)), rows)}\n"
        f"{html_table(('quantity', 'how it is measured', 'threshold', 'because'), explained)}\n"
        '<p class="note">A change is judged within each trial. The ranges in the first table cover '
        "all trials, so their ends can come from different trials. "
        f"If a figure rests on n &lt; {changes.ENOUGH} responses before or after "
        f"training, its threshold is wider by a factor of √({changes.ENOUGH} / n), because chance "
        "moves such a figure further. For entropy and the reference NLL, n counts all responses of "
        "a round. Even when wider, a threshold given in % is at most "
        f"± {changes.MAX_RELATIVE:.0%}. "
        "An n-gram is a sequence of n words, and a word is an unbroken sequence of letters and "
        "digits. Upper and lower case count as equal. In a language written without spaces, a "
        "whole phrase counts as one word.</p>"
        "</details>\n</section>"
    )


# ---- Plots -----------------------------------------------------------------------------------

# SVG shapes of the plot markers, by matplotlib name. Each is 12 units high.
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
    figures = "\n".join(figure(plot, images) for plot in section.plots)
    legend = _legend(arms) if section.legend and len(arms) > 1 else ""
    note = f'<p class="note">{escaped(section.note)}</p>\n' if section.note else ""
    return (
        f"<section>\n<h2>{escaped(section.title)}</h2>\n{legend}{note}"
        f'<div class="plots">\n{figures}\n</div>\n</section>'
    )


def _legend(arms: Sequence[str]) -> str:
    """Return one legend for all plots of a section. A legend inside each plot would hide data."""
    from reports.canvas import colour, marker

    items = "".join(
        f'<li><svg width="24" height="12" aria-hidden="true" fill="{colour(i)}">'
        f'<path d="M0 5h24v2h-24z"/>{SHAPES[marker(i)]}</svg>{escaped(arm)}</li>'
        for i, arm in enumerate(arms)
    )
    return f'<ul class="legend" aria-label="arms">{items}</ul>\n'


# ---- Responses -------------------------------------------------------------------------------


def _examples_section(
    experiment: ExperimentRecord, comparison: Comparison, files: Mapping[str, TrialFiles]
) -> str:
    blocks, scored = [], False
    for place, (arm, trials) in enumerate(experiment.arms.items()):
        trial = trials[0]
        if own := comparison.changes.get(arm):
            # The comparison leaves out trials without a row.
            trial = [trial for trial in trials if trial.rows][changes.most_moved(own)]
        examples = files[trial.name].examples
        scored |= any("," in pair.before_scores for pair in examples.pairs)
        if not examples.pairs:
            why = (
                "no evaluation after round 0 was kept"
                if examples.round == 0
                else "no prompt has responses from both round 0 and a later round"
            )
            content = f'<p class="absent">Nothing to compare: {why}.</p>'
        else:
            content = "\n".join(
                f"<article><h4>Prompt</h4><pre>{shortened(pair.prompt)}</pre>"
                f'{_truth(pair.truth)}<div class="pair">'
                f"<div><h4>Round 0 · {pair.before_scores}</h4>"
                f"<pre>{shortened(pair.before)}</pre></div>"
                f"<div><h4>Round {examples.round} · {pair.after_scores}</h4>"
                f"<pre>{shortened(pair.after)}</pre></div></div></article>"
                for pair in examples.pairs
            )
        opened = " open" if place == 0 else ""
        rewards = ends([trial.last("reward/eval_first")], [trial.reward_after], "{:.3f}")
        title = f"{arm}, seed {trial.config.seed}, held-out reward {rewards}"
        blocks.append(
            f"<details{opened}><summary>{escaped(title).replace('-&gt;', '→')}"
            f"</summary>\n{content}</details>"
        )
    return (
        '<section id="examples">\n<h2>Before and after</h2>\n'
        "<p>One trial of each arm: the trial with the largest side effect, or else the first. The "
        "prompts are the first held-out prompts, not a selection, each with its first response "
        "before training and at the latest evaluation."
        f"{_scores(experiment) if scored else ''}</p>\n" + "\n".join(blocks) + "\n</section>"
    )


def _scores(experiment: ExperimentRecord) -> str:
    """Explain the scores that are shown after a response's reward. The text begins with a space."""
    tasks = [trial.config.task for trial in experiment.trials]
    if any(task.has_custom_reward or task.part_weights for task in tasks):
        return " Scores after the reward are its parts, without their weights."
    return " Each response has two scores, “answer” and “format”. The reward is “answer” alone."


def _truth(truth: str | None) -> str:
    return "" if truth is None else f"<h4>Ground truth</h4><pre>{shortened(truth)}</pre>"


# ---- Machine and files -----------------------------------------------------------------------


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
            tables.append(html_table((key, ""), rows))
        else:
            tables.append(f'<p class="absent">{key.capitalize()} not recorded.</p>')
    both = "\n".join(f"<div>{table}</div>" for table in tables)
    return (
        '<section id="machine">\n<h2>Machine and packages</h2>\n'
        f'<div class="pair">{both}</div>\n</section>'
    )


def _extensions_section(experiment: ExperimentRecord) -> str:
    """Return a table of the trials that were added to the experiment, with times, as HTML."""
    if not experiment.extensions:
        return ""
    rows = []
    for extension in experiment.extensions:
        arms = list(dict.fromkeys(arm for arm, _ in extension.planned))
        seeds = sorted({seed for _, seed in extension.planned})
        rows.append(
            (
                moment(extension.started) if extension.started else "not recorded",
                ", ".join(map(str, seeds)),
                ", ".join(arms),
            )
        )
    return (
        '<section id="extensions">\n<h2>Added later</h2>\n'
        "<p>These trials were added to the experiment after its other trials had ended.</p>\n"
        f"{html_table(('added', 'seeds', 'arms'), rows)}\n</section>"
    )


def evaluation_of(trial: TrialRecord, path: str) -> list[str]:
    """Return the words of the command that evaluates a trial's model, which is stored at `path`."""
    named = must_name(trial.config.to_dict()).values()
    sets = [word for assignment in named for word in ("--set", assignment)]
    return [*command("evaluate"), "--checkpoint", path, *sets]


def _files_section(experiment: ExperimentRecord) -> str:
    directory = experiment.directory
    commands = [
        ("Watch every metric", ["tensorboard", "--logdir", str(directory)]),
        ("Write this page again", [*command("report"), str(directory)]),
    ]
    trained = experiment.with_policy
    if trained is not None:
        path = str(trained.directory)
        commands += [
            ("Evaluate a trained model", evaluation_of(trained, path)),
            ("Export it for transformers and vLLM", [*command("export"), path, "my_model"]),
        ]
    space = experiment.description.get("space_source") or experiment.description.get("space")
    if space and not experiment.all_done:
        resume = [
            *(*command("tune"), "--space", str(space)),
            *("--resume", "must", "--name", directory.name, "--storage", str(directory.parent)),
        ]
        commands.append(("Continue the experiment (only if it is your own)", resume))
    listed = "\n".join(
        f"<p>{escaped(title)}:</p><pre>{escaped(shlex.join(words))}</pre>"
        for title, words in commands
    )
    traces = ["/".join(trial.path) for trial in experiment.trials if trial.has_trace]
    links = "".join(
        f'<li><a href="{escaped(quote(os.fsencode(name)))}/trace.json" download>'
        f"{escaped(name)}/trace.json</a></li>"
        for name in traces
    )
    trace = (
        "<p>A trace shows what every actor did at each moment. Open https://ui.perfetto.dev in a "
        f"browser and drop one of these files onto that page:</p><ul>{links}</ul>"
        if traces
        else '<p class="absent">No trace.json was written.</p>'
    )
    return f'<section id="files">\n<h2>Next steps</h2>\n{listed}\n{trace}\n</section>'
