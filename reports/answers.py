"""What a space asks, answered arm by arm: the figures that its question is about, side by side.

Every cell is the median over the seeds, with the least and the most; a difference is between
trials of the same seed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reports.experiment import ExperimentRecord, TrialFiles, TrialRecord
from reports.summary import Comparison, median, show, summarise_trial

Value = Callable[[TrialRecord, TrialFiles], float | None]


@dataclass(frozen=True, kw_only=True)
class Column:
    name: str  # in files
    title: str  # in tables
    form: str
    value: Value


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A table, what else is to be said, and how to read it."""

    arms: Mapping[str, Mapping[str, Sequence[float | None]]]  # arm -> column -> one a seed
    columns: Sequence[Column]
    said: Sequence[str]
    note: str

    @property
    def header(self) -> tuple[str, ...]:
        return ("arm", *(column.title for column in self.columns))

    def rows(self) -> list[tuple[str, ...]]:
        return [
            (arm, *(show(values[column.name], column.form) for column in self.columns))
            for arm, values in self.arms.items()
        ]


def _last(name: str) -> Value:
    return lambda trial, files: trial.last(name)


def _mean(name: str) -> Value:
    def value(trial: TrialRecord, files: TrialFiles) -> float | None:
        column = trial.column(name)
        return statistics.fmean(column) if column else None

    return value


def _middle(name: str) -> Value:
    return lambda trial, files: median(trial.column(name))


def _milliseconds(name: str) -> Value:
    def value(trial: TrialRecord, files: TrialFiles) -> float | None:
        seconds = median(trial.column(name))
        return None if seconds is None else 1000 * seconds

    return value


def _late(name: str) -> Value:
    return lambda trial, files: trial.late_mean(name)


def _samples_per_s(trial: TrialRecord, files: TrialFiles) -> float | None:
    summary = summarise_trial(trial)
    return summary.samples_per_s if summary is not None and summary.comparable else None


def _drift_from_sampler(trial: TrialRecord, files: TrialFiles) -> float | None:
    """KL(sampler || policy). The rollouts are the sampler's, so k1 with its sign turned is its
    unbiased estimate; k3, an estimate for samples of the policy, is its tail's."""
    middle = median(trial.column("kl/behaviour_nats"))
    return None if middle is None else 0.0 - middle  # no negative zero


def _of_bound(trial: TrialRecord, files: TrialFiles) -> float | None:
    mean = _mean("lag/mean")(trial, files)
    return None if mean is None or trial.config.lag == 0 else mean / trial.config.lag


def _never_trained(trial: TrialRecord, files: TrialFiles) -> float | None:
    """Of the groups sampled: dropped, or still waiting at the end."""
    trained, requested = trial.last("count/trained"), trial.last("count/requested")
    return None if trained is None or not requested else 1 - trained / requested


def _early(trial: TrialRecord, files: TrialFiles) -> float | None:
    """Held-out reward where it was measured nearest to `EARLY` of the rounds."""
    place = EARLY * trial.config.rounds
    measured = [(abs(round_ - place), reward) for round_, reward, _ in trial.evaluated() if round_]
    return min(measured)[1] if measured else None


