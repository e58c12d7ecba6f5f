"""The growing responses of a call with episodes: sampled tokens, and observations between them.

A row is one response. Of the B rows of a call, A are still in the batch. R is the maximum number of
new tokens and V the size of the vocabulary. Each row has its own number of tokens, because some
rows wait for their environments while others continue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_trainable.engines.engine import Action, Observation, Partner
from grpo_trainable.engines.rows import COMPACT_BELOW, draws_of
from grpo_trainable.models.sampling import draw_tokens
from grpo_trainable.models.stop_strings import StopStrings
from grpo_trainable.protocol.rollout import Request, RolloutGroup, extents


class EpisodeRows:
    """Draws tokens of actions, feeds tokens of observations, and tracks which rows wait."""

    def __init__(
        self,
        requests: Sequence[Request],
        *,
        pad_id: int,
        seed: int,
        stops: StopStrings | None,
        device: torch.device,
    ) -> None:
        """Set up the rows of `requests`, all of which have the same limits.

        Args:
            requests: Requests of the call.
            pad_id: Id that fills the unused columns.
            seed: Seed of all draws.
            stops: Stop strings of the limits, if any.
            device: Device of the logits.
        """
        self._requests = requests
        self._limits = limits = requests[0].limits
        self._stops = stops
        self._end_ids = frozenset(limits.end_ids)
        self._device = device
        self._uniforms = draws_of(requests, seed)  # (B, R)
        self._prompts = [r.prompt_ids for r in requests for _ in range(r.group_size)]
        rows = len(self._prompts)
        shape = (rows, limits.max_new_tokens)
        self._ids = torch.full(shape, pad_id)
        self._mask = torch.zeros(shape, dtype=torch.bool)
        self._log_probs = torch.zeros(shape)
        self._versions = torch.zeros(shape, dtype=torch.int32)
        self._rounds = torch.zeros(shape, dtype=torch.int32)
        self._finished = torch.zeros(rows, dtype=torch.bool)

        self._rows = list(range(rows))  # (A,) indices among the B rows
        self._length = [0] * rows  # number of tokens of each response
        self._action: list[list[int]] = [[] for _ in range(rows)]  # tokens of the current action
        self._fed: list[deque[int]] = [deque() for _ in range(rows)]  # tokens still to feed
        self._waiting: set[int] = set()  # rows that wait for their environment
        self._over: set[int] = set()

    @property
    def can_go_on(self) -> bool:
        """True if any row has a token to sample or to feed."""
        return any(row not in self._waiting and row not in self._over for row in self._rows)

    def listen_to(self, partner: Partner) -> None:
        """Receive the observations for waiting rows.

        If no row can continue, wait for an observation.
        """
        while self._waiting:
            for observation in partner.observations(waits=not self.can_go_on):
                self.extend(observation)
            if self.can_go_on:
                return

    def extend(self, observation: Observation) -> None:
        """Feed a waiting row its observation, or end the row.

        The row also ends if the observation would leave no room for another sampled token.
        """
        row = observation.row
        self._waiting.remove(row)
        if observation.over:
            self._over.add(row)
            self._finished[row] = observation.finished
        elif self._length[row] + len(observation.ids) >= self._limits.max_new_tokens:
            self._over.add(row)
        else:
            self._fed[row].extend(observation.ids)

    def drop_over(self) -> Tensor | None:
        """Once many rows have ended, drop them, and return the batch indices of the kept rows.

        Returns None if nothing was dropped. The result is empty if all rows have ended.
        """
        left = [place for place, row in enumerate(self._rows) if row not in self._over]
        if left and len(left) >= COMPACT_BELOW * len(self._rows):
            return None
        self._rows = [self._rows[place] for place in left]
        return torch.tensor(left, dtype=torch.int64, device=self._device)

    def last_tokens(self) -> tuple[Tensor, Tensor]:
        """Return the last token (A,) of every row, and its position (A,) in prompt plus response.

        The next token of the row follows that position. In a waiting row, the last token is already
        in the cache.
        """
        tokens = [self._last(row) for row in self._rows]
        positions = [len(self._prompts[row]) + self._length[row] - 1 for row in self._rows]
        return torch.tensor(tokens, device=self._device), torch.tensor(
            positions, device=self._device
        )

    def _last(self, row: int) -> int:
        length = self._length[row]
        return int(self._ids[row, length - 1]) if length else self._prompts[row][-1]

    def sequences(self) -> list[Tensor]:
        """Return, for each row in the batch, all tokens of prompt and response except the last."""
        return [
            torch.cat((torch.tensor(self._prompts[row]), self._ids[row, : self._length[row]]))[:-1]
            for row in self._rows
        ]

    def draw(self, logits: Tensor, version: int, round_: int) -> list[Action]:
        """Add one token to every row that can continue, and return the completed actions.

        The token comes from the row's observation, or is drawn from `logits` (A, V). `logits` is
        changed in place. The rows of the returned actions then wait for their environments. The
        t-th token of a response always uses the t-th random draw.
        """
        at = [min(self._length[row], self._limits.max_new_tokens - 1) for row in self._rows]
        uniform = torch.from_numpy(self._uniforms[self._rows, at]).to(self._device)
        tokens, log_probs = draw_tokens(
            logits, uniform, self._limits.temperature, self._limits.top_p
        )
        drawn = zip(self._rows, tokens.tolist(), log_probs.tolist(), strict=True)
        acted = []
        for row, token, log_prob in drawn:
            if row in self._waiting or row in self._over:
                continue
            if self._fed[row]:
                self._add(row, self._fed[row].popleft())
                continue
            t = self._length[row]
            self._mask[row, t] = True
            self._log_probs[row, t] = log_prob
            self._versions[row, t], self._rounds[row, t] = version, round_
            self._add(row, token)
            self._action[row].append(token)
            if self._ends_action(row):
                acted.append(Action(row, self._action[row], t))
                self._action[row] = []
                self._waiting.add(row)
            elif self._length[row] == self._limits.max_new_tokens:
                self._over.add(row)
        return acted

    def _add(self, row: int, token: int) -> None:
        self._ids[row, self._length[row]] = token
        self._length[row] += 1

    def _ends_action(self, row: int) -> bool:
        action = self._action[row]
        if action[-1] in self._end_ids:
            return True
        stops = self._stops
        if stops is None or not stops.may_complete[action[-1]]:
            return False
        return stops.completed(action)

    def groups(self) -> list[RolloutGroup]:
        """Return each request's group on the CPU, cut to the length of its longest response."""
        groups, start = [], 0
        for request in self._requests:
            rows = slice(start, start + request.group_size)
            start += request.group_size
            reach = extents(self._mask[rows])
            groups.append(self._group(request, rows, int(reach.max())))
        return groups

    def _group(self, request: Request, rows: slice, longest: int) -> RolloutGroup:
        fields = (self._ids, self._mask, self._log_probs, self._versions, self._rounds)
        ids, mask, log_probs, versions, rounds = (field[rows, :longest].clone() for field in fields)
        return RolloutGroup.of(
            request,
            response_ids=ids,
            response_mask=mask,
            behaviour_log_probs=log_probs,
            finished=self._finished[rows].clone(),
            token_versions=versions,
            token_rounds=rounds,
        )
