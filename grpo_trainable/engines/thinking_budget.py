"""Responses that have thought for too long, and what they are fed.

B rows of a call, of which A are in the batch; R new tokens at most.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_trainable.models.stop_strings import StopStrings
from grpo_trainable.protocol.rollout import Interruption


class ThinkingBudget:
    """Which of the B rows are interrupted, and the tokens that they read then."""

    def __init__(
        self,
        interruption: Interruption,
        answers: StopStrings | None,
        rows: int,
        device: torch.device,
    ) -> None:
        """`rows`: B. `answers`: `interruption.answer_strings`, on the CPU, if any."""
        self._after = interruption.after_tokens
        self._answer_ids = frozenset(interruption.answer_ids)
        self._answers = answers
        self._ids = torch.tensor(interruption.ids, dtype=torch.int64, device=device)
        self._interrupted = torch.zeros(rows, dtype=torch.bool, device=device)

    def fed(self, rows: Tensor, at: Tensor, ids: Tensor, running: Tensor) -> tuple[Tensor, Tensor]:
        """Whether each row in the batch (A,) is fed its next token, and which that is, (A,).

        `rows` (A,): which of the B; `at` (A,): tokens of each so far, among `ids` (B, R); `running`
        (A,): whether it has not ended.
        """
        for place in (running & (at == self._after)).nonzero()[:, 0].tolist():
            row = int(rows[place])
            self._interrupted[row] = not self._answering(ids[row, : self._after].cpu())
        step = at - self._after
        due = self._interrupted[rows] & (step < len(self._ids))
        return due & running, self._ids[step.clamp(0, len(self._ids) - 1)]

    def _answering(self, thoughts: Tensor) -> bool:
        """Whether a response that began with these tokens is at its answer already."""
        if not self._answer_ids.isdisjoint(thoughts.tolist()):
            return True
        return self._answers is not None and self._answers.first_completed(thoughts) is not None