EARLY = 0.25
REWARD = Column(
    name="reward", title="held-out reward", form="{:.3f}", value=_last("reward/eval_mean")
)
EARLY_REWARD = Column(name="early_reward", title="after a quarter", form="{:.3f}", value=_early)
AGAINST = "against"  # the column of the differences, behind the reward
# Not seconds: those of trials that were cut short compare with nothing.
SPEED = Column(name="samples_per_s", title="samples/s", form="{:.0f}", value=_samples_per_s)
DRIFT = (
    Column(
        name="kl_reference_nats",
        title="KL to reference",
        form="{:.1f}",
        value=_late("kl/reference_nats"),
    ),
    Column(
        name="reference_nll_nats",
        title="reference NLL",
        form="{:.2f}",
        value=_late("response/reference_nll_nats"),
    ),
)
OFF_POLICY = (
    Column(
        name="kl_sampler_nats",
        title="KL from sampler",
        form="{:.2g}",
        value=_drift_from_sampler,
    ),
    Column(name="clip_fraction", title="clipped", form="{:.1%}", value=_mean("loss/clip_fraction")),
)
GRADIENT_STEPS = Column(
    name="gradient_steps", title="gradient steps", form="{:.0f}", value=_last("version/learner")
)
LAG = (
    Column(name="lag", title="mean lag", form="{:.2f}", value=_mean("lag/mean")),
    Column(name="lag_of_bound", title="of the bound", form="{:.0%}", value=_of_bound),
    Column(
        name="lag_max",
        title="largest",
        form="{:.0f}",
        value=lambda trial, files: max(trial.column("lag/max"), default=None),
    ),
)
REUSE = (
    Column(
        name="uses",
        title="uses of a trained group",
        form="{:.2f}",
        value=lambda trial, files: files.uses,
    ),
    Column(name="age", title="mean age", form="{:.2f}", value=_mean("buffer/age_mean")),
    Column(name="never_trained", title="never trained", form="{:.0%}", value=_never_trained),
)
SHARES = tuple(
    Column(
        name=f"{stage}_share", title=stage, form="{:.0%}", value=_middle(f"time/{stage}_fraction")
    )
    for stage in ("rollout", "optimize", "reference", "sync")
)

SYNC = (
    Column(name="sync_ms", title="sync, ms", form="{:.1f}", value=_milliseconds("time/sync_s")),
    Column(
        name="sync_round_share",
        title="of the round",
        form="{:.2%}",
        value=_middle("time/sync_fraction"),
    ),
    Column(
        name="first_sync_ms",
        title="first sync, ms",
        form="{:.0f}",
        value=_milliseconds("sync/first_s"),
    ),
    Column(name="gb_per_s", title="GB/s", form="{:.2f}", value=_middle("sync/gb_per_s")),
)

# What each question is about, between the reward and the shares of the stages.
COLUMNS: Mapping[str, Sequence[Column]] = {
    "async_vs_sync": (SPEED, *LAG, *OFF_POLICY, *DRIFT),
    "gradient_steps": (GRADIENT_STEPS, SPEED, *OFF_POLICY, *DRIFT),
    "lag": (*LAG, SPEED, *OFF_POLICY, *DRIFT),
    "replay": (*REUSE, SPEED, *OFF_POLICY, *DRIFT),
    "transport": (*SYNC, SPEED, *LAG),
}


def answer(
    experiment: ExperimentRecord, comparison: Comparison, files: Mapping[str, TrialFiles]
) -> Answer | None:
    """None where the experiment is of no space that asks something, or has one arm alone."""
    columns = COLUMNS.get(str(experiment.description.get("space")))
    arms = experiment.complete_arms  # what was stopped early compares with nothing
    if columns is None or len(arms) < 2:
        return None
    # The arm that everything is compared with, as in the table of costs; else the first.
    base = comparison.baseline or next(iter(arms))
    rewards = {trial.config.seed: trial.last("reward/eval_mean") for trial in arms[base]}

    def against(trial: TrialRecord, files: TrialFiles) -> float | None:
        own, other = trial.last("reward/eval_mean"), rewards.get(trial.config.seed)
        return None if own is None or other is None else own - other

    difference = Column(name=AGAINST, title=f"against {base}", form="{:+.3f}", value=against)
    every = (REWARD, difference, EARLY_REWARD, *columns, *SHARES)
    values = {
        arm: {column.name: [column.value(t, files[t.name]) for t in trials] for column in every}
        for arm, trials in arms.items()
    }
    return Answer(
        arms=values,
        columns=every,
        said=_not_available(experiment.description),
        note="Trials that have run all their rounds; medians over the seeds, least and most "
        "below; differences are between trials of one seed. The quarter is of the rounds, as near "
        "as it was evaluated. KL to the reference and NLL are those of the last eighth of the "
        "rounds, in nats a response and a token; KL from the sampler, KL(sampler || policy) after "
        "the last gradient step, and the shares of the stages are of the median round, clipped "
        "tokens, lag and age means over the rounds. Samples/s leave out trials that other work on "
        "the machine disturbed.",
    )


def _not_available(description: Mapping[str, Any]) -> list[str]:
    missing = description.get("not_available") or {}
    return [f"Not available here: {arm} ({reason})." for arm, reason in missing.items()]
