"""Interruptions of responses that have been thinking for too long.

A row is one response. Of the B rows of a call, A are in the batch. R is the maximum number of new
tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_trainable.models.stop_strings import StopStrings
from grpo_trainable.protocol.rollout import Interruption


class ThinkingBudget:
    """Tracks which of the B rows are interrupted, and provides the tokens to insert."""

    def __init__(
        self,
        interruption: Interruption,
        answers: StopStrings | None,
        rows: int,
        device: torch.device,
    ) -> None:
        """Set up interruptions for one call.

        Args:
            interruption: The interruption that the call's limits define.
            answers: Finds `interruption.answer_strings` among ids on the CPU. None if there are no
                such strings.
            rows: B, the number of rows of the call.
            device: Device of the rows.
        """
        self._after = interruption.after_tokens
        self._answer_ids = frozenset(interruption.answer_ids)
        self._answers = answers
        self._ids = torch.tensor(interruption.ids, dtype=torch.int64, device=device)
        self._interrupted = torch.zeros(rows, dtype=torch.bool, device=device)

    def fed(self, rows: Tensor, at: Tensor, ids: Tensor, running: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mask (A,) of rows whose next token is inserted, and the inserted tokens (A,).

        Args:
            rows: Indices among the B rows, (A,).
            at: Number of tokens of each row so far, (A,).
            ids: Tokens of all rows, (B, R).
            running: True for rows that have not ended, (A,).
        """
        for place in (running & (at == self._after)).nonzero()[:, 0].tolist():
            row = int(rows[place])
            self._interrupted[row] = not self._answering(ids[row, : self._after].cpu())
        step = at - self._after
        due = self._interrupted[rows] & (step < len(self._ids))
        return due & running, self._ids[step.clamp(0, len(self._ids) - 1)]

    def _answering(self, thoughts: Tensor) -> bool:
        """Return True if the answer begins within these first tokens of a response."""
        if not self._answer_ids.isdisjoint(thoughts.tolist()):
            return True
        return self._answers is not None and self._answers.first_completed(thoughts) is not None
