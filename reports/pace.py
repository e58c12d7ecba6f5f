"""How fast a trial was, judged by the rounds that no other work on the machine disturbed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from grpo_trainable.config import GRPOConfig
from grpo_trainable.telemetry.machine_load import DISTURBED_ABOVE
from grpo_trainable.text import plural
from reports.intervals import LEAST_ROUNDS


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The timed rounds of a trial, and those among them that its speed is computed from."""

    seconds: Sequence[float]  # the rounds that count, evaluation and checkpoints subtracted
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
        """Responses a second. Where the pace is not `comparable`, disturbed rounds are included."""
        return sum(self.responses) / sum(self.seconds)

    @property
    def disturbance(self) -> str:
        """What share of the machine others had, and how often: `40% in 12 of 16 rounds`."""
        return f"{self.others or 0.0:.0%} in {self._how_often}"

    @property
    def doubt(self) -> str:
        return f"other work took {self.others or 0.0:.0%} of the machine in {self._how_often}"

    @property
    def _how_often(self) -> str:
        return f"{self.disturbed} of {plural(self.rounds, 'round')}"


def pace_of(rows: Sequence[Mapping[str, float]], config: GRPOConfig) -> Pace | None:
    """The pace that a trial's rows tell; None where they do not say how long a round took."""
    timed: list[tuple[float, float, float]] = []  # seconds, responses, share of others
    wall_clock_s = trained = 0.0
    for row in rows:
        if not row.get("time/wall_clock_s") or "count/trained" not in row:
            trained = row.get("count/trained", trained)
            continue
        responses = (row["count/trained"] - trained) * config.rollout.group_size
        others = row.get("time/disturbed_fraction", 0.0)
        timed.append((row["time/wall_clock_s"] - wall_clock_s, responses, others))
        wall_clock_s, trained = row["time/wall_clock_s"], row["count/trained"]
    above = DISTURBED_ABOVE if config.callbacks.leave_out_disturbed else 1.0
    disturbed = [others for _, _, others in timed if others > above]
    every = Pace(
        seconds=[seconds for seconds, _, _ in timed],
        responses=[responses for _, responses, _ in timed],
        rounds=len(timed),
        planned=config.rounds,
        disturbed=len(disturbed),
        others=sum(disturbed) / len(disturbed) if disturbed else None,
    )
    if every.comparable:
        clean = [round_ for round_ in timed if round_[2] <= above]
        every = replace(
            every,
            seconds=[seconds for seconds, _, _ in clean],
            responses=[responses for _, responses, _ in clean],
        )
    return every if sum(every.seconds) > 0 and sum(every.responses) > 0 else None
