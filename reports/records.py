"""An experiment and its trials, as read from disk."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from grpo_trainable.config import GRPOConfig
from grpo_trainable.config.loss import NEVER_CLIPS
from grpo_trainable.storage.last_policy import PolicyNotSaved
from reports.pace import Pace, pace_of
from search_spaces.search_space import Question

# Limits of float32, in which trials compute. Larger numbers could overflow when figures combine
# them.
MIN_NUMBER, MAX_NUMBER = 1e-45, 3.5e38
CLIPPED = "loss/clip_fraction"
NO_ERROR = "(error.txt is empty)"
BY_TUNE = "a scheduler or stopper"  # cause that ends trials early


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Consecutive rounds in which a trial's settings stayed the same.

    PBT begins a stretch by making the trial copy the policy and the settings of another trial.
    """

    first: int  # first round
    config: GRPOConfig
    copied_from: str | None  # name of the copied trial; None in the first stretch, or if unknown


@dataclass(frozen=True, kw_only=True)
class TrialRecord:
    """Trial as read from its directory."""

    name: str
    directory: Path
    # Names of the directories between the experiment's and the trial's directory. Empty for the
    # first run; ("extensions", "1") for the first extension.
    run: Sequence[str] = ()
    params: Mapping[str, Any]  # params.json as it was written
    config: GRPOConfig  # the latest settings, but with the arm and the seed of the first round
    stretches: Sequence[Stretch]  # in order; empty if the rows do not have usable settings
    arm: str  # label of the config's arm, plus the settings in which trials of that arm differ
    tune_name: str | None = None  # the name that Tune gave the trial, if its settings name no arm
    member: bool = False  # True if PBT may make the trial copy other trials of the experiment
    # Groups in `count/trained` that copied trials, but not this one, have trained on; None if
    # unknown.
    groups_of_donors: float | None = 0.0
    rows: Sequence[Mapping[str, float]]  # one row per round, in order, with finite numbers only
    ended: bool  # True if the last row says that no round follows
    error: str | None  # the last line of error.txt, which Tune keeps even if a retry succeeds
    error_at: float | None  # time of the last failure, in seconds since 1970
    has_trace: bool
    problems: Sequence[str]  # one line for each thing that could not be read

    @property
    def root(self) -> Path:
        """Directory of the experiment."""
        return self.directory.parents[len(self.run)]

    @property
    def path(self) -> tuple[str, ...]:
        """The components of the trial's path below the experiment's directory."""
        return (*self.run, self.name)

    @property
    def label(self) -> str:
        """The name of the trial in messages: `arm/seed`, or the name that Tune gave it.

        For a member of a population, `arm` is the arm in the member's own settings.
        """
        arm = self.config.arm if self.member else self.arm
        return self.tune_name or f"{arm}/{self.config.seed}"

    @property
    def round(self) -> int:
        """Number of rounds trained so far."""
        return int(self.rows[-1]["training_iteration"]) if self.rows else 0

    def round_before(self, round_: int) -> int:
        """Return the last round before `round_` that has a row, or 0 if there is none."""
        earlier = (int(row["training_iteration"]) for row in self.rows)
        return max((n for n in earlier if n < round_), default=0)

    def row_of(self, round_: int) -> Mapping[str, float] | None:
        """Return the row of a round, or None if the round has no row."""
        return next((row for row in self.rows if row["training_iteration"] == round_), None)

    def groups_after(self, round_: int) -> float | None:
        """Count the groups trained on before a round ended; None if the round has no row."""
        if round_ == 0:
            return 0.0
        row = self.row_of(round_)
        return None if row is None else row.get("count/trained")

    @property
    def groups(self) -> float | None:
        """Number of groups that the trial itself has trained on, or None if it is unknown."""
        trained = self.last("count/trained")
        if trained is None or self.groups_of_donors is None:
            return None
        return trained - self.groups_of_donors

    @property
    def complete(self) -> bool:
        """Return True if the trial has run all its rounds."""
        return self.round >= self.config.rounds

    @property
    def done(self) -> bool:
        """Return True if the trial has ended and its last policy is saved.

        The policy is saved after the row of the last round is written, so the save can still fail.
        On a full disk Tune leaves error.txt empty.
        """
        unsaved = self.error == NO_ERROR or PolicyNotSaved.__name__ in str(self.error)
        return self.ended and not (self._failed_last and unsaved)

    @property
    def failed(self) -> bool:
        """Return True if the trial ended with a failure."""
        return not self.done and self._failed_last

    @property
    def _failed_last(self) -> bool:
        """Return True if a failure came after the last row.

        Tune keeps the error of a trial that it restarts. So an error can be older than the last
        row.
        """
        if self.error is None:
            return False
        reported = self.last("timestamp")
        return reported is None or self.error_at is None or reported <= self.error_at

    @property
    def copied(self) -> bool:
        """Return True if the trial has copied another trial."""
        return len(self.stretches) > 1

    @property
    def finished(self) -> bool:
        """Return True if the trial has run all its rounds and has ended."""
        return self.done and self.complete

    @property
    def stopped_by(self) -> str | None:
        """The cause that ended the trial before its last round, or None if nothing did."""
        if not self.done or self.complete:
            return None
        limit = self.config.callbacks.kl_stop
        drifted = limit is not None and (self.last("kl/reference_nats") or 0.0) > limit
        return f"callbacks.kl_stop={limit:g}" if drifted else BY_TUNE

    @property
    def status(self) -> str:
        """State of the trial, as a text for the user."""
        reached = f"round {self.round} of {self.config.rounds}"
        if self.finished:
            return "finished"
        if self.stopped_by is not None:
            return f"stopped by {self.stopped_by} after {reached}"
        if self.failed:
            return f"failed after {reached}: {self.error}"
        before = f"; earlier error: {self.error}" if self.error is not None else ""
        return f"still running or interrupted: {reached}{before}" if self.rows else "no round yet"

    @cached_property
    def pace(self) -> Pace | None:
        """Speed of the trial; None if its rows have no seconds or no responses."""
        return pace_of(self.rows, self.config)

    @property
    def samples_per_s(self) -> float | None:
        """Responses per second; None if unknown, or if the trial is too disturbed to compare."""
        if self.pace is None or not self.pace.comparable:
            return None
        return self.pace.samples_per_s

    def has(self, metric: str) -> bool:
        """Return False if the settings rule out what a metric counts, so that it is always 0."""
        loss = self.config.loss
        if metric == CLIPPED:
            return loss.type not in NEVER_CLIPS
        return metric != "loss/weights_bounded_fraction" or loss.importance_cap is not None

    def column(self, name: str) -> list[float]:
        """Return the values of a metric in the order of rounds, without rounds that lack it."""
        return [row[name] for row in self.rows if name in row]

    def last(self, name: str) -> float | None:
        """Return the value of a metric in the last row, or None."""
        return self.rows[-1].get(name) if self.rows else None

    def late_mean(self, name: str) -> float | None:
        """Return the mean of a metric over the last eighth of the trial's rounds.

        The window is a share of the rounds, not a fixed number of rounds. So arms with few large
        rounds are judged on as many samples as other arms.
        """
        values = self.late(name)
        return statistics.fmean(values) if values else None

    def late(self, name: str) -> list[float]:
        """Return the values of a metric in the last eighth of the trial's rounds."""
        late = self.round - max(1, self.config.rounds // 8)
        return [row[name] for row in self.rows if row["training_iteration"] > late and name in row]

    @property
    def reward_after(self) -> float | None:
        """Held-out reward at the latest evaluation after round 0, or None if there is none yet.

        Until the next evaluation, every row repeats the latest reward.
        """
        return None if self.last("eval/round") == 0 else self.last("reward/eval_mean")

    def evaluated(self) -> Iterator[tuple[int, float, Mapping[str, float]]]:
        """Yield (round, held-out reward, row) of each evaluation; round 0 has an empty row.

        Most rows only repeat the latest evaluation.
        """
        first = self.last("reward/eval_first")
        if first is not None:
            yield 0, first, {}
        for row in self.rows:
            if row.get("eval/round") == row["training_iteration"] and "reward/eval_mean" in row:
                yield int(row["training_iteration"]), row["reward/eval_mean"], row


def error_of_mean(errors: Sequence[float]) -> float:
    """Compute the standard error of a mean from its terms' standard errors; 0 without terms."""
    return math.hypot(*errors) / max(1, len(errors))


def count_stopped(trials: Sequence[TrialRecord]) -> list[str]:
    """Count the trials that ended early, by cause: `2 stopped by a scheduler or stopper`."""
    causes = Counter(trial.stopped_by for trial in trials if trial.stopped_by is not None)
    return [f"{count} stopped by {cause}" for cause, count in causes.items()]


@dataclass(frozen=True, kw_only=True)
class Extension:
    """Trials that `--extend` added to an experiment."""

    started: str | None  # ISO time
    planned: Sequence[tuple[str, int]]  # arm and seed of each trial


@dataclass(frozen=True, kw_only=True)
class ExperimentRecord:
    """Experiment as read from its directory."""

    directory: Path
    own_tuner: bool = False  # True without experiment.json: a user's own Tuner ran the trials
    description: Mapping[str, Any]  # experiment.json; empty if it is missing
    question: Question | None  # None if the experiment asks no question
    # Sorted by arm, in the order of the question's arms, and then by seed. The trials of a user's
    # own Tuner are sorted by the numbers that Tune gave them, or by the times of their first rows.
    trials: Sequence[TrialRecord]
    not_begun: Sequence[tuple[str, int]]  # arm and seed of planned trials without a directory
    # Number of trials of a user's own Tuner that have not begun; None if unknown.
    waiting: int | None = 0
    several_runs: bool = False  # True if a user's own Tuner ran several times under this name
    extensions: Sequence[Extension] = ()
    problems: Sequence[str]

    @property
    def all_done(self) -> bool:
        """Return True if every planned trial has ended, either after its last round or earlier."""
        left = self.not_begun or self.waiting != 0
        return not left and all(trial.done for trial in self.trials)

    @property
    def with_policy(self) -> TrialRecord | None:
        """The first completed trial that trained a language model, or None."""
        trained = (t for t in self.trials if t.done and t.config.model.env is None)
        return next(trained, None)

    @property
    def seeds_before_addition(self) -> int:
        """Number of seeds before the last extension that added seeds; 0 if no extension did."""
        added = {pair for extension in self.extensions for pair in extension.planned}
        every = {(t.config.arm, t.config.seed) for t in self.trials} | {*self.not_begun}
        seeds = {seed for _, seed in every - added}
        before = 0
        for extension in self.extensions:
            new = {seed for _, seed in extension.planned} - seeds
            before = len(seeds) if new else before
            seeds |= new
        return before

    @property
    def arms(self) -> dict[str, list[TrialRecord]]:
        """Trials with at least one row, by arm."""
        arms: dict[str, list[TrialRecord]] = {}
        for trial in self.trials:
            if trial.rows:
                arms.setdefault(trial.arm, []).append(trial)
        return arms

    @property
    def complete_arms(self) -> dict[str, list[TrialRecord]]:
        """Complete trials, by arm, for each arm in `arms`.

        The arms have trained on equal numbers of samples only if `--samples` set their rounds.
        """
        return {arm: [t for t in trials if t.complete] for arm, trials in self.arms.items()}
