"""Tells that rewards no longer teach a trial anything."""

from __future__ import annotations

from collections.abc import Mapping

from grpo_trainable.config import GRPOConfig
from grpo_trainable.telemetry.metrics import without_signal
from grpo_trainable.text import plural

PATIENCE = 4  # rounds in a row without signal, after which it is told


class Standstill:
    """Counts rounds in a row that had no group of unequal rewards to train on. What learns from
    equal rewards too (`loss.advantage=batch`, critics, teachers, penalties of length) never stands
    still."""

    def __init__(self, config: GRPOConfig) -> None:
        self.rounds = 0  # rounds in a row, up to now
        self._watched = config.taught_by_rewards_alone
        draws_others = config.rollout.zero_advantage == "resample"
        self._or_draw = "" if draws_others else ", draw others (rollout.zero_advantage=resample)"

    def note(self, row: Mapping[str, float]) -> str | None:
        """Takes in the metrics of the next round, and says what the user should hear: once for
        each standstill, after `PATIENCE` rounds of it."""
        self.rounds = self.rounds + 1 if self._watched and without_signal(row) else 0
        if self.rounds != PATIENCE:
            return None
        mean = row.get("reward/drawn_mean")
        earned = "" if mean is None else f" (mean reward {mean:.3g})"
        return (
            f"no signal for {plural(PATIENCE, 'round')}: all responses to each prompt earned the "
            f"same{earned} or could not be scored, so the rewards teach nothing. Read some of "
            "evaluations/, look at task.reward, take easier or harder prompts"
            f"{self._or_draw}, or raise rollout.temperature: "
            "docs/running.md#when-nothing-is-learned"
        )
