"""A warning that a trial no longer learns from its rewards."""

from __future__ import annotations

from collections.abc import Mapping

from grpo_trainable.config import GRPOConfig
from grpo_trainable.telemetry.metrics import PATIENCE, without_signal
from grpo_trainable.text import plural


class Standstill:
    """Counts consecutive rounds in which the rewards within each group were equal.

    A trial that also learns from equal rewards never stands still. Examples are trials with
    `loss.advantage=batch`, a critic, a teacher or a length penalty.
    """

    def __init__(self, config: GRPOConfig) -> None:
        self.rounds = 0  # consecutive rounds without signal so far
        self._watched = config.taught_by_rewards_alone
        draws_others = config.rollout.zero_advantage == "resample"
        self._or_draw = (
            "" if draws_others else ", draw other prompts (rollout.zero_advantage=resample)"
        )

    def note(self, row: Mapping[str, float]) -> str | None:
        """Count the next round, and return a warning if one is due.

        A warning is due once per standstill, after `PATIENCE` consecutive rounds without signal.
        """
        self.rounds = self.rounds + 1 if self._watched and without_signal(row) else 0
        if self.rounds != PATIENCE:
            return None
        mean = row.get("reward/drawn_mean")
        earned = "" if mean is None else f" (mean {mean:.3g})"
        return (
            f"no signal for {plural(PATIENCE, 'round')}: all responses to each prompt earned the "
            f"same reward{earned} or could not be scored, so the rewards teach nothing. Read some "
            "responses in evaluations/, check task.reward, use easier or harder prompts"
            f"{self._or_draw}, or raise rollout.temperature; see "
            "docs/running.md#when-nothing-is-learned"
        )
