"""Compare every pair of arms of an experiment, not only the pairs with the baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grpo_trainable.text import written
from reports.parquet_reader import TrialFiles
from reports.records import ExperimentRecord
from reports.summary import COUNTED, MARK, Comparison, relative_to
from reports.verdicts import Quantity, quantities

HEADER = ("arm", "relative to", "speed-up", "at equal cost", "held-out reward")


@dataclass(frozen=True, kw_only=True)
class ArmPair:
    """An arm compared, in all quantities, with an arm that precedes it in the table of arms."""

    arm: str
    over: str
    quantities: Sequence[Quantity]

    def cells(self) -> tuple[str, ...]:
        """Return the cells of the pair's table row, in the order of `HEADER`."""
        return (self.arm, self.over, *(_cell(own, self.arm) for own in self.quantities))


def every_pair(
    experiment: ExperimentRecord, comparison: Comparison, files: Mapping[str, TrialFiles]
) -> list[ArmPair]:
    """Compare every arm with each arm that precedes it in the table of arms."""
    arms = list(comparison.arms)
    found = []
    for place, over in enumerate(arms[:-1]):
        own = relative_to(comparison, experiment.arms, over)
        compared = quantities(experiment, own, files)
        found += [ArmPair(arm=arm, over=over, quantities=compared) for arm in arms[place + 1 :]]
    return found


def _cell(quantity: Quantity, arm: str) -> str:
    if arm in quantity.not_comparable:
        return MARK
    own = quantity.contrasts.get(arm)
    if own is None:
        return "-"
    interval = own.shown_interval(quantity.form)
    value = written(own.value, quantity.form)
    mark = f" {COUNTED}" if own.counted_disturbed else ""
    return (f"{value} ({interval})" if interval else value) + mark
