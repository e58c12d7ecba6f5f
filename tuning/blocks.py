"""Blocks of seeds that `--until-decided` adds until every arm is decided."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from reports.margin_tests import UNDECIDED
from reports.menu import Menu
from reports.records import ExperimentRecord, TrialRecord


@dataclass(frozen=True, kw_only=True)
class Block:
    """One more seed for the baseline and for each arm that is still undecided."""

    arms: Sequence[str]
    seconds: float  # expected time of the block's trials, one after another


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits on the blocks of an experiment."""

    max_seeds: int
    budget_s: float | None  # time for all trials of the experiment together


def next_block(experiment: ExperimentRecord, menu: Menu, seeds: int, limits: Limits) -> Block | str:
    """Return the next block of seeds, or the reason why there is none.

    Args:
        experiment: The experiment, whose trials have all ended.
        menu: The verdicts so far.
        seeds: The number of seeds so far.
        limits: The limits that the user has set.
    """
    untested = [row.arm for row in menu.others if row.judgement is None]
    undecided = [row.arm for row in menu.others if row.verdict == UNDECIDED]
    undecided = [arm for arm in undecided if arm not in untested]
    if not undecided:
        if len(untested) == len(menu.others):
            return "no arm can be tested"
        if untested:
            return f"every arm that can be tested is decided; cannot test {', '.join(untested)}"
        return "every arm is decided"
    if seeds >= limits.max_seeds:
        return f"the maximum of {limits.max_seeds} seeds has been reached (--max-seeds)"
    arms = [menu.baseline.arm, *undecided]
    complete = experiment.complete_arms
    seconds = sum(statistics.median(map(_seconds, complete[arm])) for arm in arms)
    if limits.budget_s is not None:
        left = limits.budget_s - sum(map(_seconds, experiment.trials))
        if seconds > left:
            return (
                f"the next seed would take about {duration(seconds, math.ceil)}, but only "
                f"{duration(max(left, 0.0), math.floor)} of the budget are left; to continue, use "
                "--resume with a larger --budget"
            )
    return Block(arms=arms, seconds=seconds)


def _seconds(trial: TrialRecord) -> float:
    """Return the time of a trial's rounds, including evaluations and checkpoints."""
    return trial.last("time_total_s") or 0.0


def duration(seconds: float, rounded: Callable[[float], int] = round) -> str:
    """Return a time in words: `40 s`, `12 min`, `2.5 h`.

    Args:
        seconds: The time.
        rounded: Function that rounds the number, such as `math.floor`.
    """
    if seconds < 600:
        return f"{rounded(seconds)} s"
    return f"{rounded(seconds / 60)} min" if seconds < 7200 else f"{rounded(seconds / 360) / 10} h"
