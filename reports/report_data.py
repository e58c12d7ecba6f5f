"""The content of `report.json`: the page's figures for programs. docs/report.md lists the keys."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from grpo_trainable.noise import DISTURBED_ABOVE
from reports.changes import LENGTH, Change
from reports.contrasts import Contrast, doubts, pace
from reports.intervals import LEVEL
from reports.records import ExperimentRecord, TrialRecord
from reports.summary import Comparison, TrialSummary
from reports.verdicts import Quantity

FORMAT = 1


def report_data(
    experiment: ExperimentRecord,
    comparison: Comparison,
    found: Sequence[Quantity],
    told: Sequence[str],
    problems: Sequence[str],
) -> dict[str, Any]:
    """The figures as JSON data, with None where nothing is known."""
    records = experiment.arms
    description = experiment.description
    return {
        "format": FORMAT,
        "experiment": experiment.directory.name,
        "space": description.get("space"),
        "started": description.get("started"),
        "level": LEVEL,
        "disturbed_above": DISTURBED_ABOVE,
        "baseline": comparison.baseline,
        "arms": {
            arm: _arm(comparison, arm, trials, records[arm])
            for arm, trials in comparison.arms.items()
        },
        "pairs": {
            arm: {quantity.key: _contrast(quantity.contrasts.get(arm)) for quantity in found}
            for arm in comparison.arms
            if arm != comparison.baseline
        },
        "told": list(told),
        "trials": [_trial(trial) for trial in experiment.trials],
        "problems": list(problems),
    }


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
        "wall_clock_s": _spread([trial.wall_clock_s for trial in trials]),
        "device_hours": _spread([trial.device_hours for trial in trials]),
        "devices": records[0].config.devices,
        "device": "GPU" if records[0].config.uses_gpus else "CPU core",
        "reward_before": _spread([trial.first for trial in trials]),
        "reward_after": _spread([trial.last for trial in trials]),
        "response_length_before": changes[LENGTH.name]["before"],
        "response_length_after": changes[LENGTH.name]["after"],
        "changes": changes,
        "comparable": comparable,
        "why_not": None if comparable else "; ".join(doubts(records)),
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


def _contrast(own: Contrast | None) -> dict[str, Any] | None:
    if own is None:
        return None
    interval = own.interval
    return {
        "value": own.value,
        "low": None if interval is None else interval.low,
        "high": None if interval is None else interval.high,
        "seeds": list(own.seeds),
        "told_apart": own.told_apart,
        "seeds_needed": own.seeds_needed,
        "comparable": own.doubt is None,
        "why_not": own.doubt,
    }


def _trial(trial: TrialRecord) -> dict[str, Any]:
    own = pace(trial)
    return {
        "name": trial.name,
        "arm": trial.arm,
        "seed": trial.config.seed,
        "status": trial.status,
        "samples_per_s": None if own is None else own.samples_per_s,
        "timed_rounds": 0 if own is None else own.rounds,
        "disturbed_rounds": 0 if own is None else own.disturbed,
        "disturbed_share": None if own is None else own.others,
        "comparable": own is None or own.comparable,
    }
