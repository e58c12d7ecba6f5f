"""Menu of the arms: speed, cost and a verdict on reward for each arm, relative to a baseline."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from grpo_trainable.config import resources
from grpo_trainable.text import did_you_mean, plural
from reports.audit import Audit, audit_arms
from reports.contrasts import Contrast, paired_prompts
from reports.intervals import MOST_SEEDS, mean_squares
from reports.margin_tests import (
    FIRST_LOOK,
    UNDECIDED,
    WORSE,
    Design,
    Judgement,
    LooksEarly,
    Pairs,
    judge,
)
from reports.parquet_reader import TrialFiles
from reports.records import BY_TUNE, ExperimentRecord, TrialRecord
from reports.summary import Comparison, relative_to
from reports.verdicts import reward_differences

NO_VERDICT = "no verdict"  # shown for an arm that fails its audit
DECIDED_STATUS, WORSE_STATUS, UNDECIDED_STATUS = 0, 3, 4
# An arm is a copy of the baseline if these metrics agree in every round, bit for bit.
REPEATED = ("reward/train_mean", "reward/eval_mean", "response/length_mean")
# The cost of more seeds is compared with the cost of multiplying the number of evaluated prompts by
# this factor, or by a smaller factor if the task holds out fewer prompts.
MORE_PROMPTS = 4


class MenuError(ValueError):
    """There is no verdict; the message gives the reason in one line."""


@dataclass(frozen=True, kw_only=True)
class VerdictOptions:
    """Options of a verdict, from a command line or from experiment.json."""

    margin: float | None = None  # the largest acceptable loss of held-out reward
    margin_relative: float | None = None  # this loss as a share of the baseline's reward
    baseline: str | None = None  # None means the first arm
    max_seeds: int | None = None  # maximum number of seeds; None means a fixed number

    @property
    def has_margin(self) -> bool:
        """Return True if there is a margin, so that a verdict is possible."""
        return self.margin is not None or self.margin_relative is not None


@dataclass(frozen=True, kw_only=True)
class Price:
    """Cost of the trials that a decision still needs, if they run one after another."""

    minutes: float
    device_hours: float
    disturbed: bool  # True if the cost is computed from trials that other processes slowed


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Sources of the seed-to-seed variance of an arm's difference in reward."""

    # Share of the variance that comes from the evaluation: some prompts are easier in one run than
    # in another, and responses are sampled. The rest comes from other differences between runs.
    evaluation_share: float
    # Standard deviation that the evaluation adds to a seed's difference in reward.
    evaluation_sd: float
    seed_sd: float  # observed standard deviation, over the seeds, of the difference
    prompts: int  # number of prompts in the last evaluation
    more_prompts: int  # `MORE_PROMPTS` times `prompts`, but at most what the task holds out
    held_out: int | None  # number of prompts that the task holds out; None if unknown
    # Cost of a given precision with `more_prompts` in the last evaluation, relative to the cost
    # with more seeds alone. None if the times are unknown.
    relative_cost: float | None

    @property
    def relative_seeds(self) -> float:
        """Factor by which `more_prompts` change the number of seeds needed for equal precision."""
        share = self.evaluation_share
        return 1 - share + share * self.prompts / self.more_prompts

    @property
    def cheaper(self) -> str | None:
        """The cheaper way to more precision: `prompts` or `seeds`; None if unknown."""
        if self.relative_cost is None:
            return None
        return "prompts" if self.relative_cost < 1 else "seeds"


@dataclass(frozen=True)
class SeedCost:
    """Median cost of one complete trial."""

    seconds: float  # including evaluation and checkpoints
    last_eval_s: float  # seconds of the last evaluation
    devices: float
    disturbed: bool  # True if other processes disturbed rounds of at least half of the trials


@dataclass(frozen=True, kw_only=True)
class MenuRow:
    """One arm of the menu."""

    arm: str
    # None for the baseline, for an arm with an exact lag, and if speeds are not comparable.
    speed: Contrast | None
    cost: Contrast | None
    disturbed: bool  # True if other processes disturbed the trials too much to compare their speed
    # None for the baseline, and for an arm that has faults or shares no seed with the baseline.
    judgement: Judgement | None
    # Difference in reward with its interval, as in “Which arms differ”; None if there is none.
    reward: Contrast | None
    faults: Sequence[str]  # faults found by the audit, which rule out a verdict; usually empty
    noise: Noise | None
    seed: SeedCost | None  # None without a complete trial
    price: Price | None  # None if no more seeds are needed, or if their number or cost is unknown
    # True if no other arm is faster, cheaper and better at once. False for an arm with faults or
    # without a comparable speed.
    in_pareto_set: bool
    ended_early: int  # number of trials that failed or were stopped, which do not count
    exact_lag: bool  # True if the arm's lag saves no time, so that the arm has no speed

    @property
    def verdict(self) -> str:
        """The verdict about the arm."""
        if self.faults:
            return NO_VERDICT
        return UNDECIDED if self.judgement is None else self.judgement.verdict


