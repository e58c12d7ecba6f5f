"""What an experiment's figures tell apart and what they do not, in sentences.

In speed every trial counts that has timed rounds; in reward those that have run all their rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from launch.contrasts import Contrast, reward_difference
from launch.experiment import ExperimentRecord, TrialFiles
from launch.intervals import LEAST_ROUNDS, LEVEL, MOST_SEEDS
from launch.summary import Comparison

FEW_SEEDS = 3  # with two, Student's interval is four times as wide as it would be with many


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """One in which the arms are compared with the baseline."""

    name: str
    above: str  # "Faster than {base}"
    below: str
    form: str
    contrasts: Mapping[str, Contrast]


def quantities(
    experiment: ExperimentRecord, comparison: Comparison, files: Mapping[str, TrialFiles]
) -> list[Quantity]:
    """Speed in wall-clock, speed at equal cost and held-out reward, each over the baseline's."""
    return [
        Quantity(
            name="speed (samples a second)",
            above="Faster than {} (samples a second)",
            below="Slower than {} (samples a second)",
            form="{:.2f}x",
            contrasts=comparison.speed,
        ),
        Quantity(
            name="cost (samples a device-hour)",
            above="Cheaper than {} (more samples a device-hour)",
            below="Dearer than {} (fewer samples a device-hour)",
            form="{:.2f}x",
            contrasts=comparison.cost,
        ),
        Quantity(
            name="held-out reward",
            above="More held-out reward than {}",
            below="Less held-out reward than {}",
            form="{:+.3f}",
            contrasts=reward_differences(experiment, comparison.baseline, files),
        ),
    ]


def reward_differences(
    experiment: ExperimentRecord, baseline: str | None, files: Mapping[str, TrialFiles]
) -> dict[str, Contrast]:
    rewards = {
        arm: {trial.config.seed: files[trial.name].held_out for trial in trials}
        for arm, trials in experiment.complete_arms.items()
    }
    base = rewards.get(baseline or "", {})
    found = {arm: reward_difference(own, base) for arm, own in rewards.items() if arm != baseline}
    return {arm: contrast for arm, contrast in found.items() if contrast is not None}


def verdicts(found: Sequence[Quantity], baseline: str | None) -> list[str]:
    """Nothing where there is nothing to compare."""
    if baseline is None or not any(quantity.contrasts for quantity in found):
        return []
    every = [contrast for quantity in found for contrast in quantity.contrasts.values()]
    seeds = max(len(contrast.seeds) for contrast in every)
    said = [sentence for quantity in found for sentence in _of_quantity(quantity, baseline)]
    if seeds == 1:
        said.append(
            "All of this is about these runs alone: with one seed the intervals cover the noise of "
            "the rounds within a run, and of the prompts, but not the difference between one run "
            f"and the next. At least {FEW_SEEDS} seeds (--num-samples {FEW_SEEDS}) are needed to "
            "say anything about that."
        )
    return [*said, _by_chance(max(len(quantity.contrasts) for quantity in found))]


def _of_quantity(quantity: Quantity, baseline: str) -> list[str]:
    def listed(which: Callable[[Contrast], bool], advice: bool = False) -> list[str]:
        return [
            f"{arm} ({_figures(quantity, own)}{_advice(own) if advice else ''})"
            for arm, own in quantity.contrasts.items()
            if which(own)
        ]

    said = [
        (quantity.above.format(baseline), listed(lambda own: bool(own.told_apart) and own.more)),
        (
            quantity.below.format(baseline),
            listed(lambda own: bool(own.told_apart) and not own.more),
        ),
        (
            f"Not told apart from {baseline} in {quantity.name}",
            listed(lambda own: own.told_apart is False, advice=True),
        ),
        (
            f"Without an interval, in {quantity.name} (fewer than {LEAST_ROUNDS} rounds or one "
            "prompt)",
            listed(lambda own: own.interval is None and own.doubt is None),
        ),
        (
            f"Not comparable with {baseline} in {quantity.name}",
            [f"{arm} ({own.doubt})" for arm, own in quantity.contrasts.items() if own.doubt],
        ),
    ]
    return [f"{what}: {', '.join(arms)}." for what, arms in said if arms]


def _figures(quantity: Quantity, own: Contrast) -> str:
    value = quantity.form.format(own.value)
    interval = own.shown_interval(quantity.form, " to ")
    return f"{value}, {LEVEL:.0%}: {interval}" if interval else value


def _advice(own: Contrast) -> str:
    """How many more seeds would tell a difference of this size."""
    if own.spread is None or own.value == own.neutral:
        return ""
    needed = own.seeds_needed
    if needed is None:
        return f"; more than {MOST_SEEDS} seeds would be needed to tell it"
    more = max(1, needed - len(own.seeds))
    return f"; {more} more seed{'s' * (more > 1)} would tell it"


def _by_chance(arms: int) -> str:
    if arms == 1:
        return (
            f"Two equal arms would be told apart by chance in {1 - LEVEL:.0%} of the experiments."
        )
    return (
        f"Each comparison stands by itself at {LEVEL:.0%}: were all {arms} arms equal to the "
        f"baseline, one or another would still be told apart by chance in up to "
        f"{1 - LEVEL**arms:.0%} of the experiments. Run an arm that matters to you again with "
        "other seeds (--seed)."
    )
