"""The growing responses of one call, independent of the code that computes their logits.

A row is one response. Of the B rows of a call, A are in the batch. All other rows have ended or
wait in a queue. R is the maximum number of new tokens and V the size of the vocabulary. If the
batch has fewer slots than there are rows, waiting rows enter after others have ended (continuous
batching; Yu et al., Orca, OSDI 2022). The requests and the lengths of their responses determine
which rows share the batch. Timing has no influence.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from grpo_trainable.engines.thinking_budget import ThinkingBudget
from grpo_trainable.models.sampling import draw_tokens, uniforms
from grpo_trainable.models.stop_strings import StopStrings
from grpo_trainable.protocol.rollout import Request, RolloutGroup, extents

# Drop ended rows from the batch once the share of running rows falls below this value. Copying the
# cache costs about as much as sampling two tokens.
COMPACT_BELOW = 0.75

# With a queue, rows leave as soon as they end. Waiting rows enter once this share of the slots is
# free, because running the model on even a few prompts takes about as long as sampling one token
# for all rows.
ENTER_ABOVE = 0.125


def draws_of(requests: Sequence[Request], seed: int) -> np.ndarray:
    """Return the random draws (B, R) for every row's tokens. Rows of a group are consecutive."""
    return np.stack(
        [
            uniforms(seed, r.stream, r.prompt_index, response, r.limits.max_new_tokens, r.state)
            for r in requests
            for response in range(r.group_size)
        ]
    )


