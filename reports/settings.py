"""The settings section of the page: shared settings, settings by arm, and the user's files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_trainable.config import defaults_with, flatten, shown
from grpo_trainable.text import plural
from reports.markup import escaped, html_table, narrow_tables
from reports.own_files import SHORT, are_noted, own_files, replaced
from reports.records import ExperimentRecord, TrialRecord

Flat = Mapping[str, Any]  # dotted key -> value
BETWEEN = " | "  # separates the values of an arm's trials
NO_EFFECT = (
    '<p class="note">-: the setting has no effect in this arm or in some of its trials.</p>\n'
)


def settings_section(experiment: ExperimentRecord) -> str:
    """Return the section as HTML."""
    by_arm: dict[str, list[Flat]] = {}
    for trial in experiment.trials:
        by_arm.setdefault(trial.arm, []).append(trial.config.in_effect)
    every = [flat for trials in by_arm.values() for flat in trials]
    # A user's task adds keys, so arms can differ in their keys.
    keys = dict.fromkeys(k for flat in every for k in flat if k not in ("arm", "seed"))
    first = every[0]
    shared = {k: first.get(k) for k in keys if all(f.get(k) == first.get(k) for f in every)}
    configs = {arm: [t.config for t in experiment.trials if t.arm == arm] for arm in by_arm}

    def cell(key: str, arm: str) -> str:
        values = [
            shown(flat.get(key)) if config.reads(key) else "-"
            for flat, config in zip(by_arm[arm], configs[arm], strict=True)
        ]
        return BETWEEN.join(dict.fromkeys(values))

    different = [(key, *(cell(key, arm) for arm in by_arm)) for key in keys if key not in shared]
    if experiment.own_tuner and different:
        names = [", ".join(t.label for t in experiment.trials if t.arm == arm) for arm in by_arm]
        different.insert(0, ("trial", *names))
    between = "arms" if len(by_arm) > 1 else "trials (their latest values)"
    table = (
        f"<h3>Settings that differ between {between}: values in effect</h3>\n"
        f"{narrow_tables(('key', *by_arm), different, figures=False)}\n"
        f"{NO_EFFECT if any(map(_has_dash, different)) else ''}"
        if different
        else "<p>The trials differ only in arm and seed.</p>\n"
    )
    jsons = "\n".join(
        f"<details><summary>{escaped(arm)}: params.json of {escaped(trials[0].name)}, "
        "as given</summary>"
        f"<pre>{escaped(json.dumps(trials[0].params, indent=1))}</pre></details>"
        for arm, trials in experiment.arms.items()
    )
    return (
        f'<section id="settings">\n<h2>Settings</h2>\n'
        f"<p>{escaped(' '.join([_seeds(experiment), *_of_all(shared, experiment)]))}</p>\n{table}"
        f"{_files_table(experiment)}"
        f"<details><summary>All {plural(len(shared), 'setting')} that the trials share</summary>\n"
        f"{html_table(('key', 'value'), [(key, shown(value)) for key, value in shared.items()])}"
        f"</details>\n{jsons}\n"
        f"{_description(experiment)}</section>"
    )


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


def _of_all(shared: Flat, experiment: ExperimentRecord) -> list[str]:
    """Return sentences about the settings that all trials share."""
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
    said = [f"Shared settings that differ from the defaults: {_listed(changed, shared)}."]
    if unknown:
        said.append(
            "Settings of your own task whose defaults were not recorded: "
            f"{_listed(unknown, shared)}."
        )
    return said


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
