"""The table at the end of an experiment: one row per arm, with medians over the seeds.

The report shows the same rows.
"""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from grpo_trainable.command_line import align
from grpo_trainable.config import GRPOConfig, resources, schedule
from grpo_trainable.config.conditions import CONTROL
from grpo_trainable.telemetry.machine_load import DISTURBED_ABOVE, LEAST_ROUNDS
from grpo_trainable.telemetry.metrics import PATIENCE, TRUNCATED_ABOVE, without_signal
from grpo_trainable.text import joined, plural, rate, written
from reports import changes
from reports.changes import Change
from reports.contrasts import Contrast, NotComparable, speed_up
from reports.intervals import LEVEL
from reports.pace import Pace, counted_disturbed
from reports.population import HEADER as LINEAGE
from reports.population import SAID, lineage
from reports.records import TrialRecord
from reports.series import held_out_parts

BASELINE = "colocated_k1"
# Shown if a speed or a total cannot be compared because of other processes: in place of the speed,
# or after the total.
MARK = "?"
COUNTED = "*"  # follows a speed that includes disturbed rounds because of the trials' settings
# Advice for the case that other processes made speeds incomparable.
ADVICE = (
    "Run the experiment again on an idle machine, or with --set "
    "callbacks.leave_out_disturbed=false, which includes disturbed rounds."
)
ENDLESS = ("keyword", "math")  # tasks that make as many held-out prompts as an evaluation asks for
EXACT_LAG = (
    "With lag_mode=exact, sampling and training take turns, so a lag saves no time. To measure "
    "speed, use lag_mode=bounded and placement=disaggregated."
)
DEVICE = (
    "A device is a GPU. If a trial has no GPU, a device is a CPU that the trial's actors reserve "
    "(0.95 CPUs per actor by default)."
)
# The KL is measured after the last gradient step of a round, on responses sampled before the first.
OLDER_RESPONSES = (
    "Older weights sampled the responses, so this KL is usually too low, most of all with a lag, "
    "with several gradient steps per round (k) or with reused responses (replay)."
)
NONE_BY_KL = "No two arms can be compared by this KL, because all differ in lag, k or replay."
COVERS = {  # the key is True if the interval of a speed rests on several seeds
    False: "With one seed, an interval covers only the noise between the rounds of these runs and "
    "does not predict other runs. To predict other runs, use --num-samples 3 or more.",
    True: "With several seeds, an interval covers the differences between runs, including the "
    "noise between rounds.",
}
MOST_OTHERS = 4  # maximum number of arms with equal devices that an arm is compared with
# Rounds. If a trial with a lag has fewer, its first round has a large weight and no overlap.
SHORT = 10
# Numbers of samples that differ by at most this share count as equal, because a few groups may have
# failed.
EQUAL_SAMPLES = 0.01
EXPLAINED = "the machine can explain this"  # follows a clear difference in speed
EXPLAINED_MARK = "†"  # the same in tables
EQUAL_WORK = 0.05  # lengths and times of evaluations count as equal up to this difference
UNEQUAL = (
    "The arms trained on unequal numbers of samples, so do not compare their rewards directly. "
    "Use --samples N to train every arm on N responses."
)
OTHER_WEIGHTS = (
    "The arms have different task.reward_weights, so their rewards measure different things. "
    "Compare the parts of the reward instead."
)
UNSCORED = (
    "Some held-out rewards leave out prompts that could not be scored, so they cannot be compared "
    "with rewards over other prompts. Differences with an interval count only prompts that both "
    "sides scored. Most prompts left out of an evaluation"
)
FAILED_REWARDS = (
    "The reward failed on some responses, so their groups were not trained on. The console shows "
    "an example in each such round. With task.strict=true, a trial ends at the first failure. "
    "Failed responses"
)
DIFFERENT = "The trials trained on different numbers of samples"
HEADER = (
    *("arm", "rounds", "samples", "wall-clock s", "samples/s", "speed-up", "at equal cost"),
    *("device-hours", "held-out reward", "tokens per response", "reference NLL", "largest lag"),
    *("eval s", "checkpoint s"),
)
RATIOS = ("speed-up", "at equal cost")  # columns left out if there is nothing to compare


@dataclass(frozen=True, kw_only=True)
class TrialSummary:
    """Figures of one trial for the table. A figure is None if the trial's rows do not have it."""

    arm: str
    seed: int
    rounds: int
    planned_rounds: int
    complete: bool
    stopped_by: str | None  # the cause that ended the trial before its last round
    samples: float | None  # responses trained on
    wall_clock_s: float | None
    ran: tuple[float, float] | None  # when the trial began and ended, in seconds since 1970
    pace: Pace | None
    samples_per_s: float | None  # also None if the trial is too disturbed to compare
    eval_s: float
    evaluated_with: tuple[object, ...]  # everything that determines the work of an evaluation
    checkpoint_s: float
    device_hours: float | None
    part_weights: Mapping[str, float]  # weight of each part of the reward; empty without weights
    # Name of a part of the reward -> its held-out means: before training, and in the latest
    # evaluation after that, if there is one.
    parts: Mapping[str, tuple[float, float | None]]
    first: float | None
    last: float | None
    # Planned number of responses to train on before an evaluation -> held-out reward.
    rewards: Mapping[int, float]
    # Number of held-out prompts, before training and in the latest evaluation after round 0.
    eval_prompts: tuple[int, int]
    reward_errors: int  # training responses whose reward failed
    unscored: int  # largest number of prompts that an evaluation left out because scoring failed
    may_repeat_prompts: bool  # True if an evaluation may ask for more held-out prompts than exist
    exact_lag: bool | None  # True if the lag is exact and so saves no time; None at lag 0
    truncated: float | None  # share of the last rounds' responses that the token limit cut off
    max_new_tokens: int
    reference_nll: float | None
    largest_lag: float | None
    niceness: float  # highest niceness of the trial's actors; an ordinary process has 0
    load_is_known: bool  # True if other processes' load was measured, and the trial uses no GPU
    # Number of rounds in which the rewards within each group were equal; 0 if the advantage can use
    # such rounds.
    still: int

    @property
    def comparable(self) -> bool:
        """Return False if other processes disturbed the trial too much for its speed to count."""
        return self.pace is None or self.pace.comparable