class Rows:
    """Draws and records tokens, and tracks which rows are waiting, are running or have ended."""

    def __init__(
        self,
        requests: Sequence[Request],
        *,
        pad_id: int,
        seed: int,
        stops: StopStrings | None,
        device: torch.device,
        slots: int | None = None,
        thinking_budget: ThinkingBudget | None = None,
    ) -> None:
        """Set up the rows of `requests`, all of which have the same limits.

        Args:
            requests: Requests of the call.
            pad_id: Id that fills the unused columns.
            seed: Seed of all draws.
            stops: Stop strings of the limits, if any.
            device: Device of the logits.
            slots: Maximum number of rows in the batch. None lets all rows enter together.
            thinking_budget: Interruptions of these rows, if the limits define any.
        """
        self._requests = requests
        self._limits = limits = requests[0].limits
        self._pad_id = pad_id
        self._stops = stops
        self._thinking_budget = thinking_budget
        self._end_ids = torch.tensor(limits.end_ids, dtype=torch.int64, device=device)
        draws = draws_of(requests, seed)
        self._uniforms = torch.from_numpy(draws).to(device)  # (B, R)
        # Tokens at the end of each row's prompt that count as the start of the response.
        self._answered = [list(r.answered) for r in requests for _ in range(r.group_size)]
        shape = (len(draws), limits.max_new_tokens)
        self._ids = torch.full(shape, pad_id, device=device)
        self._mask = torch.zeros(shape, dtype=torch.bool, device=device)
        self._log_probs = torch.zeros(shape, device=device)
        self._versions = torch.zeros(shape, dtype=torch.int32, device=device)
        self._rounds = torch.zeros(shape, dtype=torch.int32, device=device)
        self._finished = torch.zeros(len(draws), dtype=torch.bool, device=device)

        self._queues = slots is not None
        self._slots = len(draws) if slots is None else slots
        self._entered = 0  # number of rows that have entered; rows enter in order
        self._rows = torch.zeros(0, dtype=torch.int64, device=device)  # (A,) indices among B rows
        self._at = torch.zeros(0, dtype=torch.int64, device=device)  # (A,) number of tokens

    @property
    def running(self) -> int:
        """A, the number of rows in the batch."""
        return len(self._rows)

    @property
    def over(self) -> bool:
        """True if every row has ended."""
        return not self.running and self._entered == len(self._finished)

    def enter(self) -> range:
        """Append waiting rows to the batch if enough slots are free.

        Returns:
            Indices of these rows among the B rows.
        """
        waiting, free = len(self._finished) - self._entered, self._slots - self.running
        enough = min(waiting, max(1, int(ENTER_ABOVE * self._slots)))
        new = range(self._entered, self._entered + (min(waiting, free) if free >= enough else 0))
        if new:
            self._entered = new.stop
            entering = torch.arange(new.start, new.stop, device=self._rows.device)
            self._rows = torch.cat((self._rows, entering))
            self._at = torch.cat((self._at, torch.zeros_like(entering)))
        return new

    def last_tokens(self) -> Tensor:
        """Return the last token (A,), sampled or fed, of each row in the batch."""
        return self._ids[self._rows, self._at - 1]

    def fed(self) -> tuple[Tensor, list[int]]:
        """Return, for every row in the batch, its sampled or fed tokens except the last.

        Returns:
            Ids (A, …), and the number of these tokens in each row.
        """
        lengths = (self._at - 1).tolist()
        return self._ids[self._rows, : max(lengths)], lengths

    def draw(self, logits: Tensor, version: int, round_: int) -> None:
        """Draw the next token of every row from `logits` (A, V), and record it.

        Rows that have ended record nothing. A row that is being interrupted records a fed token in
        place of the drawn one. `logits` is changed in place.
        """
        rows, at = self._rows, self._at
        least = self._limits.min_new_tokens - 1
        if least:
            early = (at < least).nonzero()
            logits[early, self._end_ids] = -torch.inf
        uniform = self._uniforms[rows, at]
        tokens, log_probs = draw_tokens(
            logits, uniform, self._limits.temperature, self._limits.top_p
        )
        sampled = running = ~self._finished[rows]
        if self._thinking_budget is not None:
            fed, told = self._thinking_budget.fed(rows, at, self._ids, running)
            tokens, sampled = told.where(fed, tokens), running & ~fed
        self._ids[rows, at] = tokens.where(running, self._pad_id)
        self._mask[rows, at] = sampled
        self._log_probs[rows, at] = log_probs.where(sampled, 0.0)
        self._versions[rows, at] = sampled.int() * version
        self._rounds[rows, at] = sampled.int() * round_
        ends = torch.isin(tokens, self._end_ids).logical_and_(sampled)
        if self._stops is not None:
            self._find_strings(self._stops, tokens, sampled & ~ends, ends)
        self._finished[rows] = ends | ~running
        self._at = at + 1

    def _find_strings(
        self, stops: StopStrings, tokens: Tensor, may_end: Tensor, ended: Tensor
    ) -> None:
        """Set `ended` (A,) for rows whose newest token completes a stop string.

        Only rows in `may_end` (A,) are considered.
        """
        late = self._at >= self._limits.min_new_tokens - 1
        for place in (stops.may_complete[tokens] & may_end & late).nonzero()[:, 0].tolist():
            row, count = int(self._rows[place]), int(self._at[place]) + 1
            response = self._answered[row] + self._ids[row, :count].tolist()
            ended[place] = stops.completed(response)

    def drop_ended(self) -> Tensor | None:
        """Drop rows that have ended, and return the batch indices of the kept rows.

        Returns None if nothing was dropped: without a queue, rows are dropped only once many have
        ended. The result is empty if all rows have ended.
        """
        running = ~self._finished[self._rows] & (self._at < self._limits.max_new_tokens)
        left = int(running.sum())
        if left and left >= (1.0 if self._queues else COMPACT_BELOW) * len(running):
            return None
        keep = running.nonzero()[:, 0]
        self._rows = self._rows[keep]
        self._at = self._at[keep]
        return keep

    def groups(self) -> list[RolloutGroup]:
        """Return each request's group on the CPU, cut to the length of its longest response."""
        groups, start = [], 0
        mask = self._mask.cpu()
        recorded = (self._ids, self._mask, self._log_probs, self._versions, self._rounds)
        fields = [field.cpu() for field in recorded]
        finished = self._finished.cpu()
        for request in self._requests:
            rows = slice(start, start + request.group_size)
            start += request.group_size
            longest = int(extents(mask[rows]).max())
            ids, response_mask, log_probs, versions, rounds = (
                field[rows, :longest].clone() for field in fields
            )
            groups.append(
                RolloutGroup.of(
                    request,
                    response_ids=ids,
                    response_mask=response_mask,
                    behaviour_log_probs=log_probs,
                    finished=finished[rows].clone(),
                    token_versions=versions,
                    token_rounds=rounds,
                )
            )
        return groups
