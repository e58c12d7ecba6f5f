"""The content of `report.json`: the page's figures in machine-readable form.

docs/report.md lists the keys.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_trainable.config import resources
from grpo_trainable.telemetry.machine_load import DISTURBED_ABOVE
from reports.answers import Answer
from reports.audit import Audit, audit_data
from reports.changes import LENGTH, Change
from reports.contrasts import Contrast, doubts
from reports.every_pair import ArmPair
from reports.intervals import LEVEL
from reports.menu import Menu
from reports.menu_text import menu_data
from reports.own_files import OwnFile, own_files
from reports.population import settings_of, stretches_of, varied_settings
from reports.records import ExperimentRecord, TrialRecord
from reports.summary import Comparison, TrialSummary
from reports.verdicts import Quantity
from search_spaces.columns import Column

FORMAT = 1


def report_data(
    experiment: ExperimentRecord,
    comparison: Comparison,
    asked: Answer | None,
    found: Sequence[Quantity],
    pairs: Sequence[ArmPair],
    short: Sequence[str],
    told: Sequence[str],
    problems: Sequence[str],
    audits: Mapping[str, Audit],
    menu: Menu | None = None,
    no_verdict: str | None = None,
) -> dict[str, Any]:
    """Return the figures as JSON data, with None for unknown values.

    Args:
        experiment: The experiment as it was read.
        comparison: The comparison of its arms.
        asked: The table that answers the question of the search space, or None if there is no
            table.
        found: The quantities in which the arms are compared with the baseline.
        pairs: The comparisons of every pair of arms.
        short: The sentences of the short answer.
        told: The sentences about the differences between arms.
        problems: One line for each thing that could not be read.
        audits: The audit of each arm.
        menu: The verdicts with a margin, or None if there are none.
        no_verdict: The reason why there are no verdicts, or None.
    """
    records = experiment.arms
    varied = varied_settings(experiment.trials)
    description = experiment.description
    return {
        "format": FORMAT,
        "experiment": experiment.directory.name,
        "space": description.get("space"),
        "started": description.get("started"),
        "level": LEVEL,
        "disturbed_above": DISTURBED_ABOVE,
        "baseline": comparison.baseline,
        "columns": {column.name: _column(column) for column in (asked.columns if asked else ())},
        "arms": {
            arm: {
                **_arm(comparison, arm, trials, records[arm]),
                "columns": _cells(asked, arm),
            }
            for arm, trials in comparison.arms.items()
        },
        "pairs": {
            arm: {quantity.key: _pair(quantity, arm) for quantity in found}
            for arm in comparison.arms
            if arm != comparison.baseline
        },
        "every_pair": [
            {
                "arm": pair.arm,
                "over": pair.over,
                "figures": {own.key: _pair(own, pair.arm) for own in pair.quantities},
            }
            for pair in pairs
        ],
        "audit": {arm: audit_data(audit) for arm, audit in audits.items()},
        "menu": menu and menu_data(menu),
        "no_verdict": no_verdict,
        "answer": list(short),
        "told": list(told),
        "trials": [
            {**_trial(trial), "lineage": _lineage(trial, varied)} for trial in experiment.trials
        ],
        "not_begun": _pairs(experiment.not_begun),
        "waiting": experiment.waiting,
        "extensions": [
            {"started": extension.started, "trials": _pairs(extension.planned)}
            for extension in experiment.extensions
        ],
        "own_files": {file.key: _own_file(file) for file in own_files(experiment)},
        "problems": list(problems),
    }


def _pairs(planned: Sequence[tuple[str, int]]) -> list[dict[str, Any]]:
    return [{"arm": arm, "seed": seed} for arm, seed in planned]


def _column(column: Column) -> dict[str, Any]:
    return {
        "title": column.title,
        "metric": column.metric,
        "how": column.how,
        "factor": column.factor,
    }


def _cells(asked: Answer | None, arm: str) -> dict[str, Any]:
    if asked is None:
        return {}
    values = asked.arms.get(arm, {})
    return {column.name: _spread(values.get(column.name, ())) for column in asked.columns}


def _arm(
    comparison: Comparison,
    arm: str,
    trials: Sequence[TrialSummary],
    records: Sequence[TrialRecord],
) -> dict[str, Any]:
    comparable = comparison.comparable(arm)
    changes = {change.name: _change(change) for change in comparison.changes[arm]}
    return {
        "seeds": [trial.seed for trial in trials],
        "rounds": _spread([trial.rounds for trial in trials]),
        "samples": _spread([trial.samples for trial in trials]),
        "samples_per_s": _spread(comparison.rates(arm)),
        "wall_clock_s": _spread(comparison.totals(arm, lambda trial: trial.wall_clock_s)),
        "device_hours": _spread(comparison.totals(arm, lambda trial: trial.device_hours)),
        "devices": resources.devices(records[0].config),
        "device": "GPU" if resources.uses_gpus(records[0].config) else "CPU core",
        "reward_before": _spread([trial.first for trial in trials]),
        "reward_after": _spread([trial.last for trial in trials]),
        "response_length_before": changes[LENGTH.name]["before"],
        "response_length_after": changes[LENGTH.name]["after"],
        "changes": changes,
        "comparable": comparable,
        "why_not": None if comparable else "; ".join(doubts(records)),
        "disturbed_counted": comparison.counts(arm),
    }


def _change(change: Change) -> dict[str, Any]:
    return {
        "before": _spread(change.before),
        "after": _spread(change.after),
        "threshold": change.threshold,
        "moved": change.moved,
    }


def _spread(values: Sequence[float | None]) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {"median": statistics.median(known), "least": min(known), "most": max(known)}


def _pair(quantity: Quantity, arm: str) -> dict[str, Any] | None:
    """Return the figures of a pair or, if the pair is not comparable, only the reason."""
    own, why_not = quantity.contrasts.get(arm), quantity.not_comparable.get(arm)
    if own is None and why_not is None:
        return None
    return {
        **_figures(own),
        "comparable": own is not None,
        "why_not": why_not,
        "disturbed_counted": own is not None and own.counted_disturbed != "",
    }


def _figures(own: Contrast | None) -> dict[str, Any]:
    interval = own and own.interval
    return {
        "value": own and own.value,
        "low": interval and interval.low,
        "high": interval and interval.high,
        "seeds": list(own.seeds) if own else [],
        "told_apart": own and own.told_apart,
        "seeds_needed": own and own.seeds_needed,
    }


def _trial(trial: TrialRecord) -> dict[str, Any]:
    own = trial.pace
    return {
        "name": trial.name,
        "arm": trial.arm,
        "seed": trial.config.seed,
        "status": trial.status,
        "samples_per_s": trial.samples_per_s,
        # The speed over all rounds, including disturbed ones. Do not compare arms by this speed.
        "disturbed_samples_per_s": None if own is None or own.comparable else own.samples_per_s,
        "timed_rounds": 0 if own is None else own.rounds,
        "disturbed_rounds": 0 if own is None else own.disturbed,
        "disturbed_share": None if own is None else own.others,
        "disturbed_counted": own is not None and own.counts_disturbed,
        "comparable": own is None or own.comparable,
    }


def _lineage(trial: TrialRecord, varied: Sequence[str]) -> list[dict[str, Any]] | None:
    """Return the stretches (rounds with equal settings) of a population's member, or None.

    Args:
        trial: The trial.
        varied: The settings that change between stretches.
    """
    if not trial.member or not trial.rows:
        return None
    return [
        {
            "first_round": stretch.first,
            "last_round": last,
            "settings": settings_of(stretch, varied),
            "copied_from": stretch.copied_from,
        }
        for stretch, last in stretches_of(trial)
    ]


def _own_file(file: OwnFile) -> dict[str, str]:
    return {"name": file.name, "sha256": file.sha256}