def summarise_trial(trial: TrialRecord) -> TrialSummary | None:
    """Return the figures of a trial, or None if the trial has no row yet."""
    if not trial.rows:
        return None
    groups = trial.groups
    return TrialSummary(
        arm=trial.arm,
        seed=trial.config.seed,
        rounds=trial.round,
        planned_rounds=trial.config.rounds,
        complete=trial.complete,
        stopped_by=trial.stopped_by,
        samples=None if groups is None else groups * trial.config.rollout.group_size,
        wall_clock_s=trial.last("time/wall_clock_s") or None,
        ran=_span(trial),
        pace=trial.pace,
        samples_per_s=trial.samples_per_s,
        eval_s=sum(trial.column("time/eval_s")),
        evaluated_with=_evaluated_with(trial.config),
        checkpoint_s=sum(trial.column("time/checkpoint_s")),
        device_hours=trial.last("cost/device_hours"),
        part_weights=trial.config.task.part_weights,
        parts={
            name: (first, last if trial.reward_after is not None else None)
            for name in held_out_parts([trial])
            if (first := trial.last(f"eval_part/{name}_first")) is not None
            and (last := trial.last(f"eval_part/{name}_mean")) is not None
        },
        first=trial.last("reward/eval_first"),
        last=trial.reward_after,
        rewards={
            round_ * schedule.responses_per_round(trial.config): reward
            for round_, reward, _ in trial.evaluated()
            if round_
        },
        eval_prompts=(
            schedule.held_out_prompts(trial.config, final=False),
            schedule.held_out_prompts(trial.config, final=trial.complete),
        ),
        reward_errors=int(trial.last("count/reward_errors") or 0),
        unscored=int(max(trial.column("eval/unscored"), default=0)),
        may_repeat_prompts=trial.config.task.name not in ENDLESS
        or trial.config.task.train_file is not None
        or trial.config.task.eval_file is not None,
        exact_lag=has_exact_lag(trial) if trial.config.lag else None,
        truncated=trial.late_mean("response/truncated_fraction") if has_limit(trial) else None,
        max_new_tokens=trial.config.rollout.max_new_tokens,
        reference_nll=trial.late_mean("response/reference_nll_nats"),
        largest_lag=max(trial.column("lag/max"), default=None),
        niceness=max(trial.column("fleet/niceness"), default=0.0),
        load_is_known=bool(trial.column("time/disturbed_fraction"))
        and not resources.uses_gpus(trial.config),
        still=sum(map(without_signal, trial.rows)) if trial.config.needs_unequal_rewards else 0,
    )


def _evaluated_with(config: GRPOConfig) -> tuple[object, ...]:
    """Return the settings and resources that determine how long an evaluation takes."""
    settings = {
        key: repr(value)
        for key, value in config.in_effect.items()
        if key.startswith(("model.", "task.", "env.", "eval.", "rollout.")) and key != "eval.every"
    }
    generators = 1 if config.placement == "colocated" else config.resources.num_generators
    return (
        *(config.engine, generators, resources.generator_cpus(config)),
        *(resources.uses_gpus(config), schedule.chunk_responses(config)),
        *(config.transport_dtype, config.resources.reward_workers, config.resources.reward_cpus),
        *sorted(settings.items()),
    )


def _span(trial: TrialRecord) -> tuple[float, float] | None:
    first, last = trial.rows[0], trial.rows[-1]
    try:
        return first["timestamp"] - first["time_total_s"], last["timestamp"]
    except KeyError:
        return None


def has_exact_lag(trial: TrialRecord) -> bool:
    """Return True if the trial trains on stale rollouts, although this saves no time."""
    return trial.config.lag > 0 and trial.config.lag_mode == "exact"


def has_limit(trial: TrialRecord) -> bool:
    """Return True if a response that reaches the token limit is incomplete.

    An episode, and a response of the control task, may use all its tokens and still be complete.
    """
    return trial.config.task.name != CONTROL and not trial.config.env.plays


