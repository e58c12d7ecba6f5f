"""The sections of the page on what was run, on all settings, and on the user's files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpo_trainable.config import (
    CHECKS,
    GRPOConfig,
    defaults_with,
    flatten,
    resources,
    schedule,
    shown,
)
from grpo_trainable.text import plural
from reports.markup import escaped, html_table, narrow_tables
from reports.own_files import SHORT, are_noted, own_files, replaced
from reports.records import ExperimentRecord, TrialRecord

Flat = Mapping[str, Any]  # dotted key -> value


def reserved(config: GRPOConfig) -> str:
    """Return the number of devices that a trial's actors reserve, such as `1.9 CPUs`."""
    return f"{resources.devices(config):g} {'GPUs' if resources.uses_gpus(config) else 'CPUs'}"


# Figures that follow from the settings; shown if they differ between arms.
COMPUTED: dict[str, Callable[[GRPOConfig], str]] = {
    "responses per round": lambda config: str(schedule.responses_per_round(config)),
    "reserved devices": reserved,
}
MAX_OPEN = 12  # a table with more arms than this, or a list of more settings, is folded
CODE = r"<code>\1</code>"
BETWEEN = " | "  # separates the values of an arm's trials
NO_EFFECT = (
    '<p class="note">-: the setting has no effect in this arm or in some of its trials.</p>\n'
)


def run_section(experiment: ExperimentRecord) -> str:
    """Return, as HTML, the section on what was run: the chosen settings, with explanations."""
    by_arm, shared = _by_arm(experiment), _shared(experiment)
    flat = {trial.name: trial.config.in_effect for trial in experiment.trials}
    keys = dict.fromkeys(k for own in by_arm.values() for trial in own for k in flat[trial.name])
    different = [key for key in keys if key not in (*shared, "arm", "seed")]

    def setting(trial: TrialRecord, key: str) -> str:
        return shown(flat[trial.name].get(key)) if trial.config.reads(key) else "-"

    def row(key: str, of: Callable[[TrialRecord, str], str]) -> tuple[str, ...]:
        cells = (dict.fromkeys(of(trial, key) for trial in own) for own in by_arm.values())
        return (key, *map(BETWEEN.join, cells))

    rows = [row(key, setting) for key in different]
    computed = [row(key, lambda trial, key: COMPUTED[key](trial.config)) for key in COMPUTED]
    computed = [own for own in computed if len(set(own[1:])) > 1]
    if experiment.own_tuner and rows:
        names = [", ".join(trial.label for trial in own) for own in by_arm.values()]
        rows.insert(0, ("trial", *names))
    between = "arms" if len(by_arm) > 1 else "trials (their latest values)"
    opened = " open" if len(by_arm) <= MAX_OPEN else ""
    table = (
        f"<details{opened}><summary>Settings that differ between {between}: values in effect"
        f"</summary>\n{narrow_tables(('key', *by_arm), [*rows, *computed], figures=False)}\n"
        f"{NO_EFFECT if any(map(_has_dash, rows)) else ''}</details>\n"
        if rows
        else "<p>The trials differ only in arm and seed.</p>\n"
    )
    changed, unknown = _changed(shared, experiment)
    said = [_seeds(experiment), *_at_equal_samples(experiment)]
    said.append(f"Shared settings that differ from the defaults: {_listed(changed, shared)}.")
    if unknown:
        said.append(
            "Settings of your own task whose defaults were not recorded: "
            f"{_listed(unknown, shared)}."
        )
    return (
        '<section id="run">\n<h2>What was run</h2>\n'
        f"<p>{escaped(' '.join(said))}</p>\n{table}"
        f"{_meanings([*different, *changed], experiment)}</section>"
    )


def _meanings(keys: Sequence[str], experiment: ExperimentRecord) -> str:
    """Explain settings as HTML; empty if there are none, or only settings of a user's task."""
    configs = [trial.config for trial in experiment.trials]
    known = {
        key: CHECKS[key].meaning
        for key in keys
        if key in CHECKS and not any(config.task.declares(key) for config in configs)
    }
    if not known:
        return ""
    said = (escaped(f"`{key}`: {meaning}") for key, meaning in known.items())
    items = "".join(f"<li>{re.sub('`([^`]+)`', CODE, text)}</li>\n" for text in said)
    opened = " open" if len(known) <= MAX_OPEN else ""
    return (
        f"<details{opened}><summary>What these settings mean</summary>\n<ul>{items}</ul>\n"
        "</details>\n"
    )


def _at_equal_samples(experiment: ExperimentRecord) -> list[str]:
    """Say how many responses each trial trains on, if the plan is the same for all trials.

    Say nothing if there is a single trial, or if the plan of some trials is not known yet.
    """
    configs = [trial.config for trial in experiment.trials]
    totals = {own.rounds * schedule.responses_per_round(own) for own in configs}
    if len(totals) > 1 or len(configs) < 2 or experiment.not_begun or experiment.waiting != 0:
        return []
    said = f"Every trial is planned with {totals.pop()} responses (samples)"
    if len({own.rounds for own in configs}) > 1:
        said += ", so an arm with more responses per round has fewer rounds"
    return [f"{said}."]


