"""The responses of one call while they grow, whatever computes the logits of their next tokens.

B rows to fill, of which A are still in the batch; R new tokens at most; V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from grpo_trainable.models.sampling import draw_tokens, uniforms
from grpo_trainable.models.stop_strings import StopStrings
from grpo_trainable.rollout import Request, RolloutGroup, extents

# Rows that have ended are dropped from the batch once a smaller share than this still runs. Copying
# the cache costs about as much as two tokens.
COMPACT_BELOW = 0.75


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
    """Draws the tokens, records them, and knows which rows have ended."""

    def __init__(
        self,
        requests: Sequence[Request],
        *,
        pad_id: int,
        seed: int,
        stops: StopStrings | None,
        device: torch.device,
    ) -> None:
        """The requests share their limits. `stops`: the stop strings among these, if any."""
        self._requests = requests
        self._limits = limits = requests[0].limits
        self._pad_id = pad_id
        self._stops = stops
        self._end_ids = torch.tensor(limits.end_ids, dtype=torch.int64, device=device)
        draws = draws_of(requests, seed)
        # The tokens of each row's response that its prompt ends with.
        self._answered = [list(r.answered) for r in requests for _ in range(r.group_size)]
        shape = (len(draws), limits.max_new_tokens)
        self._ids = torch.full(shape, pad_id, device=device)
        self._mask = torch.zeros(shape, dtype=torch.bool, device=device)
        self._log_probs = torch.zeros(shape, device=device)
        self._finished = torch.zeros(len(draws), dtype=torch.bool, device=device)
        # Token t of every row was sampled by weights of versions[t].
        self._versions: list[int] = []
        self._rounds: list[int] = []

        self._rows = torch.arange(len(draws), device=device)  # (A,) which of the B
        self._uniforms = torch.from_numpy(draws).to(device)  # (A, R)

    def sampled(self, tokens: slice | int) -> Tensor:
        """Token ids (A, …) that the rows in the batch have sampled so far."""
        return self._ids[self._rows, tokens]

    def draw(self, t: int, logits: Tensor, version: int, round_: int) -> None:
        """Draws token t of every row from `logits` (A, V), which it changes, and records it where
        the row has not ended."""
        if t < self._limits.min_new_tokens - 1:
            logits[:, self._end_ids] = -torch.inf
        tokens, log_probs = draw_tokens(logits, self._uniforms[:, t], self._limits.temperature)
        running = ~self._finished[self._rows]
        self._ids[self._rows, t] = tokens.where(running, self._pad_id)
        self._mask[self._rows, t] = running
        self._log_probs[self._rows, t] = log_probs.where(running, 0.0)
        self._versions.append(version)
        self._rounds.append(round_)
        ended = torch.isin(tokens, self._end_ids).logical_or_(~running)
        if self._stops is not None and t >= self._limits.min_new_tokens - 1:
            self._find_strings(t, self._stops, tokens, ended)
        self._finished[self._rows] = ended

    def _find_strings(self, t: int, stops: StopStrings, tokens: Tensor, ended: Tensor) -> None:
        """Marks the rows of which token t completes a stop string as `ended` (A,)."""
        for row in (stops.may_complete[tokens] & ~ended).nonzero()[:, 0].tolist():
            which = self._rows[row]
            response = self._answered[which] + self._ids[which, : t + 1].tolist()
            ended[row] = stops.completed(response)

    def drop_finished(self) -> Tensor | None:
        """Drops rows that have ended, once they are many; returns which of the A are kept then:
        none where all have ended."""
        running = ~self._finished[self._rows]
        left = int(running.sum())
        if left and left >= COMPACT_BELOW * len(running):
            return None
        keep = running.nonzero()[:, 0]
        self._rows = self._rows[keep]
        self._uniforms = self._uniforms[keep]
        return keep

    def groups(self) -> list[RolloutGroup]:
        """Returns a group for each request, on the CPU, cut to its own longest response."""
        groups, start = [], 0
        sampled = len(self._versions)
        mask = self._mask[:, :sampled].cpu()
        fields = (
            self._ids[:, :sampled].cpu(),
            mask,
            self._log_probs[:, :sampled].cpu(),
            torch.tensor(self._versions, dtype=torch.int32) * mask,
            torch.tensor(self._rounds, dtype=torch.int32) * mask,
        )
        finished = self._finished.cpu()
        for request in self._requests:
            rows = slice(start, start + request.group_size)
            start += request.group_size
            longest = int(extents(mask[rows]).max())
            ids, response_mask, log_probs, versions, rounds = (
                field[rows, :longest].clone() for field in fields
            )
            groups.append(
                RolloutGroup(
                    prompt_index=request.prompt_index,
                    prompt_ids=torch.tensor(request.prompt_ids),
                    response_ids=ids,
                    response_mask=response_mask,
                    behaviour_log_probs=log_probs,
                    rewards=torch.full((request.group_size,), torch.nan),
                    finished=finished[rows].clone(),
                    token_versions=versions,
                    token_rounds=rounds,
                )
            )
        return groups