@dataclass(frozen=True, kw_only=True)
class Menu:
    """The arms of an experiment, judged against a baseline with a margin."""

    baseline: MenuRow
    others: Sequence[MenuRow]
    options: VerdictOptions
    margin: float  # in units of the reward
    design: Design
    # Price of deciding all arms whose number of missing seeds is known. The baseline's trials count
    # once.
    price: Price | None
    audits: Mapping[str, Audit]  # by arm
    about_exact_lag: Sequence[str]  # a note on exact lags, or nothing
    experiment: ExperimentRecord

    @property
    def rows(self) -> list[MenuRow]:
        """The baseline, then the other arms."""
        return [self.baseline, *self.others]

    @property
    def status(self) -> int:
        """Exit status for the worst verdict. An arm without a verdict counts as undecided."""
        verdicts = [row.verdict for row in self.others]
        if WORSE in verdicts:
            return WORSE_STATUS
        is_open = UNDECIDED in verdicts or NO_VERDICT in verdicts
        return UNDECIDED_STATUS if is_open else DECIDED_STATUS


def recorded_options(description: Mapping[str, Any]) -> VerdictOptions:
    """Return the options that the experiment was started with.

    Args:
        description: The content of experiment.json, which anyone may have written.

    Raises:
        MenuError: A recorded value cannot be used.
    """
    return VerdictOptions(
        margin=_recorded_margin(description, "margin"),
        margin_relative=_recorded_margin(description, "margin_relative"),
        baseline=recorded_baseline(description),
        max_seeds=_recorded_max_seeds(description),
    )


def recorded_baseline(description: Mapping[str, Any]) -> str | None:
    """Return the baseline that was chosen when the experiment started, or None."""
    baseline = description.get("baseline")
    return baseline if isinstance(baseline, str) else None


def _recorded_margin(description: Mapping[str, Any], key: str) -> float | None:
    value = description.get(key)
    if value is not None and (type(value) not in (int, float) or not value > 0):
        raise MenuError(f"experiment.json: {key}: must be a number above 0")
    return value


def _recorded_max_seeds(description: Mapping[str, Any]) -> int | None:
    value = description.get("max_seeds")
    if value is not None and (type(value) is not int or not FIRST_LOOK <= value <= MOST_SEEDS):
        raise MenuError(
            f"experiment.json: max_seeds: must be an integer in [{FIRST_LOOK}, {MOST_SEEDS}]"
        )
    return value


def refuse_stopped(experiment: ExperimentRecord) -> None:
    """Check that no scheduler chose which trials went on.

    Raises:
        MenuError: A scheduler, or a stopper of a user's own Tuner, ended trials early.
    """
    chosen = experiment.own_tuner or experiment.description.get("scheduler", "fifo") != "fifo"
    if chosen and any(trial.stopped_by == BY_TUNE for trial in experiment.trials):
        raise MenuError(
            f"{BY_TUNE} ended trials early, and the trials that went on flatter their arms; judge "
            "an experiment in which every trial runs to its end"
        )


def refuse_waiting(experiment: ExperimentRecord) -> None:
    """Check that a user's own Tuner has begun all trials. Further trials may have further arms.

    Raises:
        MenuError: Trials have not begun, or Tune's files do not show if they have.
    """
    if experiment.waiting is None:
        raise MenuError(
            "a file with the state of your own Tuner cannot be read, so it is unknown whether all "
            "trials have begun; the report names the file"
        )
    if experiment.waiting:
        have = "has" if experiment.waiting == 1 else "have"
        raise MenuError(
            f"{plural(experiment.waiting, 'trial')} of your own Tuner {have} not begun; wait for "
            "the end or, after an interrupt, continue with tune.Tuner.restore"
        )


