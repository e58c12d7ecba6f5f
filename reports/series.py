"""The numbers behind a plot: curves over the trials of an arm, stage seconds, shares of lags."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from grpo_trainable.config import schedule
from grpo_trainable.telemetry.metrics import EVAL_PART_MEAN
from grpo_trainable.telemetry.stages import IDLE_SIDES, STAGES
from reports.records import TrialRecord

# Evaluation comes last, because comparisons of wall-clock time exclude it.
STAGE_COLOURS = {
    stage: STAGES[stage].figure for stage in sorted(STAGES, key=lambda stage: stage == "eval")
}
WAITING = dict(zip(IDLE_SIDES, ("generator waits", "learner waits"), strict=True))


@dataclass(frozen=True)
class Point:
    """Median over the seeds, with the ends of a band around it."""

    x: float
    y: float
    low: float
    high: float


Series = Callable[[TrialRecord], Iterable[tuple[int, float, float]]]  # (round, x, y)
Arms = Mapping[str, Sequence[TrialRecord]]


def metric(name: str, factor: float = 1.0) -> Series:
    """Return a series of the values of a metric by round, each multiplied by `factor`."""

    def series(trial: TrialRecord) -> Iterable[tuple[int, float, float]]:
        for row in trial.rows:
            if name in row and trial.has(name):
                round_ = int(row["training_iteration"])
                yield round_, round_, 0.0 + factor * row[name]  # avoids a negative zero

    return series


def held_out_parts(trials: Iterable[TrialRecord]) -> list[str]:
    """Return the names of the reward's parts that appear in evaluations of these trials."""
    start, end = EVAL_PART_MEAN.split("NAME")
    metrics = {name for trial in trials for row in trial.rows for name in row}
    return sorted(
        name.removeprefix(start).removesuffix(end)
        for name in metrics
        if name.startswith(start) and name.endswith(end)
    )


def frontier(trial: TrialRecord) -> Iterable[tuple[int, float, float]]:
    """Yield (round, KL to the reference, held-out reward). At round 0, the KL is 0."""
    for round_, reward, row in trial.evaluated():
        if round_ == 0 and trial.column("kl/reference_nats"):
            yield 0, 0.0, reward
        elif "kl/reference_nats" in row:
            yield round_, row["kl/reference_nats"], reward


def curve(
    trials: Sequence[TrialRecord], series: Series, margin: Series | None = None
) -> list[Point]:
    """Return a point per round: the medians over the trials that have a value in that round.

    The band covers the values of all trials, each widened by its margin on both sides.

    Args:
        trials: The trials of an arm.
        series: A function that yields the points of a trial.
        margin: A function that yields the margin of error of each of these points. Without it, the
            margins are 0.
    """
    at: dict[int, list[tuple[float, float, float]]] = {}
    for trial in trials:
        margins = {round_: y for round_, _, y in margin(trial)} if margin else {}
        for round_, x, y in series(trial):
            at.setdefault(round_, []).append((x, y, margins.get(round_, 0.0)))
    points = []
    for round_ in sorted(at):
        xs, ys, margins = zip(*at[round_], strict=True)
        ends = [(y - m, y + m) for y, m in zip(ys, margins, strict=True)]
        low, high = min(low for low, _ in ends), max(high for _, high in ends)
        points.append(Point(statistics.median(xs), statistics.median(ys), low, high))
    return points


def stage_seconds(trials: Sequence[TrialRecord], responses: int) -> dict[str, float]:
    """Return the seconds that an arm spends in each stage, in waiting, and in the whole `step`.

    The seconds of `step` exclude evaluation. Each figure is computed in two steps: the median over
    the rounds of each trial, then the median over the trials. For eval, the mean over the rounds is
    used instead, because most rounds have no evaluation. Arms differ in the number of responses per
    round, so the seconds are scaled to `responses`.

    Args:
        trials: The trials of an arm.
        responses: The number of responses to scale the seconds to.
    """
    seconds = {}
    config = trials[0].config  # trials of an arm differ only in their seed
    scale = responses / (schedule.prompts_per_round(config) * config.rollout.group_size)
    for stage in (*STAGE_COLOURS, *WAITING, "step"):
        middle = statistics.fmean if stage == "eval" else statistics.median
        columns = [
            _seconds_of_steps(trial) if stage == "step" else trial.column(f"time/{stage}_s")
            for trial in trials
        ]
        spent = [middle(column) for column in columns if column]
        seconds[stage] = scale * statistics.median(spent) if spent else 0.0
    return seconds


def _seconds_of_steps(trial: TrialRecord) -> list[float]:
    """Return the seconds of each round without its evaluation."""
    return [
        row["time/step_s"] - row.get("time/eval_s", 0.0)
        for row in trial.rows
        if "time/step_s" in row
    ]


def lag_shares(counts: Iterable[Mapping[int, int]]) -> dict[int, float]:
    """Return the share of groups at each lag, over all trials of an arm.

    Args:
        counts: lag -> number of groups, for each trial.
    """
    total: dict[int, int] = {}
    for lags in counts:
        for lag, groups in lags.items():
            total[lag] = total.get(lag, 0) + groups
    groups = sum(total.values())
    return {lag: total[lag] / groups for lag in sorted(total)}
