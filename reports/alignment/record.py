"""Record of an alignment run: its settings, the trainer's log, and the measured rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_trainable.text import plural
from grpo_trainable.tools.alignment.rows import MeasuredRow
from grpo_trainable.tools.alignment.stages import STAGES, Stage
from reports.intervals import Estimate, wilson


@dataclass(frozen=True, kw_only=True)
class AlignmentRecord:
    """A finished run with its origin."""

    name: str  # name of the run's directory
    asked: Mapping[str, Any]  # stage, model, files, seed, settings
    train_rows: int
    steps: int
    parameters: int
    log: Sequence[Mapping[str, Any]]  # rows that TRL's trainer logged
    held_out: Sequence[MeasuredRow]
    notes: Sequence[str] = ()  # notes about the data
    origin: Mapping[str, Any] = field(default_factory=dict)  # command, commit, machine, packages, …

    @property
    def stage(self) -> Stage:
        """The stage of the run."""
        return STAGES[self.asked["stage"]]

    def series(self, metric: str) -> list[tuple[int, float]]:
        """Return the logged values of a metric as a mapping from step to value.

        A resumed run measures the held-out rows again, so a step can have several values. The last
        value counts. Before its first step, DPO has no accuracy: the policy is the reference, and
        each pair is a tie.
        """
        points = {row["step"]: row[metric] for row in self.log if metric in row}
        if self.stage.writes_text and metric == f"eval_{self.stage.accuracy}":
            points.pop(0, None)
        return sorted(points.items())

    @property
    def margins(self) -> list[float]:
        """The margins of the held-out pairs."""
        return [row.margin for row in self.held_out if row.margin is not None]

    @property
    def accuracy(self) -> Estimate | None:
        """Share of held-out pairs whose chosen response scores higher than the rejected one.

        The share has a 95% interval.
        """
        margins = self.margins
        if not margins:
            return None
        return wilson(sum(margin > 0 for margin in margins) / len(margins), len(margins))

    @property
    def figures(self) -> dict[str, tuple[float | None, float]]:
        """The first and the last value of each figure.

        The last accuracy and the last margin are computed over all held-out pairs. The values that
        TRL logs are means over batches.
        """
        accuracy, margins = self.accuracy, self.margins
        found: dict[str, tuple[float | None, float]] = {
            name: (points[0][1], points[-1][1])
            for name, metric in (("training_loss", "loss"), ("held_out_loss", "eval_loss"))
            if (points := self.series(metric))
        }
        if accuracy is not None:
            mean = sum(margins) / len(margins)
            for name, metric, last in (
                ("held_out_accuracy", self.stage.accuracy, accuracy.value),
                ("held_out_margin", self.stage.margin, mean),
            ):
                found[name] = (dict(self.series(f"eval_{metric}")).get(0), last)
        return found

    @property
    def answer(self) -> str:
        """The result in one sentence."""
        accuracy = self.accuracy
        if accuracy is None:
            first, last = self.figures.get("held_out_loss", (None, None))
            if first is None or last is None:
                return "The held-out loss was not measured."
            moved = "fell" if last < first else "did not fall"
            return f"The held-out loss {moved}: from {first:.3f} to {last:.3f} nats per token."
        scorer = "policy" if self.stage.writes_text else "reward model"
        if accuracy.low > 0.5:
            verdict = "better than chance"
        elif accuracy.high < 0.5:
            verdict = "worse than chance"
        else:
            verdict = "not distinguishable from chance"
        return (
            f"The {scorer} prefers the chosen response in {accuracy.value:.1%} of "
            f"{plural(len(self.margins), 'held-out pair')} (95% interval {accuracy.low:.1%} to "
            f"{accuracy.high:.1%}), which is {verdict}."
        )

    @property
    def problems(self) -> list[str]:
        """Reasons to doubt the figures, one line each."""
        ties = self.margins.count(0.0)
        if not ties:
            return list(self.notes)
        return [
            *self.notes,
            f"both responses of {plural(ties, 'held-out pair')} have the same score; these pairs "
            "count as wrong",
        ]
