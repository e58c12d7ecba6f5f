"""The final table: one row an arm, medians over its seeds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grpo_trainable.config import GRPOConfig
from grpo_trainable.timers import WallClock

BASELINE = "colocated_k1"
FOOTNOTE = """
wall-clock and device-hours run from the start of round 3, so arms of few rounds count fewer of
their samples; evaluation and checkpoints are subtracted. The speed-up is in samples/s."""
LAST_ROUNDS = 8  # that the reference NLL is averaged over: one round has few responses


@dataclass(frozen=True, kw_only=True)
class TrialSummary:
    arm: str
    seed: int
    rounds: int
    samples: float  # responses trained on
    wall_clock_s: float | None  # None before round 3, where it begins
    samples_per_s: float | None
    eval_s: float
    checkpoint_s: float
    device_hours: float
    first: float
    last: float
    reference_nll: float | None
    largest_lag: float


def summarise_trial(result: Any) -> TrialSummary | None:
    """None when the trial has no row yet."""
    rows = result.metrics_dataframe
    if rows is None or rows.empty:
        return None
    config = GRPOConfig.from_dict(result.config)
    last = rows.iloc[-1]
    rounds = int(last["training_iteration"])
    samples = last["count/trained"] * config.rollout.group_size
    counted = samples * (rounds - WallClock.FIRST_ROUND + 1) / rounds
    wall_clock_s = float(last["time/wall_clock_s"])
    nll = rows.get("response/reference_nll_nats")
    return TrialSummary(
        arm=config.arm,
        seed=config.seed,
        rounds=rounds,
        samples=samples,
        wall_clock_s=wall_clock_s or None,
        samples_per_s=counted / wall_clock_s if wall_clock_s else None,
        eval_s=float(rows["time/eval_s"].sum()),
        checkpoint_s=float(rows["time/checkpoint_s"].sum()),
        device_hours=float(last["cost/device_hours"]),
        first=float(last["reward/eval_first"]),
        last=float(last["reward/eval_mean"]),
        reference_nll=None if nll is None else float(nll.tail(LAST_ROUNDS).mean()),
        largest_lag=float(rows["lag/max"].max()),
    )


def table(results: Any) -> str:
    """Text; the speed-up is against colocated k=1."""
    trials = [summary for result in results if (summary := summarise_trial(result)) is not None]
    if not trials:
        return "no trial has finished a round"
    by_arm: dict[str, list[TrialSummary]] = {}
    for trial in trials:
        by_arm.setdefault(trial.arm, []).append(trial)
    baseline = _median([t.samples_per_s for t in by_arm.get(BASELINE, [])])
    header = (
        *("arm", "rounds", "samples", "wall-clock s", "samples/s", "speed-up", "device-hours"),
        *("held-out reward", "reference NLL", "largest lag", "eval s", "checkpoint s"),
    )
    rows = [_row(arm, seeds, baseline) for arm, seeds in by_arm.items()]
    seeds = len({trial.seed for trial in trials})
    note = f"medians over {seeds} seeds, (least to most)\n" if seeds > 1 else ""
    return note + align([header, *rows]) + FOOTNOTE


def _row(arm: str, seeds: Sequence[TrialSummary], baseline: float | None) -> tuple[str, ...]:
    speed = _median([t.samples_per_s for t in seeds])
    speed_up = None if speed is None or baseline is None else speed / baseline
    return (
        arm,
        _show([t.rounds for t in seeds], "{:.0f}"),
        _show([t.samples for t in seeds], "{:.0f}"),
        _show([t.wall_clock_s for t in seeds], "{:.1f}"),
        _show([t.samples_per_s for t in seeds], "{:.0f}"),
        _show([speed_up], "{:.2f}x"),
        _show([t.device_hours for t in seeds], "{:.4f}"),
        " -> ".join(
            _show(ends, "{:.3f}") for ends in ([t.first for t in seeds], [t.last for t in seeds])
        ),
        _show([t.reference_nll for t in seeds], "{:.2f}"),
        _show([t.largest_lag for t in seeds], "{:.0f}"),
        _show([t.eval_s for t in seeds], "{:.1f}"),
        _show([t.checkpoint_s for t in seeds], "{:.1f}"),
    )


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _show(values: Sequence[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    middle, low, high = (
        form.format(value) for value in (statistics.median(known), min(known), max(known))
    )
    return middle if low == high else f"{middle} ({low}-{high})"


def align(rows: Sequence[Sequence[str]]) -> str:
    """Columns padded to their widest cell; the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