def menu_of(
    experiment: ExperimentRecord,
    comparison: Comparison,
    files: Mapping[str, TrialFiles],
    options: VerdictOptions,
) -> Menu:
    """Judge the arms of an experiment.

    Args:
        experiment: The experiment as it was read.
        comparison: The comparison of the experiment's arms, with any baseline.
        files: Figures from the trials' Parquet files, by trial name.
        options: The margin, the baseline and the design.

    Raises:
        MenuError: The arms cannot be judged.
    """
    refuse_stopped(experiment)
    arms, planned = experiment.arms, _planned_arms(experiment)
    baseline = _baseline(planned, list(arms), options.baseline)
    complete = {
        arm: {t.config.seed: t for t in trials if t.reward_after is not None}
        for arm, trials in experiment.complete_arms.items()
    }
    design = _design(experiment, len(planned) - 1, options)
    held_out = _held_out(experiment.description)
    noise = {
        arm: _noise(arms[arm], arms[baseline], files, held_out) for arm in arms if arm != baseline
    }
    pairs = _pairs(complete, baseline, options, noise)
    audits = audit_arms(experiment, files, baseline)
    faults = {arm: _faults(audits, arm, baseline) for arm in planned}
    try:
        judged = judge({arm: own for arm, own in pairs.items() if not faults[arm]}, design)
    except LooksEarly as error:
        raise MenuError(str(error)) from None
    compared = relative_to(comparison, arms, baseline)
    costs = {arm: _seed_cost(experiment.complete_arms.get(arm, ())) for arm in planned}
    rewards = reward_differences(experiment, baseline, files)
    exact = compared.exact_lags
    pareto = _pareto_set(compared, baseline, judged)
    ended_early = Counter(t.arm for t in experiment.trials if t.failed or t.stopped_by is not None)

    def row(arm: str) -> MenuRow:
        own = judged.get(arm)
        return MenuRow(
            arm=arm,
            speed=compared.speed.get(arm),
            cost=compared.cost.get(arm),
            disturbed=arm in compared.not_comparable,
            judgement=own,
            reward=rewards.get(arm),
            faults=faults[arm],
            noise=noise.get(arm),
            seed=costs[arm],
            price=price_of([costs[arm], costs[baseline]], own.seeds_missing if own else None),
            in_pareto_set=arm in pareto,
            ended_early=ended_early[arm],
            exact_lag=arm in exact,
        )

    base = MenuRow(
        arm=baseline,
        speed=None,
        cost=None,
        disturbed=False,
        judgement=None,
        reward=None,
        faults=faults[baseline],
        noise=None,
        seed=costs[baseline],
        price=None,
        in_pareto_set=baseline in pareto,
        ended_early=ended_early[baseline],
        exact_lag=baseline in exact,
    )
    return Menu(
        baseline=base,
        others=[row(arm) for arm in planned if arm != baseline],
        options=options,
        margin=next(iter(pairs.values())).margin,
        design=design,
        price=_total_price(judged, costs, baseline),
        audits=audits,
        about_exact_lag=compared.about_exact_lag,
        experiment=experiment,
    )


def _faults(audits: Mapping[str, Audit], arm: str, baseline: str) -> list[str]:
    """Return the reasons why an arm has no verdict. A faulty baseline rules out every verdict."""
    own = [fault.reason for fault in audits[arm].faults] if arm in audits else []
    if arm != baseline and audits[baseline].faults:
        own.append(f"the baseline {baseline} fails its audit")
    return own


def _planned_arms(experiment: ExperimentRecord) -> list[str]:
    """Return all arms, including arms that have no results yet, in the question's order."""
    begun = {trial.arm: trial.config.arm for trial in experiment.trials}
    waiting = {arm: arm for arm, _ in experiment.not_begun if arm not in begun.values()}
    named = begun | waiting
    asked = list(experiment.question.arms) if experiment.question else []
    places = {arm: place for place, arm in enumerate(asked)}
    return sorted(named, key=lambda arm: places.get(named[arm], len(places)))


def _baseline(planned: Sequence[str], arms: Sequence[str], asked: str | None) -> str:
    """Return the arm to compare with.

    Args:
        planned: All arms.
        arms: The arms with results.
        asked: The arm that the options name. None means the first arm.

    Raises:
        MenuError: The arm has no results, or no other arm has any.
    """
    if len(arms) < 2:
        raise MenuError("a verdict compares arms, but this experiment has results for only one arm")
    if asked is None and planned[0] not in arms:
        raise MenuError(
            f"the first arm, {planned[0]}, has no results to compare with; choose another "
            "--baseline"
        )
    if asked is None or asked in arms:
        return asked or planned[0]
    hint = did_you_mean(asked, arms) or f"the arms are {', '.join(arms)}"
    raise MenuError(f"--baseline {asked}: no arm with results has this name; {hint}")


