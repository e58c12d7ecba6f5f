"""The content of `evaluation.json`. docs/evaluation.md lists the keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from reports.evaluations.measures import measures
from reports.evaluations.pairs import Difference
from reports.evaluations.record import EvaluationRecord
from reports.intervals import LEVEL

FORMAT = 1


def evaluation_data(
    record: EvaluationRecord, against: EvaluationRecord | None, paired: Sequence[Difference]
) -> dict[str, Any]:
    """The figures as JSON data. A figure that the evaluation does not have is not there."""
    return {
        "format": FORMAT,
        "policy": dict(record.policy),
        "prompts": len(record.by_prompt),
        "samples": record.samples,
        "responses": len(record.generations),
        "unscored": {
            "prompts": len(record.by_prompt) - len(record.scored),
            "responses": len(record.errors),
        },
        "level": LEVEL,
        "figures": {name: asdict(measure.figure()) for name, measure in measures(record).items()},
        **_categories(record),
        **({} if against is None else {"against": _against(against, paired)}),
        "problems": record.problems,
        "config": dict(record.config),
        **record.origin,
    }


def _categories(record: EvaluationRecord) -> dict[str, Any]:
    found = record.categories
    return {} if found is None else {"categories": {name: len(own) for name, own in found.items()}}


def _against(against: EvaluationRecord, paired: Sequence[Difference]) -> dict[str, Any]:
    return {
        "name": against.name,
        "policy": dict(against.policy),
        "differences": {
            difference.name: {
                "own": difference.own,
                "other": difference.other,
                "value": difference.value,
                "low": difference.low,
                "high": difference.high,
                "prompts": difference.prompts,
                "told_apart": difference.told_apart,
            }
            for difference in paired
        },
    }
