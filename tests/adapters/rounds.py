"""A check of the metrics that a trial of two rounds reports."""

from __future__ import annotations

from typing import Any


def assert_trained(rows: list[dict[str, Any]]) -> None:
    """Check that all groups of both rounds were trained on and took several turns."""
    assert [row["count/trained"] for row in rows] == [2, 4]
    assert [row["count/dropped_reward"] for row in rows] == [0, 0]
    assert all(row["response/turns_mean"] > 1 for row in rows)
