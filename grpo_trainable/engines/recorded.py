"""Records of responses, for an engine that receives their tokens one by one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from grpo_trainable.protocol.rollout import Request, RolloutGroup


@dataclass(kw_only=True)
class RecordedRow:
    """One response while it grows. The lists have one entry per token."""

    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)  # nats
    versions: list[int] = field(default_factory=list)  # versions of the sampling weights
    rounds: list[int] = field(default_factory=list)  # rounds of those weights
    sampled: list[bool] = field(default_factory=list)  # False for tokens that were fed
    finished: bool = False  # True if an end id or a stop string ended the response

    def add(self, token: int, log_prob: float, version: int, round_: int) -> None:
        """Append a sampled token."""
        self._append(token, log_prob, version, round_, sampled=True)

    def feed(self, ids: Iterable[int]) -> None:
        """Append tokens that were not sampled. At least one sampled token must follow them."""
        for token in ids:
            self._append(token, 0.0, 0, 0, sampled=False)

    def _append(
        self, token: int, log_prob: float, version: int, round_: int, *, sampled: bool
    ) -> None:
        self.ids.append(token)
        self.log_probs.append(log_prob)
        self.versions.append(version)
        self.rounds.append(round_)
        self.sampled.append(sampled)


def as_group(request: Request, rows: Sequence[RecordedRow], pad_id: int) -> RolloutGroup:
    """Return the responses to one request as a group on the CPU, cut to the longest response."""
    lengths = torch.tensor([len(row.ids) for row in rows])
    held = torch.arange(int(lengths.max())) < lengths[:, None]

    def filled(name: str, empty: float, dtype: torch.dtype) -> Tensor:
        values = torch.full(held.shape, empty, dtype=dtype)
        flat: list[Any] = [value for row in rows for value in getattr(row, name)]
        values[held] = torch.tensor(flat, dtype=dtype)
        return values

    return RolloutGroup.of(
        request,
        response_ids=filled("ids", pad_id, torch.int64),
        response_mask=filled("sampled", False, torch.bool),
        behaviour_log_probs=filled("log_probs", 0.0, torch.float32),
        finished=torch.tensor([row.finished for row in rows]),
        token_versions=filled("versions", 0, torch.int32),
        token_rounds=filled("rounds", 0, torch.int32),
    )
