"""Compare every pair of arms of an experiment, not only the pairs with the baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_trainable.config import GRPOConfig, resources, schedule, shown
from grpo_trainable.text import written
from reports.parquet_reader import TrialFiles
from reports.records import ExperimentRecord, TrialRecord
from reports.settings import reserved
from reports.summary import COUNTED, EXPLAINED_MARK, MARK, Comparison, relative_to
from reports.verdicts import Quantity, quantities

HEADER = ("arm", "relative to", "speed-up", "at equal cost", "held-out reward")
NEIGHBOURS = ("arm", "relative to", "what differs", *HEADER[2:])
MOST_ARMS = 40  # with more arms, a table of neighbours would be too long to read
MOST_SETTINGS = 2  # maximum number of settings in which neighbours differ
# Settings that are not compared, or that follow from the number of samples.
NOT_COMPARED = ("arm", "seed", "rounds", "eval.every")
# The CPUs of the process that trains: of the learner, or of the worker of a colocated trial.
LEARNER_CPUS = ("resources.learner_cpus", "resources.worker_cpus")
OF_LEARNER = "CPUs of the learner"  # compared if the two arms read different settings of these


@dataclass(frozen=True, kw_only=True)
class ArmPair:
    """Comparison of an arm, in all quantities, with an arm before it in the table of arms."""

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


def neighbours(
    pairs: Sequence[ArmPair], arms: Mapping[str, Sequence[TrialRecord]]
) -> list[tuple[str, ...]]:
    """Return a table row for each pair of arms that shows the effect of one or two settings.

    The arms of such a pair differ in at most `MOST_SETTINGS` settings, and no other arm lies
    between them. An arm lies between them if, in each setting that it reads, it has the value of
    one of the two arms or a number between their values. A setting that an arm does not read does
    not count as a difference.

    Args:
        pairs: All pairs of arms.
        arms: The trials by arm.

    Returns:
        Cells in the order of `NEIGHBOURS`; empty if trials of one arm differ in their settings, if
        the arms were to train on different numbers of samples, or if there are more than
        `MOST_ARMS` arms.
    """
    if len(arms) > MOST_ARMS:
        return []
    every = [trial.config for own in arms.values() for trial in own]
    if len({own.rounds * schedule.responses_per_round(own) for own in every}) > 1:
        return []
    settings = {arm: [_compared(trial.config) for trial in own] for arm, own in arms.items()}
    if any(own != found[0] for found in settings.values() for own in found):
        return []
    first = {arm: found[0] for arm, found in settings.items()}
    rows = []
    for pair in pairs:
        own, over = first[pair.arm], first[pair.over]
        differ = _different(own, over)
        others = (other for arm, other in first.items() if arm not in (pair.arm, pair.over))
        if 0 < len(differ) <= MOST_SETTINGS and not any(_between(o, own, over) for o in others):
            what = [f"{key} {shown(own[key])}, not {shown(over[key])}" for key in differ]
            ours, theirs = (reserved(arms[arm][0].config) for arm in (pair.arm, pair.over))
            if ours != theirs and not all(key.startswith("resources.") for key in differ):
                what.append(f"{ours} reserved, not {theirs}")
            figures = pair.cells()[2:]
            if set(figures) != {"-"}:
                rows.append((pair.arm, pair.over, "; ".join(what), *figures))
    return rows


def _compared(config: GRPOConfig) -> dict[str, Any]:
    """Return the settings that the trial reads, by dotted key."""
    read = {
        key: value
        for key, value in config.in_effect.items()
        if key not in NOT_COMPARED and config.reads(key)
    }
    (of_learner,) = (read[key] for key in LEARNER_CPUS if key in read)
    return read | {
        "resources.generator_cpus": resources.generator_cpus(config),
        OF_LEARNER: of_learner,
    }


def _different(own: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    keys = [key for key in own if key in other and own[key] != other[key]]
    one_setting = any(key in own and key in other for key in LEARNER_CPUS)
    return [key for key in keys if key != OF_LEARNER or not one_setting]


def _between(middle: Mapping[str, Any], one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return True if an arm's settings lie between those of two others, and differ from both."""
    if not (_different(middle, one) and _different(middle, other)):
        return False
    for key, value in middle.items():
        ends = [side[key] for side in (one, other) if key in side]
        numbers = [end for end in (*ends, value) if type(end) in (int, float)]
        is_inside = len(numbers) == 3 and min(ends) <= value <= max(ends)
        if ends and value not in ends and not is_inside:
            return False
    return True


def _cell(quantity: Quantity, arm: str) -> str:
    if arm in quantity.not_comparable:
        return MARK
    own = quantity.contrasts.get(arm)
    if own is None:
        return "-"
    interval = own.shown_interval(quantity.form)
    value = written(own.value, quantity.form)
    mark = f" {COUNTED}" if own.counted_disturbed else ""
    mark += f" {EXPLAINED_MARK}" if arm in quantity.by_machine else ""
    return (f"{value} ({interval})" if interval else value) + mark