def settings_section(experiment: ExperimentRecord) -> str:
    """Return, as HTML, the section on all settings and on the user's files."""
    shared = _shared(experiment)
    jsons = "\n".join(
        f"<details><summary>{escaped(arm)}: params.json of {escaped(trials[0].name)}, "
        "as given</summary>"
        f"<pre>{escaped(json.dumps(trials[0].params, indent=1))}</pre></details>"
        for arm, trials in experiment.arms.items()
    )
    return (
        '<section id="settings">\n<h2>All settings</h2>\n'
        f"{_files_table(experiment)}"
        f"<details><summary>All {plural(len(shared), 'setting')} that the trials share</summary>\n"
        f"{html_table(('key', 'value'), [(key, shown(value)) for key, value in shared.items()])}"
        f"</details>\n{jsons}\n"
        f"{_description(experiment)}</section>"
    )


def _by_arm(experiment: ExperimentRecord) -> dict[str, list[TrialRecord]]:
    """Return the trials of each arm, including trials without a finished round."""
    by_arm: dict[str, list[TrialRecord]] = {}
    for trial in experiment.trials:
        by_arm.setdefault(trial.arm, []).append(trial)
    return by_arm


def _shared(experiment: ExperimentRecord) -> dict[str, Any]:
    """Return the settings that all trials have, with the same effective value, by dotted key.

    Trials of different tasks have different settings.
    """
    first, *others = (trial.config.in_effect for trial in experiment.trials)
    return {
        key: value
        for key, value in first.items()
        if key not in ("arm", "seed") and all(key in own and own[key] == value for own in others)
    }


def _has_dash(cells: Sequence[str]) -> bool:
    """Return True if a row of the table of settings shows that a trial does not read the key."""
    return any("-" in cell.split(BETWEEN) for cell in cells[1:])


def _description(experiment: ExperimentRecord) -> str:
    if experiment.own_tuner:
        return ""
    text = json.dumps(dict(experiment.description), indent=1)
    return f"<details><summary>experiment.json</summary><pre>{escaped(text)}</pre></details>\n"


def _seeds(experiment: ExperimentRecord) -> str:
    seeds = sorted({trial.config.seed for trial in experiment.trials})
    return f"{'Seed' if len(seeds) == 1 else 'Seeds'}: {', '.join(map(str, seeds))}."


def _changed(shared: Flat, experiment: ExperimentRecord) -> tuple[list[str], list[str]]:
    """Return shared settings that differ from their defaults, and those without known defaults."""
    known = [default_settings(trial, experiment.description) for trial in experiment.trials]
    given = [flatten(trial.config.to_dict()) for trial in experiment.trials]
    unknown = [key for key in shared if not all(key in defaults for defaults in known)]
    changed = [
        key
        for key in shared
        if key not in unknown
        and not all(
            _same(defaults[key], own[key]) for defaults, own in zip(known, given, strict=True)
        )
    ]
    return changed, unknown


def _same(first: Any, second: Any) -> bool:
    """Return True if two values are equal as JSON, which turns tuples into lists."""
    return json.loads(json.dumps(first)) == json.loads(json.dumps(second))


def _listed(keys: Sequence[str], values: Flat) -> str:
    assigned = [f"{key}={shown(values[key])}" for key in keys]
    return "; ".join(assigned) or "none"


def default_settings(trial: TrialRecord, description: Mapping[str, Any]) -> dict[str, Any]:
    """Return the known defaults of the trial's settings, by dotted key.

    The defaults that a user's task declares come from experiment.json, which was written at the
    start of the experiment. A report never runs a user's code.

    Args:
        trial: The trial.
        description: The content of experiment.json.
    """
    defaults = defaults_with(trial.config.task.name)
    if not trial.config.task.is_custom:
        return defaults
    declared = description.get("task_defaults")
    own = declared.get(trial.config.task.name) if isinstance(declared, Mapping) else None
    # The user's task may declare a setting of the built-in task `keyword` with its own default.
    for setting, _ in trial.config.task.own:
        defaults.pop(f"task.{setting}", None)
    return defaults | (dict(own) if isinstance(own, Mapping) else {})


def _files_table(experiment: ExperimentRecord) -> str:
    """List the user's own files with their digests, so that two reports can be compared."""
    files = own_files(experiment)
    if not files:
        none = "<p>The experiment used none of your own files, such as data or a reward.</p>\n"
        return none if are_noted(experiment) else ""
    rows = [(file.setting, file.name, file.short) for file in files]
    header = ("setting", "file", f"SHA-256, first {SHORT} digits")
    title, note = "Your own files at the start of the experiment", ""
    if replaced(experiment):
        title = "Your own files at the last resume"
        note = (
            "<p>Your code has changed since the start (--accept-changed-code), so some rounds were "
            "trained with an earlier version.</p>\n"
        )
    return f"<h3>{title}</h3>\n{note}{html_table(header, rows)}\n"
