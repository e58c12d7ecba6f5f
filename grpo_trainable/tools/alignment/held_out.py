"""A held-out row with what a trained model says about it. Imports only the standard library."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class HeldOutRow:
    """A held-out row as text, with what the trained model says about it."""

    prompt: str
    chosen: str  # the completion of a row that is not a pair
    rejected: str | None = None
    chosen_score: float | None = None
    rejected_score: float | None = None
    response: str | None = None  # the most likely response of the trained policy

    @property
    def margin(self) -> float | None:
        """The score of the chosen response minus the score of the rejected response."""
        if self.chosen_score is None or self.rejected_score is None:
            return None
        return self.chosen_score - self.rejected_score