def _design(experiment: ExperimentRecord, others: int, options: VerdictOptions) -> Design:
    refuse_waiting(experiment)
    if options.max_seeds is not None:
        return Design(seeds=options.max_seeds, anytime=True, arms=others)
    if experiment.several_runs:
        raise MenuError(
            "fit() ran several times under this name, so a test with a fixed number of seeds may "
            "look at the results twice; if you chose a maximum number of seeds before the first "
            "look, use launch/verdict.py --max-seeds N, and otherwise give new seeds another name"
        )
    if needs_max_seeds(experiment):
        raise MenuError(
            "seeds were added after the experiment had ended, so a test with a fixed number of "
            "seeds would look at the results twice; use launch/verdict.py --max-seeds N, whose "
            "test is valid at any time"
        )
    seeds = {trial.config.seed for trial in experiment.trials}
    seeds |= {seed for _, seed in experiment.not_begun}
    return Design(seeds=len(seeds), arms=others)


def needs_max_seeds(experiment: ExperimentRecord) -> bool:
    """Return True if a test could have been made before the last seeds were added.

    No test is possible with one seed, so more seeds may be added after the first. If a user's own
    Tuner ran several times under one name, it is not known whether seeds were added.
    """
    return experiment.several_runs or experiment.seeds_before_addition > 1


def _pairs(
    complete: Mapping[str, Mapping[int, TrialRecord]],
    baseline: str,
    options: VerdictOptions,
    noise: Mapping[str, Noise | None],
) -> dict[str, Pairs]:
    """Return the paired differences of each arm that shares a seed with the baseline.

    Args:
        complete: arm -> seed -> complete trial.
        baseline: The arm to compare with.
        options: The margin and the design.
        noise: The sources of the noise of each arm's differences.

    Raises:
        MenuError: No arm shares a seed with the baseline, more than `max_seeds` seeds are complete,
            or the margin is relative to a reward that is not above 0.
    """
    base = complete[baseline]
    found = {}
    for arm, own in complete.items():
        shared = sorted(own.keys() & base.keys())
        if arm == baseline or not shared:
            continue
        values = np.array([base[seed].reward_after for seed in shared])
        differences = np.array([own[seed].reward_after for seed in shared]) - values
        known = noise[arm]
        found[arm] = Pairs(
            differences,
            _margins(values, options, baseline),
            copy=all(_repeats(own[seed], base[seed]) for seed in shared),
            evaluation_sd=0.0 if known is None else known.evaluation_sd,
        )
    if not found:
        raise MenuError(
            f"no arm has a completed seed in common with the baseline {baseline}; wait until there "
            "is one, or choose another --baseline"
        )
    if options.max_seeds is not None:
        most = max(pairs.seeds for pairs in found.values())
        if most > options.max_seeds:
            raise MenuError(
                f"--max-seeds {options.max_seeds}: {most} seeds are already complete; choose the "
                "maximum before the experiment starts, and do not lower it"
            )
    return found


def _repeats(trial: TrialRecord, other: TrialRecord) -> bool:
    """Return True if two trials had the same rewards and response lengths in every round.

    Equal rewards after training are not enough: both may have learned nothing, or everything.
    """
    return all(trial.column(name) == other.column(name) for name in REPEATED)


def _margins(base: np.ndarray, options: VerdictOptions, baseline: str) -> np.ndarray:
    if options.margin is not None:
        return np.full(len(base), options.margin)
    assert options.margin_relative is not None
    if not base.mean() > 0:
        raise MenuError(
            f"--margin-relative needs a baseline with a reward above 0, but {baseline} has "
            f"{base.mean():.3g}; use --margin"
        )
    return options.margin_relative * base


# ---- The Pareto set --------------------------------------------------------------------------


