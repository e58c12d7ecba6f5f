"""The difference of an arm from the baseline in speed and reward, and whether it exceeds noise.

Runs are paired by seed. Rounds in which other work took too much of the machine
(`grpo_trainable.noise`) are left out of speeds while enough others remain.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from grpo_trainable.noise import DISTURBED_ABOVE
from reports.intervals import (
    LEAST_ROUNDS,
    Estimate,
    Spread,
    over_prompts,
    over_rounds,
    over_seeds,
    seeds_needed,
)
from reports.records import TrialRecord


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The timed rounds of a trial, and those among them that its speed is computed from."""

    seconds: Sequence[float]  # of the rounds that count; evaluation and checkpoints subtracted
    responses: Sequence[float]
    rounds: int  # timed
    planned: int  # rounds of the whole trial
    disturbed: int
    others: float | None  # mean share of the machine that other work took in disturbed rounds

    @property
    def comparable(self) -> bool:
        """Whether at least half of the rounds, and at least `LEAST_ROUNDS` where there are as many,
        were undisturbed."""
        clean = self.rounds - self.disturbed
        return 2 * clean >= self.rounds and clean >= min(LEAST_ROUNDS, self.rounds)

    @property
    def enough(self) -> bool:
        """Whether the trial has enough rounds to stand for its seed."""
        return self.rounds >= min(LEAST_ROUNDS, self.planned)

    @property
    def samples_per_s(self) -> float:
        return sum(self.responses) / sum(self.seconds)

    @property
    def doubt(self) -> str:
        return (
            f"other work took {self.others or 0.0:.0%} of the machine in {self.disturbed} of "
            f"{self.rounds} rounds"
        )


def pace(trial: TrialRecord) -> Pace | None:
    """The pace of a trial; None where its rows do not tell how long a round took."""
    timed: list[tuple[float, float, float]] = []  # seconds, responses, share of others
    wall_clock_s = trained = 0.0
    for row in trial.rows:
        if not row.get("time/wall_clock_s") or "count/trained" not in row:
            trained = row.get("count/trained", trained)
            continue
        responses = (row["count/trained"] - trained) * trial.config.rollout.group_size
        others = row.get("time/disturbed_fraction", 0.0)
        timed.append((row["time/wall_clock_s"] - wall_clock_s, responses, others))
        wall_clock_s, trained = row["time/wall_clock_s"], row["count/trained"]
    disturbed = [others for _, _, others in timed if others > DISTURBED_ABOVE]
    every = Pace(
        seconds=[seconds for seconds, _, _ in timed],
        responses=[responses for _, responses, _ in timed],
        rounds=len(timed),
        planned=trial.config.rounds,
        disturbed=len(disturbed),
        others=sum(disturbed) / len(disturbed) if disturbed else None,
    )
    if every.comparable:
        clean = [round_ for round_ in timed if round_[2] <= DISTURBED_ABOVE]
        every = replace(
            every,
            seconds=[seconds for seconds, _, _ in clean],
            responses=[responses for _, responses, _ in clean],
        )
    return every if sum(every.seconds) > 0 and sum(every.responses) > 0 else None


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """The comparison of an arm with the baseline in one quantity."""

    value: float
    neutral: float  # the value of two equal arms: 1 for a ratio, 0 for a difference
    seeds: Sequence[int]  # seeds that the value rests on
    interval: Estimate | None = None
    spread: Spread | None = None  # variance over the seeds; for a ratio, of its logarithm
    doubt: str | None = None  # why the value cannot be trusted

    @property
    def told_apart(self) -> bool | None:
        """Whether the interval excludes equality; None where there is no interval, or where the
        value cannot be trusted."""
        if self.interval is None or self.doubt is not None:
            return None
        return self.interval.apart_from(self.neutral)

    @property
    def more(self) -> bool:
        return self.value > self.neutral

    @property
    def seeds_needed(self) -> int | None:
        """The number of seeds that would tell a difference of this size in four of five
        experiments; None above `intervals.MOST_SEEDS`, or when it is unknown."""
        if self.spread is None:
            return None
        effect = math.log(self.value) if self.neutral else self.value
        return seeds_needed(effect, self.spread)

    def shown_interval(self, form: str, between: str) -> str:
        """The interval as text; empty where there is none."""
        if self.interval is None:
            return ""
        ends = (self.interval.low, self.interval.high)
        # The interval of a ratio over two seeds may be absurdly wide.
        low, high = (form.format(end) if end < 100 else "more than 100" for end in ends)
        return f"{low}{between}{high}"

    def times(self, factor: float) -> Contrast:
        """The same ratio after both arms have changed to another unit."""
        interval = self.interval and self.interval.times(factor)
        return replace(self, value=factor * self.value, interval=interval)


