"""The responses of one call while they grow, whatever computes the logits of their next tokens.

B rows to fill, of which A are in the batch; R new tokens at most; V vocabulary. The other rows have
ended or wait in a queue: where there are fewer slots than rows, one enters in the place of one that
has ended (continuous batching; Yu et al., Orca, OSDI 2022). Which rows are in the batch together
follows from the requests and from where their responses end, never from time.
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

# Rows that have ended are dropped from the batch once a smaller share than this still runs. Copying
# the cache costs about as much as two tokens.
COMPACT_BELOW = 0.75

# Rows leave a queue as soon as they have ended, and others enter once this share of the slots
# is free: to run a few prompts costs about as long as a token of all rows.
ENTER_ABOVE = 0.125


def draws_of(requests: Sequence[Request], seed: int) -> np.ndarray:
    """The draws (B, R) of every row's tokens, those of a request's group one after the other."""
    return np.stack(
        [
            uniforms(seed, r.stream, r.prompt_index, response, r.limits.max_new_tokens, r.state)
            for r in requests
            for response in range(r.group_size)
        ]
    )


class Rows:
    """Draws the tokens, records them, and knows which rows wait, run and have ended."""

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
        """The requests share their limits. `stops`: the stop strings among these, if any. `slots`:
        rows that the batch has at most; None: all enter at once. `thinking_budget`: that of these
        rows, if the limits have one."""
        self._requests = requests
        self._limits = limits = requests[0].limits
        self._pad_id = pad_id
        self._stops = stops
        self._thinking_budget = thinking_budget
        self._end_ids = torch.tensor(limits.end_ids, dtype=torch.int64, device=device)
        draws = draws_of(requests, seed)
        self._uniforms = torch.from_numpy(draws).to(device)  # (B, R)
        # The tokens of each row's response that its prompt ends with.
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
        self._entered = 0  # rows of the B, in order
        self._rows = torch.zeros(0, dtype=torch.int64, device=device)  # (A,) which of the B
        self._at = torch.zeros(0, dtype=torch.int64, device=device)  # (A,) tokens of each so far

    @property
    def running(self) -> int:
        """A."""
        return len(self._rows)

    @property
    def over(self) -> bool:
        """Whether every row has ended."""
        return not self.running and self._entered == len(self._finished)

    def enter(self) -> range:
        """Which of the B rows enter the batch now, behind those in it."""
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
        """The token (A,) that each row in the batch has sampled, or was fed, last."""
        return self._ids[self._rows, self._at - 1]

    def fed(self) -> tuple[Tensor, list[int]]:
        """The tokens that the rows in the batch have sampled and fed, all but the last: ids (A, …),
        and how many of them each row has."""
        lengths = (self._at - 1).tolist()
        return self._ids[self._rows, : max(lengths)], lengths

    def draw(self, logits: Tensor, version: int, round_: int) -> None:
        """Draws the next token of every row from `logits` (A, V), which it changes, and records it
        where the row has not ended. A row that is interrupted is fed a token in its place."""
        rows, at = self._rows, self._at
        least = self._limits.min_new_tokens - 1
        if least:
            early = (at < least).nonzero()
            logits[early, self._end_ids] = -torch.inf
        uniform = self._uniforms[rows, at]
        tokens, log_probs = draw_tokens(logits, uniform, self._limits.temperature)
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
        """Marks rows, of those that `may_end` (A,), as `ended` (A,) whose newest token completes a
        stop string."""
        late = self._at >= self._limits.min_new_tokens - 1
        for place in (stops.may_complete[tokens] & may_end & late).nonzero()[:, 0].tolist():
            row, count = int(self._rows[place]), int(self._at[place]) + 1
            response = self._answered[row] + self._ids[row, :count].tolist()
            ended[place] = stops.completed(response)

    def drop_ended(self) -> Tensor | None:
        """Drops rows that have ended, without a queue only once they are many; returns which of the
        A are kept then: none where all have ended."""
        running = ~self._finished[self._rows] & (self._at < self._limits.max_new_tokens)
        left = int(running.sum())
        if left and left >= (1.0 if self._queues else COMPACT_BELOW) * len(running):
            return None
        keep = running.nonzero()[:, 0]
        self._rows = self._rows[keep]
        self._at = self._at[keep]
        return keep

    def groups(self) -> list[RolloutGroup]:
        """Returns a group for each request, on the CPU, cut to its own longest response."""
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
