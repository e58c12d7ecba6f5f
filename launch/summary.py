"""The final table: one row an arm, medians over its seeds. The report shows the same rows."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from grpo_trainable.timers import WallClock
from launch import changes
from launch.changes import Change
from launch.experiment import TrialRecord

BASELINE = "colocated_k1"
HEADER = (
    *("arm", "rounds", "samples", "wall-clock s", "samples/s", "speed-up", "at equal cost"),
    *("device-hours", "held-out reward", "tokens a response", "reference NLL", "largest lag"),
    *("eval s", "checkpoint s"),
)


@dataclass(frozen=True, kw_only=True)
class TrialSummary:
    """None where the rows do not tell."""

    arm: str
    seed: int
    rounds: int
    samples: float | None  # responses trained on
    wall_clock_s: float | None  # None before round 3, where it begins
    samples_per_s: float | None
    samples_per_device_hour: float | None  # a device: a GPU, or a CPU core where there is none
    eval_s: float
    checkpoint_s: float
    device_hours: float | None
    first: float | None
    last: float | None
    reference_nll: float | None
    largest_lag: float | None


def summarise_trial(trial: TrialRecord) -> TrialSummary | None:
    """None when the trial has no row yet."""
    if not trial.rows:
        return None
    rounds = trial.round
    trained = trial.last("count/trained")
    samples = None if trained is None else trained * trial.config.rollout.group_size
    wall_clock_s = trial.last("time/wall_clock_s") or None
    samples_per_s = None
    if samples is not None and wall_clock_s is not None:
        counted = samples * (rounds - WallClock.FIRST_ROUND + 1) / rounds
        samples_per_s = counted / wall_clock_s
    return TrialSummary(
        arm=trial.arm,
        seed=trial.config.seed,
        rounds=rounds,
        samples=samples,
        wall_clock_s=wall_clock_s,
        samples_per_s=samples_per_s,
        samples_per_device_hour=(
            None if samples_per_s is None else 3600 * samples_per_s / trial.config.devices
        ),
        eval_s=sum(trial.column("time/eval_s")),
        checkpoint_s=sum(trial.column("time/checkpoint_s")),
        device_hours=trial.last("cost/device_hours"),
        first=trial.last("reward/eval_first"),
        last=trial.last("reward/eval_mean"),
        reference_nll=trial.late_mean("response/reference_nll_nats"),
        largest_lag=max(trial.column("lag/max"), default=None),
    )


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Arms side by side, as the command prints them and as the report shows them."""

    arms: Mapping[str, Sequence[TrialSummary]]
    baseline: str | None  # the arm that speed-ups are relative to; None when none can be
    changes: Mapping[str, Sequence[Change]]  # what the reward did not ask for, arm by arm

    @property
    def seeds(self) -> int:
        return len({trial.seed for trials in self.arms.values() for trial in trials})

    def speed_ups(self, arm: str) -> list[float]:
        """One a seed: its samples/s over the baseline's median."""
        return self._relative(arm, lambda trial: trial.samples_per_s)

    def savings(self, arm: str) -> list[float]:
        """One a seed: its samples a device-hour over the baseline's median."""
        return self._relative(arm, lambda trial: trial.samples_per_device_hour)

    def _relative(self, arm: str, rate: Callable[[TrialSummary], float | None]) -> list[float]:
        base = median([rate(trial) for trial in self.arms.get(self.baseline or "", ())])
        rates = [rate(trial) for trial in self.arms[arm]]
        return [own / base for own in rates if own is not None] if base else []

    def rows(self) -> list[tuple[str, ...]]:
        """A cell for each name of `HEADER`."""
        return [self._row(arm, trials) for arm, trials in self.arms.items()]

    def note(self) -> str:
        """What stands above the rows; empty with one seed."""
        return f"medians over {self.seeds} seeds, (least to most)" if self.seeds > 1 else ""

    def footnote(self) -> str:
        relative = f", relative to {self.baseline}" if self.baseline is not None else ""
        return (
            "wall-clock and device-hours run from the start of round 3, so arms of few rounds "
            "count fewer of\ntheir samples; evaluation and checkpoints are subtracted. Speed-up: "
            f"samples a second{relative}, whatever an\narm reserves. At equal cost: samples a "
            f"device-hour{relative}.\nA device is a GPU, or a CPU core of the actors where there "
            "is no GPU. Tokens a response: the held-out\nresponses before training and at the "
            "latest evaluation."
        )

    def _row(self, arm: str, trials: Sequence[TrialSummary]) -> tuple[str, ...]:
        length = next(c for c in self.changes[arm] if c.quantity is changes.LENGTH)
        return (
            arm,
            show([t.rounds for t in trials], "{:.0f}"),
            show([t.samples for t in trials], "{:.0f}"),
            show([t.wall_clock_s for t in trials], "{:.1f}"),
            show([t.samples_per_s for t in trials], "{:.0f}"),
            show([median(self.speed_ups(arm))], "{:.2f}x"),
            show([median(self.savings(arm))], "{:.2f}x"),
            show([t.device_hours for t in trials], "{:.4f}"),
            ends([t.first for t in trials], [t.last for t in trials], "{:.3f}"),
            ends(length.before, length.after, length.quantity.form),
            show([t.reference_nll for t in trials], "{:.2f}"),
            show([t.largest_lag for t in trials], "{:.0f}"),
            show([t.eval_s for t in trials], "{:.1f}"),
            show([t.checkpoint_s for t in trials], "{:.1f}"),
        )


def compare(trials: Sequence[TrialRecord]) -> Comparison:
    """Trials without a row are left out."""
    arms: dict[str, list[TrialSummary]] = {}
    for trial in trials:
        summary = summarise_trial(trial)
        if summary is not None:
            arms.setdefault(summary.arm, []).append(summary)
    timed = [arm for arm in arms if median([t.samples_per_s for t in arms[arm]])]
    baseline = BASELINE if BASELINE in timed else next(iter(timed), None)
    moved = {arm: changes.of_arm([t for t in trials if t.arm == arm and t.rows]) for arm in arms}
    return Comparison(arms=arms, baseline=baseline, changes=moved)


def table(trials: Sequence[TrialRecord]) -> str:
    """Text."""
    comparison = compare(trials)
    if not comparison.arms:
        return "no trial has finished a round"
    note = comparison.note()
    lines = [*([note] if note else []), align([HEADER, *comparison.rows()]), comparison.footnote()]
    moved = f"what changed that the reward did not ask for: {changes.moved_in(comparison.changes)}"
    return "\n".join([*lines, f"{moved}; the report says more."])


def median(values: Sequence[float | None]) -> float | None:
    """Of the values that are known."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def show(values: Sequence[float | None], form: str) -> str:
    """The median, and least and most where they differ as written."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    middle, low, high = (
        form.format(value) for value in (statistics.median(known), min(known), max(known))
    )
    between = " to " if low[0] in "+-" else "-"
    return middle if low == high else f"{middle} ({low}{between}{high})"


def ends(before: Sequence[float | None], after: Sequence[float | None], form: str) -> str:
    """`0.366 -> 0.911 (0.902-0.915)`."""
    first, last = show(before, form), show(after, form)
    return "-" if first == last == "-" else f"{first} -> {last}"


def align(rows: Sequence[Sequence[str]]) -> str:
    """Columns padded to their widest cell; the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
