"""Sentences that say which arms differ in speed, cost and held-out reward.

For speed, every trial with timed rounds counts. For reward, only trials that ran all their rounds
count.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from grpo_trainable.telemetry.machine_load import LEAST_ROUNDS
from grpo_trainable.text import joined, plural, written
from reports.contrasts import Contrast, paired_prompts, reward_difference
from reports.intervals import LEVEL, MOST_SEEDS, identical
from reports.own_files import replaced
from reports.parquet_reader import TrialFiles
from reports.records import ExperimentRecord
from reports.summary import ADVICE, EXPLAINED, Comparison, saves_no_time

REWARD = "reward_difference"  # key of the quantity in report.json
FEW_ROUNDS = f"are fewer than {LEAST_ROUNDS} rounds"
ONE_SEED = (
    "All these results rest on one seed, so they hold for these runs only. In another run, the "
    "machine may be faster or slower, and the rewards differ."
)
FEW_SEEDS = 3  # with two seeds, Student's interval is 3.6 times as wide as with three


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """Quantity by which the arms are compared with the baseline."""

    key: str  # key in report.json
    name: str
    above: str  # begins the sentence about arms above the baseline: "Faster than {}"
    below: str  # begins the sentence about arms below the baseline
    form: str
    no_interval: str  # reason why a contrast may lack an interval; follows "because there"
    contrasts: Mapping[str, Contrast]
    not_comparable: Mapping[str, str]  # arm -> reason why it has no contrast
    by_machine: Collection[str] = ()  # arms whose clear difference the machine can explain


def quantities(
    experiment: ExperimentRecord, comparison: Comparison, files: Mapping[str, TrialFiles]
) -> list[Quantity]:
    """Return speed, speed at equal cost, and held-out reward, each relative to the baseline."""
    return [
        Quantity(
            key="speed_up",
            name="speed (samples per second)",
            above="Faster than {} (more samples per second)",
            below="Slower than {} (fewer samples per second)",
            form="{:.2f}x",
            no_interval=FEW_ROUNDS,
            contrasts=comparison.speed,
            not_comparable=comparison.not_comparable,
            by_machine=_by_machine(comparison.speed, comparison),
        ),
        Quantity(
            key="equal_cost",
            name="cost (samples per device-hour)",
            above="Cheaper than {} (more samples per device-hour)",
            below="More expensive than {} (fewer samples per device-hour)",
            form="{:.2f}x",
            no_interval=FEW_ROUNDS,
            contrasts=comparison.cost,
            not_comparable=comparison.not_comparable,
            by_machine=_by_machine(comparison.cost, comparison),
        ),
        Quantity(
            key=REWARD,
            name="held-out reward",
            above="Higher held-out reward than {}",
            below="Lower held-out reward than {}",
            form="{:+.3f}",
            no_interval="is only one prompt, or the same difference in every prompt",
            contrasts=reward_differences(experiment, comparison.baseline, files),
            not_comparable={},
        ),
    ]


def _by_machine(contrasts: Mapping[str, Contrast], comparison: Comparison) -> set[str]:
    return {
        arm
        for arm, own in contrasts.items()
        if own.told_apart and comparison.machine_explains(arm, own.value)
    }


def reward_differences(
    experiment: ExperimentRecord, baseline: str | None, files: Mapping[str, TrialFiles]
) -> dict[str, Contrast]:
    """Return each arm's difference from the baseline in held-out reward.

    Arms that share no seed or no prompt with the baseline are left out.
    """
    rewards = {
        arm: {trial.config.seed: files[trial.name].held_out for trial in trials}
        for arm, trials in experiment.complete_arms.items()
    }
    base = rewards.get(baseline or "", {})
    found = {arm: reward_difference(own, base) for arm, own in rewards.items() if arm != baseline}
    return {arm: contrast for arm, contrast in found.items() if contrast is not None}


def verdicts(
    found: Sequence[Quantity], comparison: Comparison, *, has_menu: bool = False
) -> list[str]:
    """Return the sentences about differences between arms; empty if there is nothing to compare.

    Args:
        found: The quantities in which the arms are compared.
        comparison: The comparison of the arms.
        has_menu: True if a menu says how many seeds a verdict on a reward takes. These sentences
            then give no other number of seeds for rewards.
    """
    if not any(quantity.contrasts or quantity.not_comparable for quantity in found):
        return []
    doubt = _baseline_doubt(comparison)
    said = [] if doubt is None else [doubt]
    for quantity in found:
        advice = not (has_menu and quantity.key == REWARD)
        said += _of_quantity(quantity, comparison, advice=advice)
    if doubt is None and comparison.not_comparable:
        said.append(
            f"Not comparable with {comparison.baseline} in speed or cost, because other processes "
            f"used the machine: {', '.join(comparison.not_comparable)}."
            f"{saves_no_time(comparison.exact_lags)}"
        )
    said += comparison.about_rewards
    said += _of_one_seed(found)
    among_seeds = [
        [own for own in quantity.contrasts.values() if len(own.seeds) > 1] for quantity in found
    ]
    if not any(own.told_apart for contrasts in among_seeds for own in contrasts):
        return said
    most = max(sum(own.told_apart is not None for own in contrasts) for contrasts in among_seeds)
    return [*said, _by_chance(most)]


def before_and_after(experiment: ExperimentRecord, files: Mapping[str, TrialFiles]) -> list[str]:
    """Return a sentence on the change in held-out reward, if the experiment has only one arm.

    Seeds and prompts are paired: the same prompts are answered before and after training. If the
    user's code changed during the experiment, the rewards cannot be compared, so there is no
    sentence.
    """
    evaluated = [trial for trial in experiment.trials if trial.reward_after is not None]
    one_arm = len({trial.arm for trial in evaluated}) == 1
    if not one_arm or any(t.member for t in evaluated) or replaced(experiment):
        return []
    after, before = (
        {trial.config.seed: getattr(files[trial.name], when) for trial in evaluated}
        for when in ("held_out", "held_out_first")
    )
    found = reward_difference(after, before)
    if found is None:
        return []
    _, differences = paired_prompts(after, before)
    prompts = plural(differences.shape[1], "prompt")
    every = (reward for when in (after, before) for own in when.values() for reward in own.values())
    if not any(every):
        return [f"Every held-out reward was 0, before and after training, on {prompts}."]
    if not differences.any():
        return [f"Training changed no held-out reward, on {prompts}."]
    said = f"Training changed the held-out reward by {written(found.value, '{:+.3f}')}"
    interval = found.shown_interval("{:+.3f}")
    said += f" ({LEVEL:.0%} interval: {interval})" if interval else ""
    clear = "" if found.told_apart else "; the change may be due to chance"
    return [f"{said}, on {prompts}{clear}."]


def short_answer(found: Sequence[Quantity], comparison: Comparison) -> list[str]:
    """Return the clear differences in speed and in reward, one sentence each.

    If the planned baseline has not run yet, the first sentence says so. If every comparison rests
    on one seed, the last sentences say what follows. The list is empty if there is nothing to say.
    """
    speed, cost, reward = (
        next(own for own in found if own.key == key) for key in ("speed_up", "equal_cost", REWARD)
    )
    base, awaited = comparison.baseline, comparison.awaited
    said = [] if awaited is None else [f"The baseline {awaited} has not finished a round yet."]
    only_exact = comparison.has_exact_lag and len(comparison.arms) > 1
    if not (speed.contrasts or speed.not_comparable or reward.contrasts or only_exact):
        if base is not None and not _has_seed_in_common(comparison, base):
            said.append(
                f"No other arm has results with a seed of {base}, so nothing can be compared. "
                "Every arm needs the same seeds."
            )
        return said
    said += [] if awaited is None else [f"Until it does, arms are compared with {base}."]
    said += _about_speed(speed, cost, comparison)
    sides = (("higher", True), ("lower", False))
    clear = {
        side: [
            f"{arm} ({written(own.value, reward.form)})"
            for arm, own in reward.contrasts.items()
            if own.clearly(more=more)
        ]
        for side, more in sides
    }
    parts = [f"clearly {side} for {joined(arms)}" for side, arms in clear.items() if arms]
    if parts:
        unclear = [
            f"{arm} ({written(own.value, reward.form)})"
            for arm, own in reward.contrasts.items()
            if own.told_apart is False and arm in speed.contrasts
            if speed.contrasts[arm].clearly(more=True)
        ]
        parts += [f"not clearly different for {joined(unclear)}"] if unclear else []
        every = ", and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))
        said.append(f"Compared with {base}, the held-out reward is {every}.")
    elif reward.contrasts:
        said.append(f"No arm's held-out reward clearly differs from the reward of {base}.")
    elif base in (done := _complete_arms(comparison)) and len(done) > 1:
        said.append(f"No arm's held-out reward can be compared with the reward of {base}.")
    else:
        said.append(
            f"Held-out rewards can be compared once {base} and another arm each have a trial that "
            "has run all its rounds."
        )
    seeds = [len(own.seeds) for quantity in (speed, reward) for own in quantity.contrasts.values()]
    if seeds and max(seeds) == 1:
        said.append(ONE_SEED)
    if comparison.evaluation_times is not None and speed.contrasts:
        least, most = comparison.evaluation_times
        said.append(
            f"Even in these runs, differences in speed of up to {most / least - 1:.0%} can come "
            "from the machine, whose speed changed from trial to trial."
        )
    return said


def _has_seed_in_common(comparison: Comparison, base: str) -> bool:
    """Return True if an arm has a seed in common with the baseline, or if there is no other arm."""
    seeds = {arm: {trial.seed for trial in own} for arm, own in comparison.arms.items()}
    others = [own for arm, own in seeds.items() if arm != base]
    return not others or any(seeds[base] & own for own in others)


def _about_speed(speed: Quantity, cost: Quantity, comparison: Comparison) -> list[str]:
    """Name the faster arms, or say why there are none. An exact lag saves no time, so say that too.

    If all lags are exact, say only that.
    """
    if comparison.has_exact_lag:
        return comparison.about_exact_lag
    base = comparison.baseline
    if speed.contrasts:
        said = faster(speed.contrasts, cost.contrasts, base)
    elif speed.not_comparable:
        said = _all_disturbed(comparison)
    else:
        said = f"No arm's speed can be compared with the speed of {base}."
    return [said, *comparison.about_exact_lag]


def faster(speeds: Mapping[str, Contrast], costs: Mapping[str, Contrast], base: str | None) -> str:
    """Return a sentence that names the arms that are clearly faster than the baseline.

    Args:
        speeds: The comparisons with the baseline in samples per second, by arm.
        costs: The comparisons with the baseline in samples per device-hour, by arm.
        base: The baseline.
    """
    found = [(own.value, arm) for arm, own in speeds.items() if own.clearly(more=True)]
    if not found:
        return f"No arm is clearly faster than {base}."
    named = []
    for value, arm in sorted(found, reverse=True):
        speed, cost = speeds[arm], costs.get(arm)
        counted = ", disturbed rounds included" if speed.counted_disturbed else ""
        figures = [
            f"{written(value, '{:.2f}')} times as many samples per second, {LEVEL:.0%} interval: "
            f"{speed.shown_interval('{:.2f}x')}{counted}"
        ]
        if cost is not None and cost.told_apart:
            figures.append(f"{written(cost.value, '{:.2f}')} times as many per device-hour")
        named.append(f"{arm} ({'; '.join(figures)})")
    return f"Faster than {base}: {joined(named)}."


def _all_disturbed(comparison: Comparison) -> str:
    """Say why no speed can be compared, and what to do."""
    trials = [trial for own in comparison.arms.values() for trial in own if not trial.comparable]
    shares = [trial.pace.others or 0.0 for trial in trials if trial.pace is not None]
    least, most = f"{min(shares):.0%}", f"{max(shares):.0%}"
    took = most if least == most else f"{least} to {most}"
    return f"Speeds cannot be compared: other processes took {took} of the machine. {ADVICE}"


def _complete_arms(comparison: Comparison) -> list[str]:
    """Return the arms with a trial that has run all its rounds."""
    return [
        arm for arm, trials in comparison.arms.items() if any(trial.complete for trial in trials)
    ]


def _baseline_doubt(comparison: Comparison) -> str | None:
    """Return a sentence if the baseline is too disturbed to compare any speed with it."""
    base = comparison.baseline
    if base is None or comparison.has_usable_baseline or not comparison.has_ratios:
        return None
    reasons = [
        f"{trial.pace.doubt} of seed {trial.seed}"
        for trial in comparison.arms[base]
        if trial.pace is not None and not trial.comparable
    ]
    return f"No arm can be compared with {base} in speed or cost: {'; '.join(reasons)}."


def _of_one_seed(found: Sequence[Quantity]) -> list[str]:
    """Name the results that rest on a single seed, and say what their intervals cover."""
    alone = [
        f"{quantity.name} of {arm}"
        for quantity in found
        for arm, own in quantity.contrasts.items()
        if len(own.seeds) == 1
    ]
    if not alone:
        return []
    all_alone = len(alone) == sum(len(quantity.contrasts) for quantity in found)
    if all_alone:
        first = "All results above rest on one seed and hold for these runs only."
    else:
        first = f"These results rest on one seed and hold for these runs only: {', '.join(alone)}."
    return [
        f"{first} Their intervals cover the noise between rounds and between prompts, but not the "
        "difference between one run and the next, such as a machine that is slower for a while. "
        f"Use at least {FEW_SEEDS} seeds (--num-samples "
        f"{FEW_SEEDS}) before you expect the same result from another run."
    ]


def _of_quantity(quantity: Quantity, comparison: Comparison, *, advice: bool) -> list[str]:
    """Return the sentences about the arms that have a contrast in a quantity.

    Args:
        quantity: The quantity.
        comparison: The comparison of the arms.
        advice: Say how many more seeds would show a difference that is not yet clear.
    """

    def listed(which: Callable[[Contrast], bool], advice: bool = False) -> list[str]:
        return [
            f"{arm} ({_figures(quantity, arm, comparison)}"
            f"{_advice(own, quantity.form) if advice else ''})"
            for arm, own in quantity.contrasts.items()
            if which(own)
        ]

    baseline = comparison.baseline
    alone = all(len(own.seeds) == 1 for own in quantity.contrasts.values())
    here = f"{baseline} in these runs" if alone else baseline
    said = [
        (quantity.above.format(here), listed(lambda own: own.clearly(more=True))),
        (quantity.below.format(here), listed(lambda own: own.clearly(more=False))),
        (
            f"No clear difference from {baseline} in {quantity.name}",
            listed(lambda own: own.told_apart is False, advice=advice),
        ),
        (
            f"No interval for {quantity.name}, because there {quantity.no_interval}",
            listed(lambda own: own.told_apart is None),
        ),
    ]
    return [f"{what}: {', '.join(arms)}." for what, arms in said if arms]


def _figures(quantity: Quantity, arm: str, comparison: Comparison) -> str:
    own = quantity.contrasts[arm]
    value = written(own.value, quantity.form)
    interval = own.shown_interval(quantity.form)
    between = f"{LEVEL:.0%}: {interval}" if interval else identical(own.identical)
    disturbed = own.counted_disturbed
    counted = f"including rounds that other processes disturbed ({disturbed})" if disturbed else ""
    parts = [value, between, comparison.seeds_used(own), counted]
    parts.append(EXPLAINED if arm in quantity.by_machine else "")
    return ", ".join(part for part in parts if part)


def _advice(own: Contrast, form: str) -> str:
    """Say how many more seeds would probably show a difference of this size.

    If the figures of the arm and the baseline look equal in this format, there is nothing to show.
    """
    if own.spread is None or written(own.value, form) == written(own.neutral, form):
        return ""
    needed = own.seeds_needed
    if needed is None:
        return f"; showing a difference of this size would need more than {MOST_SEEDS} seeds"
    more = max(1, needed - len(own.seeds))
    return f"; {plural(more, 'more seed')} would probably show a difference of this size"


def _by_chance(arms: int) -> str:
    if arms == 1:
        return (
            f"For each quantity, {1 - LEVEL:.0%} of experiments show a clear difference between "
            "two equal arms by chance alone."
        )
    return (
        f"If {arms} arms equalled the baseline, up to {1 - LEVEL**arms:.0%} of experiments would "
        "still show a clear difference in a given quantity, by chance. Before you rely on a clear "
        "difference, repeat the experiment with other seeds (--seed)."
    )
