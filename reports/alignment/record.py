"""An alignment run: what was asked for, the log of the trainer, and the held-out rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_trainable.text import plural
from grpo_trainable.tools.alignment.held_out import HeldOutRow
from grpo_trainable.tools.alignment.stages import STAGES, Stage
from reports.intervals import Estimate, wilson


@dataclass(frozen=True, kw_only=True)
class AlignmentRecord:
    """A finished run with its origin."""

    name: str  # the directory's name
    asked: Mapping[str, Any]  # stage, model, files, seed, settings
    training: Mapping[str, Any]  # steps, parameters, notes, and the log of the trainer
    held_out: Sequence[HeldOutRow]
    train_rows: int
    held_out_rows: int  # before rows that are too long were left out
    origin: Mapping[str, Any] = field(default_factory=dict)  # command, commit, machine, packages, …

    @property
    def stage(self) -> Stage:
        """The stage of the run."""
        return STAGES[self.asked["stage"]]

    def series(self, metric: str) -> list[tuple[int, float]]:
        """Return the logged values of a metric by step.

        A resumed run measures the held-out rows again. Only the last value of a step counts.
        """
        log = self.training["log"]
        return sorted({row["step"]: row[metric] for row in log if metric in row}.items())

    @property
    def margins(self) -> list[float]:
        """The margins of the held-out pairs."""
        return [row.margin for row in self.held_out if row.margin is not None]

    @property
    def accuracy(self) -> Estimate | None:
        """Share of held-out pairs whose chosen response scores higher, with its 95% interval."""
        margins = self.margins
        if not margins:
            return None
        return wilson(sum(margin > 0 for margin in margins) / len(margins), len(margins))

    @property
    def answer(self) -> str:
        """The result in one or two sentences."""
        accuracy = self.accuracy
        if accuracy is None:
            losses = self.series("eval_loss")
            if not losses:
                return "The held-out loss was not measured."
            (_, first), (_, last) = losses[0], losses[-1]
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
        found = list(self.training["notes"])
        left_out = self.held_out_rows - len(self.held_out)
        if left_out:
            found.append(
                f"{left_out} of {self.held_out_rows} held-out rows are longer than "
                f"max_length={self.training['max_length']}, so they have no score"
            )
        ties = self.margins.count(0.0)
        if ties:
            found.append(
                f"both responses of {plural(ties, 'held-out pair')} have the same score; these "
                "pairs count as wrong"
            )
        return found