def _pareto_set(compared: Comparison, baseline: str, judged: Mapping[str, Judgement]) -> set[str]:
    """Return the arms that no other arm beats in speed, cost and reward together.

    An arm with an unknown speed, cost or reward is not compared and not in the set. The set is
    empty if fewer than two arms can be compared.
    """
    figures = {baseline: (1.0, 1.0, 0.0)}
    for arm, own in judged.items():
        if arm in compared.speed and arm in compared.cost:
            figures[arm] = (
                compared.speed[arm].value,
                compared.cost[arm].value,
                own.difference,
            )

    def beaten(arm: str) -> bool:
        return any(
            all(mine < other for mine, other in zip(figures[arm], theirs, strict=True))
            for theirs in figures.values()
        )

    return {arm for arm in figures if not beaten(arm)} if len(figures) > 1 else set()


# ---- The price of a decision -----------------------------------------------------------------


def _seed_cost(trials: Sequence[TrialRecord]) -> SeedCost | None:
    evaluating = [sum(trial.column("time/eval_s")) for trial in trials]
    seconds = [
        (trial.last("time/wall_clock_s") or 0.0)
        + evaluated
        + sum(trial.column("time/checkpoint_s"))
        for trial, evaluated in zip(trials, evaluating, strict=True)
    ]
    if not any(seconds):
        return None
    devices = resources.devices(trials[0].config)
    last = [trial.last("time/eval_s") or 0.0 for trial in trials]
    slowed = sum(trial.pace is not None and trial.pace.disturbed > 0 for trial in trials)
    return SeedCost(
        statistics.median(seconds), statistics.median(last), devices, 2 * slowed >= len(trials)
    )


def price_of(costs: Sequence[SeedCost | None], seeds: int | None) -> Price | None:
    """Return the price of `seeds` more seeds, each with one trial for every entry of `costs`.

    None if no more seeds are needed, or if their number or a cost is unknown.
    """
    known = [cost for cost in costs if cost is not None]
    if not seeds or len(known) < len(costs):
        return None
    return Price(
        minutes=seeds * sum(cost.seconds for cost in known) / 60,
        device_hours=seeds * sum(cost.seconds * cost.devices for cost in known) / 3600,
        disturbed=any(cost.disturbed for cost in known),
    )


def _total_price(
    judged: Mapping[str, Judgement], costs: Mapping[str, SeedCost | None], baseline: str
) -> Price | None:
    """Return the price of deciding all arms whose number of missing seeds is known.

    None if there is no such arm, or if the cost of a trial is unknown.
    """
    missing = {arm: own.seeds_missing for arm, own in judged.items() if own.seeds_missing}
    if not missing:
        return None
    parts = [price_of([costs[arm]], seeds) for arm, seeds in missing.items()]
    parts.append(price_of([costs[baseline]], max(missing.values())))
    priced = [part for part in parts if part is not None]
    if len(priced) < len(parts):
        return None
    return Price(
        minutes=sum(part.minutes for part in priced),
        device_hours=sum(part.device_hours for part in priced),
        disturbed=any(part.disturbed for part in priced),
    )


# ---- The sources of noise --------------------------------------------------------------------


def _held_out(description: Mapping[str, Any]) -> int | None:
    """Return the number of prompts that the task holds out; None if it was not recorded."""
    number = description.get("held_out_prompts")
    return number if type(number) is int and number > 0 else None


def _noise(
    arm: Sequence[TrialRecord],
    base: Sequence[TrialRecord],
    files: Mapping[str, TrialFiles],
    held_out: int | None,
) -> Noise | None:
    """Return the sources of the noise; None with fewer than two seeds or prompts in common."""
    sides = [
        {t.config.seed: files[t.name].held_out for t in trials if t.complete}
        for trials in (arm, base)
    ]
    _, differences = paired_prompts(*sides)
    if min(differences.shape) < 2:
        return None
    of_seeds, _, rest = mean_squares(differences)
    if not max(of_seeds, rest):
        return None
    share = rest / max(of_seeds, rest)
    prompts = differences.shape[1]
    more = MORE_PROMPTS * prompts
    more = more if held_out is None else max(prompts, min(more, held_out))
    costs = [_seed_cost([t for t in trials if t.complete]) for trials in (arm, base)]
    known = [cost for cost in costs if cost is not None]
    relative = None
    if len(known) == len(costs):
        evaluating = sum(c.last_eval_s for c in known) / sum(c.seconds for c in known)
        factor = more / prompts
        relative = (1 - share + share / factor) * (1 + (factor - 1) * evaluating)
    return Noise(
        evaluation_share=share,
        evaluation_sd=math.sqrt(rest / prompts),
        seed_sd=math.sqrt(of_seeds / prompts),
        prompts=prompts,
        more_prompts=more,
        held_out=held_out,
        relative_cost=relative,
    )