def speed_up(arm: Sequence[TrialRecord], base: Sequence[TrialRecord]) -> Contrast | None:
    """Responses a second over the baseline's: the geometric mean over the seeds that both were run
    with. None where they share none.

    A seed in which one of the two has hardly begun is left out while there are others. So is one in
    which one of the two was disturbed; when that leaves fewer than half of the seeds, all of them
    count and the value is not to be trusted.
    """
    own, other = _paces(arm), _paces(base)
    begun = [seed for seed in own if seed in other]
    if not begun:
        return None
    enough = [seed for seed in begun if own[seed].enough and other[seed].enough]
    shared = enough or begun
    sound = [seed for seed in shared if own[seed].comparable and other[seed].comparable]
    trusted = 2 * len(sound) >= len(shared)
    used = sound if trusted else shared
    logs = [math.log(own[seed].samples_per_s / other[seed].samples_per_s) for seed in used]
    log = spread = None
    if len(used) == 1:
        log = over_rounds(_rounds(own[used[0]]), _rounds(other[used[0]]))
    elif enough:
        log, spread = over_seeds(logs)
    return Contrast(
        value=math.exp(sum(logs) / len(logs)),
        neutral=1.0,
        seeds=used,
        interval=log and log.exp(),
        spread=spread,
        doubt=None if trusted else "; ".join(doubts([*arm, *base])),
    )


def doubts(trials: Sequence[TrialRecord]) -> list[str]:
    """Names each trial whose speed cannot be trusted, with the reason."""
    found = [(trial, pace(trial)) for trial in trials]
    return [
        f"{trial.arm}, seed {trial.config.seed}: {own.doubt}"
        for trial, own in found
        if own is not None and not own.comparable
    ]


def _paces(trials: Sequence[TrialRecord]) -> dict[int, Pace]:
    known = {trial.config.seed: pace(trial) for trial in trials}
    return {seed: found for seed, found in known.items() if found is not None}


def _rounds(found: Pace) -> tuple[Sequence[float], Sequence[float]]:
    return found.seconds, found.responses


def reward_difference(
    arm: Mapping[int, Mapping[str, float]], base: Mapping[int, Mapping[str, float]]
) -> Contrast | None:
    """Held-out reward over the baseline's. Each is seed -> prompt -> reward, the mean over the
    prompt's responses at the end. Seeds are paired, and so are the prompts that all of them have
    scored. None where they share nothing."""
    shared = [seed for seed in arm if seed in base and arm[seed].keys() & base[seed].keys()]
    if not shared:
        return None
    prompts = sorted(
        set.intersection(*(set(side[seed]) for side in (arm, base) for seed in shared))
    )
    if not prompts:
        return None
    differences = np.array([[arm[s][p] - base[s][p] for p in prompts] for s in shared])
    if len(prompts) == 1:
        return Contrast(value=float(differences.mean()), neutral=0.0, seeds=shared)
    interval, spread = over_prompts(differences)
    return Contrast(
        value=interval.value, neutral=0.0, seeds=shared, interval=interval, spread=spread
    )