def saves_no_time(arms: Sequence[str]) -> str:
    """Return a sentence on arms with an exact lag; empty if there are none."""
    return f" The exact lag of {', '.join(arms)} saves no time." if arms else ""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Comparison of the arms, which the command prints and the report shows."""

    arms: Mapping[str, Sequence[TrialSummary]]
    baseline: str | None  # arm that speed-ups are relative to; None if no arm has a timed round
    speed: Mapping[str, Contrast]  # other arm -> samples per second relative to the baseline
    cost: Mapping[str, Contrast]  # other arm -> samples per device-hour relative to the baseline
    not_comparable: Mapping[str, str]  # arm -> reason why it has no speed and no cost
    changes: Mapping[str, Sequence[Change]]  # side effects of training, by arm
    lineage: Sequence[tuple[str, ...]] = ()  # rows of the table of a population's members
    awaited: str | None = None  # the planned baseline until it has a timed round, then None
    on_equal_devices: Sequence[str] = ()  # sentences on faster arms with more devices

    @property
    def seeds(self) -> int:
        """Number of different seeds among the trials of all arms."""
        return len({trial.seed for trials in self.arms.values() for trial in trials})

    @property
    def equal_samples(self) -> bool:
        """Return True if all arms' complete trials trained on about the same number of samples."""
        medians = [median([t.samples for t in own if t.complete]) for own in self.arms.values()]
        known = [samples for samples in medians if samples is not None]
        return not known or max(known) <= (1 + EQUAL_SAMPLES) * min(known)

    @property
    def about_rewards(self) -> list[str]:
        """Return a sentence for each reason not to compare the rewards of the arms."""
        weights = [trial.part_weights for trials in self.arms.values() for trial in trials]
        notes = [] if self.equal_samples else [UNEQUAL]
        notes += [OTHER_WEIGHTS] if any(own != weights[0] for own in weights) else []
        most = {arm: max(trial.unscored for trial in own) for arm, own in self.arms.items()}
        unscored = ", ".join(f"{arm} {number}" for arm, number in most.items() if number)
        return notes + ([f"{UNSCORED}: {unscored}."] if unscored else [])

    @property
    def has_ratios(self) -> bool:
        """Return True if an arm other than the baseline has a speed, comparable or not."""
        return bool(self.speed or self.not_comparable)

    @property
    def header(self) -> tuple[str, ...]:
        """Titles of the table's columns."""
        return tuple(title for title in HEADER if self.has_ratios or title not in RATIOS)

    @property
    def counts_disturbed(self) -> str:
        """Name the arms whose speed includes disturbed rounds; empty if there are none."""
        arms = counted_disturbed((t.arm, t.pace) for own in self.arms.values() for t in own)
        return (
            "speeds include rounds that other processes disturbed "
            f"(callbacks.leave_out_disturbed=false): {arms}. The percentage is the share of the "
            "machine's CPU time that other processes took."
            if arms
            else ""
        )

    def counts(self, arm: str) -> bool:
        """Return True if the speed of an arm includes disturbed rounds."""
        return any(t.pace is not None and t.pace.counts_disturbed for t in self.arms[arm])

    def comparable(self, arm: str) -> bool:
        """Return True if the speeds of at least half of the arm's trials can be compared."""
        trials = self.arms[arm]
        return 2 * sum(trial.comparable for trial in trials) >= len(trials)

    @property
    def has_usable_baseline(self) -> bool:
        """Return True unless the baseline is too disturbed to compare any speed with it."""
        return self.baseline is not None and (self.comparable(self.baseline) or bool(self.speed))

    @property
    def exact_lags(self) -> list[str]:
        """Arms whose lag is exact and so saves no time."""
        return [arm for arm, own in self.arms.items() if any(trial.exact_lag for trial in own)]

    @property
    def has_exact_lag(self) -> bool:
        """Return True if all arms with a lag have an exact lag, and there is such an arm."""
        return {t.exact_lag for own in self.arms.values() for t in own} - {None} == {True}

    @property
    def about_exact_lag(self) -> list[str]:
        """Return a note on exact lags, which names their arms if other arms have another lag."""
        if self.has_exact_lag:
            return [EXACT_LAG]
        arms = self.exact_lags
        return [f"{EXACT_LAG} Arms with an exact lag: {', '.join(arms)}."] if arms else []

    @property
    def one_by_one(self) -> bool:
        """Return True if there are several trials, and their rows show that none overlapped."""
        spans = [trial.ran for trials in self.arms.values() for trial in trials]
        known = sorted(span for span in spans if span is not None)
        # Tune rounds the time of a row down to a whole second.
        return 1 < len(known) == len(spans) and all(
            begun >= ended - 1 for (_, ended), (begun, _) in pairwise(known)
        )

    def totals(self, arm: str, of: Callable[[TrialSummary], float | None]) -> list[float | None]:
        """Return a total of each trial, such as its device-hours.

        If the arm is comparable, trials that are not comparable are left out, as in `rates`.

        Args:
            arm: The arm.
            of: A function that returns the total of a trial.
        """
        comparable = self.comparable(arm)
        return [of(trial) for trial in self.arms[arm] if trial.comparable or not comparable]

    def rates(self, arm: str) -> list[float | None]:
        """Return the samples per second of each trial; empty if the arm is not comparable."""
        return [t.samples_per_s for t in self.arms[arm]] if self.comparable(arm) else []

    def rows(self) -> list[tuple[str, ...]]:
        """Return the rows of the table, with one cell for each title of the header."""
        return [self._row(arm, trials) for arm, trials in self.arms.items()]

    def note(self) -> str:
        """Return the line above the table; empty if there is nothing to explain."""
        if self.lineage:
            members = sum(map(len, self.arms.values()))
            return f"Medians over {plural(members, 'member')} (minimum to maximum)."
        if self.seeds == 1:
            shown = any(own.interval for own in self.speed.values())
            many = f"95% interval, if there are at least {LEAST_ROUNDS} rounds"
            return f"Each speed-up is shown with its {many}." if shown else ""
        how = " Speed-ups are geometric means over the seeds, with their 95% intervals."
        less = (
            " Speeds and costs leave out trials that other processes disturbed. Samples/s also "
            "leaves out disturbed rounds, but wall-clock time and device-hours include them. "
            f"{MARK}: too few trials are left, so totals cover all trials and are not comparable."
            if self._disturbed()
            else ""
        )
        said = f"Medians over {self.seeds} seeds (minimum to maximum).{less}"
        return f"{said}{how if self.speed else ''}"

    def footnote(self) -> str:
        """Return the notes below the table as wrapped text."""
        return "\n".join(textwrap.fill(line, 100) for line in self.footnotes())

    def footnotes(self) -> list[str]:
        """Return the notes below the table, one paragraph each."""
        of_devices = [" ".join(self.on_equal_devices)] if self.on_equal_devices else []
        return [
            *(self.columns_explained(), *self.warnings(), *of_devices),
            *self.notes_on_other_work(),
        ]

    def columns_explained(self) -> str:
        """Explain the columns of the table."""
        return (
            f"{DEVICE} Wall-clock time and device-hours start with round "
            "1, when the actors are warm, and exclude evaluation and checkpoints. "
            f"{self._precision_of_rewards()}Tokens per response: the mean length of the held-out "
            "responses. The arrow leads from before training to the latest evaluation. Reference "
            "NLL: how unlikely "
            "the initial policy finds the responses of the last eighth of the rounds, in nats per "
            "token. Largest lag: how many rounds old the stalest group was when it was first "
            "trained on. eval s and checkpoint s: the total seconds of a trial's evaluations and "
            "checkpoints, without its last checkpoint."
        )

    def warnings(self) -> list[str]:
        """Return notes that limit what the table shows, one paragraph each."""
        among_seeds = {len(own.seeds) > 1 for own in self.speed.values() if own.interval}
        notes = [self._what_ratios_are()] if self.has_ratios else []
        notes += [COVERS[several] for several in sorted(among_seeds)]
        fewer = [
            f"{arm} ({used})" for arm, own in self.speed.items() if (used := self.seeds_used(own))
        ]
        if fewer:
            notes.append(f"These speed-ups rest on only some of the seeds: {', '.join(fewer)}.")
        return [
            *notes,
            *self._undisturbed(),
            *self._speed_of_evaluations(),
            *self._about_parts(),
            *self._short_with_a_lag(),
            *self.about_rewards,
            *self._failed_rewards(),
            *self._stopped_early(),
            *self._at_equal_samples(),
            *self._stood_still(),
            *self.truncated(),
        ]

    def _precision_of_rewards(self) -> str:
        """Return sentences on the largest standard error of a held-out reward in [0, 1]."""
        every = [trial for trials in self.arms.values() for trial in trials]
        numbers = [trial.eval_prompts for trial in every]
        if any(trial.may_repeat_prompts for trial in every):
            most = max(map(max, numbers))
            return f"Held-out reward: the mean over the held-out prompts, at most {most}. "
        before, after = (sorted(set(own)) for own in zip(*numbers, strict=True))

        def prompts(found: list[int]) -> str:
            least = f"{found[0]} to " if len(found) > 1 else ""
            return least + plural(found[-1], "prompt")

        def at_most(found: list[int]) -> str:
            return f"at most {math.ceil(500 / math.sqrt(found[0])) / 1000:g}"  # rounded up

        over, error = prompts(before), at_most(before)
        if before != after:
            over += f" before training and over {prompts(after)} at the latest evaluation"
            error += f" before training and {at_most(after)} at the latest evaluation"
        medians = ", and may not equal one of these medians minus another"
        paired = (
            "Differences between arms are computed for each seed and prompt, so they are more "
            f"precise{medians if self.seeds > 1 else ''}. "
            if len(self.arms) > 1
            else ""
        )
        return (
            f"Held-out reward: the mean over {over}. If rewards lie between 0 and 1, its standard "
            f"error is {error}. {paired}"
        )

    def _about_parts(self) -> list[str]:
        """Return a note on the parts of each arm's reward, as medians over the seeds."""
        notes = []
        for arm, trials in self.arms.items():
            names = dict.fromkeys(name for trial in trials for name in trial.parts)
            shown = []
            for name in names:
                pairs = [trial.parts[name] for trial in trials if name in trial.parts]
                before = statistics.median(first for first, _ in pairs)
                later = [last for _, last in pairs if last is not None]
                after = f"{statistics.median(later):.3f}" if later else "-"
                shown.append(f"{name} {before:.3f} -> {after}")
            if shown:
                notes.append(
                    f"Parts of the held-out reward of {arm}, before training and at the latest "
                    f"evaluation, without their weights: {', '.join(shown)}."
                )
        return notes

    def _stopped_early(self) -> list[str]:
        """Return a note for each cause that ended trials before their last round."""
        found: dict[str, list[str]] = {}
        for arm, trials in self.arms.items():
            for trial in trials:
                if trial.stopped_by is not None:
                    reached = f"after round {trial.rounds} of {trial.planned_rounds}"
                    stopped = found.setdefault(trial.stopped_by, [])
                    stopped.append(f"{arm}, seed {trial.seed} ({reached})")
        return [
            f"Stopped by {cause}: {'; '.join(stopped)}. Comparisons of reward exclude these trials."
            for cause, stopped in found.items()
        ]

    def _at_equal_samples(self) -> list[str]:
        """Compare rewards at an equal number of samples, if the trials ended at unequal numbers."""
        trials = [trial for own in self.arms.values() for trial in own]
        ends = [trial.samples for trial in trials if trial.samples is not None]
        if len(self.arms) < 2 or not ends or max(ends) <= (1 + EQUAL_SAMPLES) * min(ends):
            return []
        evaluated = {
            arm: own
            for arm in self.arms
            if (own := [t.rewards for t in self.arms[arm] if t.rewards])
        }
        every = [set(rewards) for own in evaluated.values() for rewards in own]
        shared = set.intersection(*every) if len(evaluated) > 1 else set()
        if not shared:
            return [
                f"{DIFFERENT}, and there is no number of samples at which every trial was "
                "evaluated, so their held-out rewards cannot be compared."
            ]
        at = max(shared)
        rewards = [
            f"{arm} {show([rewards[at] for rewards in own], '{:.3f}')}"
            for arm, own in evaluated.items()
        ]
        return [
            f"{DIFFERENT}. Held-out rewards after {at} responses, the last point at which all "
            f"trials were evaluated: {', '.join(rewards)}."
        ]

    def truncated(self) -> list[str]:
        """Return a warning for each token limit that cuts off many responses of some arms."""
        found: dict[int, dict[str, float]] = {}
        for arm, own in self.arms.items():
            share = median([trial.truncated for trial in own])
            if share is not None and share > TRUNCATED_ABOVE:
                found.setdefault(own[0].max_new_tokens, {})[arm] = share
        return [
            f"{', '.join(shares)}: rollout.max_new_tokens={limit} cut off "
            f"{show(list(shares.values()), '{:.0%}')} of the training responses in the last "
            "rounds. If the reward needs the end of a response, raise this limit."
            for limit, shares in found.items()
        ]

    def _stood_still(self) -> list[str]:
        """Return a line for each arm that learned nothing in most of its rounds."""
        rounds = {
            arm: (sum(trial.still for trial in trials), sum(trial.rounds for trial in trials))
            for arm, trials in self.arms.items()
        }
        return [
            f"{arm} learned nothing in {still} of {plural(all_, 'round')}: in these rounds, all "
            "rewards within each group were equal (docs/running.md#when-nothing-is-learned)."
            for arm, (still, all_) in rounds.items()
            if 2 * still > all_ and still >= PATIENCE
        ]

    def _short_with_a_lag(self) -> list[str]:
        """Say which speed-ups are low because the first round has no overlap and a large weight."""
        short = {
            arm: own[0].rounds
            for arm, own in self.arms.items()
            if arm in self.speed and own[0].exact_lag is False and own[0].rounds < SHORT
        }
        if not short:
            return []
        arms = joined([f"{arm} ({plural(rounds, 'round')})" for arm, rounds in short.items()])
        return [
            "In the first round of a trial with a lag, sampling and training do not overlap yet. "
            f"The shorter the trial, the more this lowers its speed-up: {arms}."
        ]

    def _disturbed(self) -> list[str]:
        """Return the trials whose speed does not count: `sync, seed 0 (40% in 12 of 16 rounds)`."""
        found = {
            arm: [
                f"seed {trial.seed} ({trial.pace.disturbance})"
                for trial in trials
                if trial.pace is not None and not trial.comparable
            ]
            for arm, trials in self.arms.items()
        }
        return [f"{arm}, {', '.join(seeds)}" for arm, seeds in found.items() if seeds]

    def _failed_rewards(self) -> list[str]:
        errors = {arm: [trial.reward_errors for trial in own] for arm, own in self.arms.items()}
        if self.lineage:  # a member that copies another member continues that member's count
            most = max((number for own in errors.values() for number in own), default=0)
            return [f"{FAILED_REWARDS} of the member with the most: {most}."] if most else []
        failed = ", ".join(f"{arm} {sum(own)}" for arm, own in errors.items() if sum(own))
        return [f"{FAILED_REWARDS}: {failed}."] if failed else []

    def _what_ratios_are(self) -> str:
        return (
            f"Speed-up: samples per second relative to {self.baseline}; use this column if the "
            "devices would otherwise stand idle. At equal cost: samples per device-hour relative "
            f"to {self.baseline}; use this column if the devices could do other work."
            f"{' -: no speed-up, because an exact lag saves no time.' if self.exact_lags else ''}"
        )

    def notes_on_other_work(self) -> list[str]:
        """Return notes on other processes, and on exact lags, one paragraph each."""
        timed = [] if self.has_exact_lag else [a for a in self.arms if a not in self.exact_lags]
        notes = [*self.about_exact_lag, *(self._notes_on_niceness() if timed else [])]
        if disturbed := self._disturbed():
            advised = not all(map(self.comparable, timed))
            alone = "No two trials of this experiment ran at the same time."
            together = "Other trials that run at the same time count as other processes."
            notes.append(
                "Trials excluded from speeds and costs because other processes disturbed too many "
                f"rounds: {'; '.join(disturbed)}. The "
                "percentage is the share of the machine's CPU time that other processes took. "
                f"{alone if self.one_by_one else together} A round is "
                f"disturbed if the share is above {DISTURBED_ABOVE:.0%}. {self._least_rounds()} If "
                f"fewer than half of an arm's seeds remain, the table shows {MARK} instead of its "
                f"speed, and {MARK} after its totals over all seeds, which are not comparable."
                f"{f' {ADVICE}' if advised else ''}"
            )
        several = self.seeds > 1
        left_out = [
            f"{trial.pace.disturbed} of {plural(trial.pace.rounds, 'round')} of {arm}"
            f"{f', seed {trial.seed}' if several else ''}"
            for arm, trials in self.arms.items()
            for trial in trials
            if trial.pace is not None and trial.pace.leaves_out_disturbed
        ]
        if left_out:
            notes.append(
                "Excluded from speed comparisons because other processes used the machine: "
                f"{'; '.join(left_out)}."
            )
        if counted := self.counts_disturbed:
            notes.append(f"{COUNTED}: {counted}")
        if left_out or counted:
            whose = "The wall-clock time and device-hours of the remaining trials include"
            own = "Wall-clock time and device-hours include these"
            notes.append(f"{whose if disturbed else own} disturbed rounds.")
        return notes

    def _undisturbed(self) -> list[str]:
        """Return a sentence if the load was measured and no process disturbed a timed round."""
        trials = [trial for own in self.arms.values() for trial in own]
        paces = [trial.pace for trial in trials if trial.load_is_known]
        if len(paces) < len(trials) or any(pace is None or pace.disturbed for pace in paces):
            return []
        alone = ", and no two trials ran at the same time" if self.one_by_one else ""
        return [
            f"In no round did other processes take more than {DISTURBED_ABOVE:.0%} of the "
            f"machine's CPU time{alone}."
        ]

    @property
    def evaluation_times(self) -> tuple[float, float] | None:
        """The least and the most seconds that trials spent on equal evaluations.

        None if the evaluations were not equal, or if they took about equally long. Also None with
        several seeds, because the intervals of speed-ups then cover changes in the machine's speed.
        Trials whose speed is not compared do not count.
        """
        arms = [arm for arm in self.arms if self.comparable(arm)]
        trials = [trial for arm in arms for trial in self.arms[arm]]
        alike = {(t.evaluated_with, len(t.rewards), t.complete) for t in trials}
        lengths = [
            (first + last) / 2
            for arm in arms
            for change in self.changes.get(arm, ())
            if change.quantity is changes.LENGTH
            for first, last in zip(change.before, change.after, strict=True)
            if first and last
        ]
        same_work = len(alike) == 1 and len(lengths) == len(trials)
        if self.seeds > 1 or not same_work or max(lengths) > (1 + EQUAL_WORK) * min(lengths):
            return None
        least, most = (f(trial.eval_s for trial in trials) for f in (min, max))
        return (least, most) if 0 < (1 + EQUAL_WORK) * least < most else None

    def machine_explains(self, arm: str, ratio: float) -> bool:
        """Return True if the machine's speed can explain how an arm's speed differs.

        It can, if equal evaluations of the arm and of the baseline differ in speed as well, by at
        least as much and in the same direction.

        Args:
            arm: The arm.
            ratio: The arm's samples per second, or per device-hour, relative to the baseline.
        """
        if self.evaluation_times is None or self.baseline is None:
            return False
        own, base = (
            statistics.fmean(trial.eval_s for trial in self.arms[each])
            for each in (arm, self.baseline)
        )
        return 1 < ratio <= base / own or base / own <= ratio < 1

    def _speed_of_evaluations(self) -> list[str]:
        """If equal evaluations took different times, say so, and explain the mark in the list."""
        if self.evaluation_times is None:
            return []
        least, most = self.evaluation_times
        return [
            f"Evaluations did the same work in all trials, but took {least:.1f} to {most:.1f} s, "
            "because the machine's speed changed from trial to trial. Below, a clear difference in "
            "speed between two arms is marked if it is not larger than the difference between "
            f"the evaluations of these two arms: “{EXPLAINED}”, and {EXPLAINED_MARK} in tables."
        ]

    def _least_rounds(self) -> str:
        """Say how many rounds of a trial must be undisturbed."""
        rounds = [t.pace.rounds for own in self.arms.values() for t in own if t.pace is not None]
        said = []
        if any(own >= LEAST_ROUNDS for own in rounds):
            said.append(
                f"At least half of a trial's rounds, and at least {LEAST_ROUNDS}, must be "
                "undisturbed."
            )
        if any(own < LEAST_ROUNDS for own in rounds):
            said.append(
                f"In a trial of fewer than {LEAST_ROUNDS} rounds, all rounds must be undisturbed."
            )
        return " ".join(said)

    def _notes_on_niceness(self) -> list[str]:
        nice: dict[float, list[str]] = {}
        for arm, trials in self.arms.items():
            if niceness := max((trial.niceness for trial in trials), default=0.0):
                nice.setdefault(niceness, []).append(arm)
        return [
            f"The actors of {', '.join(arms)} ran at niceness {niceness:g}, so any ordinary "
            "process on the machine had priority over them. To compare speeds, start Ray with "
            "RAY_worker_niceness=0 and without `nice`."
            for niceness, arms in nice.items()
        ]

    def seeds_used(self, own: Contrast) -> str:
        """Return text such as `2 of 3 seeds`; empty if the contrast rests on all seeds."""
        used = len(own.seeds)
        return f"{used} of {self.seeds} seeds" if used < self.seeds else ""

    def _row(self, arm: str, trials: Sequence[TrialSummary]) -> tuple[str, ...]:
        length = next(c for c in self.changes[arm] if c.quantity is changes.LENGTH)
        comparable = self.comparable(arm)
        doubt = "" if comparable else f" {MARK}"
        mark = f" {COUNTED}" if self.counts(arm) else ""
        cells = (
            arm,
            show([t.rounds for t in trials], "{:.0f}"),
            show([t.samples for t in trials], "{:.0f}"),
            show(self.totals(arm, lambda t: t.wall_clock_s), "{:.1f}") + doubt,
            show(self.rates(arm), rate) + mark if comparable else MARK,
            self._ratio(arm, self.speed),
            self._ratio(arm, self.cost),
            show(self.totals(arm, lambda t: t.device_hours), "{:.4f}") + doubt,
            ends([t.first for t in trials], [t.last for t in trials], "{:.3f}"),
            ends(length.before, length.after, length.quantity.form),
            show([t.reference_nll for t in trials], "{:.2f}"),
            show([t.largest_lag for t in trials], "{:.0f}"),
            show([t.eval_s for t in trials], "{:.1f}"),
            show([t.checkpoint_s for t in trials], "{:.1f}"),
        )
        by_title = dict(zip(HEADER, cells, strict=True))
        return tuple(by_title[title] for title in self.header)

    def _ratio(self, arm: str, contrasts: Mapping[str, Contrast]) -> str:
        if arm == self.baseline:
            return "1.00x" if self.has_usable_baseline else MARK
        if arm in self.not_comparable:
            return MARK
        if arm not in contrasts:
            return "-"
        own = contrasts[arm]
        interval = own.shown_interval("{:.2f}")
        between = f" ({interval})" if interval else ""
        mark = f" {COUNTED}" if own.counted_disturbed else ""
        return f"{own.value:.2f}x{between}{mark}"


