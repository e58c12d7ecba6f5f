"""Experiments drawn anew from one that was run: how often would its verdict have been another?"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from reports.contrasts import Contrast, NotComparable, speed_up
from reports.records import TrialRecord


def verdict(
    arm: Sequence[TrialRecord],
    base: Sequence[TrialRecord],
    repeats: int,
    rng: random.Random,
    *,
    swap: bool,
) -> dict[str, Any]:
    found = speed_up(arm, base)
    assert found is not None
    again = [speed_up(*resampled(arm, base, rng, swap=swap)) for _ in range(repeats)]
    return {
        **figures(found),
        "repeats": repeats,
        "repeats_told_apart": sum(isinstance(o, Contrast) and bool(o.told_apart) for o in again),
    }


def figures(found: Contrast | NotComparable) -> dict[str, Any]:
    if isinstance(found, NotComparable):
        unknown = dict.fromkeys(("speed_up", "interval", "told_apart"))
        return {**unknown, "seeds": [], "why_not": found.why}
    interval = found.interval
    return {
        "speed_up": found.value,
        "interval": None if interval is None else [interval.low, interval.high],
        "seeds": list(found.seeds),
        "told_apart": found.told_apart,
        "why_not": None,
    }


def resampled(
    arm: Sequence[TrialRecord], base: Sequence[TrialRecord], rng: random.Random, *, swap: bool
) -> tuple[list[TrialRecord], list[TrialRecord]]:
    pairs = []
    for own, other in zip(arm, base, strict=True):
        pair = (drawn(own, rng), drawn(other, rng))
        pairs.append(pair[::-1] if swap and rng.random() < 0.5 else pair)
    return [own for own, _ in pairs], [other for _, other in pairs]


def drawn(trial: TrialRecord, rng: random.Random) -> TrialRecord:
    """The trial with its rounds drawn with replacement: wall-clock and samples add up anew."""
    names = ("time/wall_clock_s", "count/trained")
    before = [dict.fromkeys(names, 0.0), *trial.rows[:-1]]
    steps = [
        {**row, **{name: row[name] - last[name] for name in names}}
        for row, last in zip(trial.rows, before, strict=True)
    ]
    rows, totals = [], dict.fromkeys(names, 0.0)
    for place, step in enumerate(rng.choices(steps, k=len(steps)), start=1):
        totals = {name: totals[name] + step[name] for name in names}
        rows.append({**step, **totals, "training_iteration": float(place)})
    return replace(trial, rows=rows)
