"""Speed of a trial, measured over the rounds that no other process disturbed.

With `callbacks.leave_out_disturbed=false`, all rounds count, and the report marks each speed that
includes disturbed rounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from grpo_trainable.config import GRPOConfig
from grpo_trainable.telemetry.machine_load import (
    DISTURBED_ABOVE,
    LEAST_ROUNDS,
    enough_undisturbed,
)
from grpo_trainable.text import plural


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Timed rounds of a trial, and the rounds that its speed is computed from."""

    # Seconds of each round that counts, without evaluation and checkpoints.
    seconds: Sequence[float]
    responses: Sequence[float]  # number of responses of each round that counts
    rounds: int  # number of timed rounds
    planned: int  # number of rounds of the whole trial
    disturbed: int  # number of disturbed rounds
    others: float | None  # mean share of the machine that other processes took in disturbed rounds
    keeps_disturbed: bool  # True if disturbed rounds count because the trial's settings say so

    @property
    def comparable(self) -> bool:
        """Return True if disturbed rounds count, or if enough rounds were undisturbed."""
        return self.keeps_disturbed or enough_undisturbed(self.rounds, self.disturbed)

    @property
    def counts_disturbed(self) -> bool:
        """Return True if the speed includes disturbed rounds because the settings say so."""
        return self.keeps_disturbed and self.disturbed > 0

    @property
    def leaves_out_disturbed(self) -> bool:
        """Return True if the speed leaves out disturbed rounds."""
        return self.comparable and not self.keeps_disturbed and self.disturbed > 0

    @property
    def enough(self) -> bool:
        """Return True if the trial has enough rounds to represent its seed."""
        return self.rounds >= min(LEAST_ROUNDS, self.planned)

    @property
    def samples_per_s(self) -> float:
        """Responses per second; includes disturbed rounds if the pace is not `comparable`."""
        return sum(self.responses) / sum(self.seconds)

    @property
    def disturbance(self) -> str:
        """Share of the machine that other processes took: `40% in 12 of 16 rounds`."""
        return f"{self.others or 0.0:.0%} in {self._how_often}"

    @property
    def doubt(self) -> str:
        """Reason why the speed cannot be trusted."""
        return f"other processes took {self.others or 0.0:.0%} of the machine in {self._how_often}"

    @property
    def _how_often(self) -> str:
        return f"{self.disturbed} of {plural(self.rounds, 'round')}"


def counted_disturbed(paces: Iterable[tuple[str, Pace | None]]) -> str:
    """Name the arms whose speed includes disturbed rounds: `sync: 8 of 8 rounds, 43%`.

    The percentage is the share of the machine that other processes took in the disturbed rounds.

    Args:
        paces: Pairs of an arm and the pace of one of its trials.

    Returns:
        The arms, or an empty string if no speed includes disturbed rounds.
    """
    kept: dict[str, list[Pace]] = {}
    for arm, pace in paces:
        if pace is not None and pace.keeps_disturbed:
            kept.setdefault(arm, []).append(pace)
    said = []
    for arm, own in kept.items():
        if disturbed := sum(pace.disturbed for pace in own):
            share = sum((pace.others or 0.0) * pace.disturbed for pace in own) / disturbed
            rounds = plural(sum(pace.rounds for pace in own), "round")
            said.append(f"{arm}: {disturbed} of {rounds}, {share:.0%}")
    return "; ".join(said)


def pace_of(rows: Sequence[Mapping[str, float]], config: GRPOConfig) -> Pace | None:
    """Return the pace of a trial, or None if its rows have no seconds or no responses.

    Args:
        rows: The rows of result.json.
        config: The settings of the trial.
    """
    # Seconds, responses, and the share of the machine that other processes took, for each round.
    timed: list[tuple[float, float, float]] = []
    wall_clock_s = trained = 0.0
    for row in rows:
        if not row.get("time/wall_clock_s") or "count/trained" not in row:
            trained = row.get("count/trained", trained)
            continue
        responses = (row["count/trained"] - trained) * config.rollout.group_size
        others = row.get("time/disturbed_fraction", 0.0)
        timed.append((row["time/wall_clock_s"] - wall_clock_s, responses, others))
        wall_clock_s, trained = row["time/wall_clock_s"], row["count/trained"]
    disturbed = [others for _, _, others in timed if others > DISTURBED_ABOVE]
    every = Pace(
        seconds=[seconds for seconds, _, _ in timed],
        responses=[responses for _, responses, _ in timed],
        rounds=len(timed),
        planned=config.rounds,
        disturbed=len(disturbed),
        others=sum(disturbed) / len(disturbed) if disturbed else None,
        keeps_disturbed=not config.callbacks.leave_out_disturbed,
    )
    if every.comparable and not every.keeps_disturbed:
        clean = [round_ for round_ in timed if round_[2] <= DISTURBED_ABOVE]
        every = replace(
            every,
            seconds=[seconds for seconds, _, _ in clean],
            responses=[responses for _, responses, _ in clean],
        )
    return every if sum(every.seconds) > 0 and sum(every.responses) > 0 else None