def compare(
    trials: Sequence[TrialRecord],
    not_begun: Sequence[tuple[str, int]] = (),
    preferred: str | None = None,
) -> Comparison:
    """Compare the arms of these trials, leaving out trials without a finished round.

    Args:
        trials: The trials that have begun.
        not_begun: Arm and seed of the planned trials that have not begun.
        preferred: The baseline, once it has a timed round. None means `BASELINE`.
    """
    preferred = preferred or BASELINE
    records: dict[str, list[TrialRecord]] = {}
    for trial in trials:
        if trial.rows:
            records.setdefault(trial.arm, []).append(trial)
    arms = {
        arm: [summary for trial in own if (summary := summarise_trial(trial)) is not None]
        for arm, own in records.items()
    }
    timed = [arm for arm in arms if any(trial.pace is not None for trial in arms[arm])]
    alone = Comparison(
        arms=arms,
        baseline=None,
        speed={},
        cost={},
        not_comparable={},
        changes={arm: changes.of_arm(own) for arm, own in records.items()},
        lineage=lineage([trial for own in records.values() for trial in own if trial.member]),
    )
    baseline = preferred if preferred in timed else next(iter(timed), None)
    waiting = {t.config.arm for t in trials if not t.rows and not t.failed}
    planned = waiting | {arm for arm, _ in not_begun}
    awaited = preferred if preferred in planned and preferred not in timed else None
    alone = replace(alone, awaited=awaited)
    if baseline is None:
        return alone
    found = relative_to(alone, records, baseline)
    return replace(found, on_equal_devices=on_equal_devices(found.speed, baseline, records))


def relative_to(
    comparison: Comparison, records: Mapping[str, Sequence[TrialRecord]], baseline: str
) -> Comparison:
    """Repeat the comparison of speed and cost with another baseline.

    An arm with an exact lag has no speed and no cost, because its lag saves no time.

    Args:
        comparison: The comparison to repeat.
        records: The trials by arm.
        baseline: The arm to compare with.
    """
    speed, cost, not_comparable = {}, {}, {}
    exact = comparison.exact_lags
    others = [arm for arm in comparison.arms if arm != baseline and arm not in exact]
    for arm in () if baseline in exact else others:
        found = speed_up(records[arm], records[baseline])
        if isinstance(found, NotComparable):
            not_comparable[arm] = found.why
        elif found is not None:
            speed[arm] = found
            base, own = records[baseline][0].config, records[arm][0].config
            if resources.uses_gpus(own) == resources.uses_gpus(
                base
            ):  # GPU-hours and core-hours have no ratio
                cost[arm] = found.times(resources.devices(base) / resources.devices(own))
    return replace(
        comparison, baseline=baseline, speed=speed, cost=cost, not_comparable=not_comparable
    )


def on_equal_devices(
    speeds: Mapping[str, Contrast], baseline: str, records: Mapping[str, Sequence[TrialRecord]]
) -> list[str]:
    """For each number of devices above the baseline's, compare the fastest arm with the others.

    Args:
        speeds: The speeds relative to the baseline, by arm. Only these arms are compared.
        baseline: The arm that the speeds are relative to.
        records: The trials by arm.

    Returns:
        For each number of devices, a sentence about the arms that are clearly faster than the
        baseline, and a comparison of the fastest of them with the fastest other arms.
    """
    configs = {arm: records[arm][0].config for arm in (baseline, *speeds)}
    on_gpus = resources.uses_gpus(configs[baseline])
    shares = {
        arm: resources.devices(config) / resources.devices(configs[baseline])
        for arm, config in configs.items()
        if resources.uses_gpus(config) is on_gpus  # GPUs and CPUs have no ratio
    }
    by_share: dict[str, list[str]] = {}
    for arm in sorted(speeds.keys() & shares.keys(), key=lambda a: speeds[a].value, reverse=True):
        # Rounded, because three generators together have slightly fewer CPUs than one generator.
        by_share.setdefault(f"{shares[arm]:.3g}", []).append(arm)
    said = []
    for share, arms in by_share.items():
        faster = [arm for arm in arms if speeds[arm].clearly(more=True)]
        if not faster or float(share) <= 1:
            continue
        verb = "reserves" if len(faster) == 1 else "reserve"
        kind = "GPUs" if on_gpus else "CPUs"
        said.append(f"{joined(faster)} {verb} {share} times as many {kind} as {baseline}.")
        fastest = faster[0]
        others = [arm for arm in arms if arm != fastest][:MOST_OTHERS]
        if sides := _compared(fastest, others, records):
            said.append(f"Among the arms that reserve as many as {fastest}, it is {sides}.")
    return said


def _compared(arm: str, others: Sequence[str], records: Mapping[str, Sequence[TrialRecord]]) -> str:
    """Return `clearly faster than …, and not clearly faster than …`; empty without a comparison."""
    sides: dict[str, list[str]] = {}
    for other in others:
        found = speed_up(records[arm], records[other])
        if not isinstance(found, Contrast):
            continue
        side = "clearly " if found.told_apart else "not clearly "
        side += "slower" if found.clearly(more=False) else "faster"
        interval = found.shown_interval("{:.2f}x")
        figures = [written(found.value, "{:.2f}x")]
        figures += [f"{LEVEL:.0%} interval: {interval}"] if interval else []
        figures += ["disturbed rounds included"] if found.counted_disturbed else []
        sides.setdefault(side, []).append(f"{other} ({'; '.join(figures)})")
    return ", and ".join(f"{side} than {joined(named)}" for side, named in sides.items())


def comparable_by_kl(arms: Mapping[str, Sequence[TrialRecord]]) -> str:
    """Name the arms that can be compared by the KL to the reference; empty if all arms can."""
    alike: dict[tuple[int, int, int], list[str]] = {}
    for arm, trials in arms.items():
        own = trials[0].config
        alike.setdefault((own.lag, own.k, own.buffer_capacity), []).append(arm)
    if len(alike) < 2:
        return ""
    same = [f"between {joined(group)}" for group in alike.values() if len(group) > 1]
    if not same:
        return f" {NONE_BY_KL}"
    between = ", and ".join(same)
    return f" Compare this KL only {between}, which agree in lag, k and replay."


def table(comparison: Comparison) -> str:
    """Return the comparison as text, with its footnotes."""
    if not comparison.arms:
        return "no trial has finished a round"
    rows = align([comparison.header, *comparison.rows()])
    moved = ["Side effects of training (the report lists every quantity):"]
    moved += [f"- {line}." for line in changes.moved_in(comparison.changes)]
    more = "\n".join(
        textwrap.fill(line, 100, break_on_hyphens=False, subsequent_indent="  ") for line in moved
    )
    note = [comparison.note()] if comparison.note() else []
    members = (
        [textwrap.fill(SAID, 100), align([LINEAGE, *comparison.lineage])]
        if comparison.lineage
        else []
    )
    return "\n".join([*note, rows, comparison.footnote(), *members, more])


def median(values: Sequence[float | None]) -> float | None:
    """Return the median of the known values, or None if there are none."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def show(
    values: Sequence[float | None],
    form: str | Callable[[float], str],
    middle: Callable[[Sequence[float]], float] = statistics.median,
    label: str = "",
) -> str:
    """Return the median as text, with the minimum and the maximum if they differ when formatted.

    Args:
        values: The values; None if unknown.
        form: A format, or a function that formats one value.
        middle: The function to use in place of the median.
        label: Text in front of the minimum.
    """
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    shown, low, high = (
        written(value, form) if isinstance(form, str) else form(value)
        for value in (middle(known), min(known), max(known))
    )
    return shown if low == high else f"{shown} ({label}{low} to {high})"


def ends(before: Sequence[float | None], after: Sequence[float | None], form: str) -> str:
    """Return the medians before and after training, as text: `0.366 -> 0.911 (0.902 to 0.915)`.

    As soon as any trial has a value after training, the medians exclude trials that have none.
    """
    measured = [b for b, a in zip(before, after, strict=True) if a is not None]
    first, last = show(measured or before, form), show(after, form)
    return "-" if first == last == "-" else f"{first} -> {last}"
