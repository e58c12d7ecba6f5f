"""The rubrics that a judge has written for each prompt so far.

Only the pipeline keeps rubrics: each request carries the rubrics of its prompt, and each answer may
carry new ones. Rubrics change only when a round has collected all its groups. The changes follow
the order of the round's prompts. So at lag 0, the rubrics do not depend on timing, and a resumed
trial continues with the same rubrics.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from grpo_trainable.config import GRPOConfig
from grpo_trainable.config.reward_kinds import JUDGE, rewards_of
from grpo_trainable.protocol.messages import Scored
from grpo_trainable.protocol.rollout import Request, Rubric


class RubricBuffers:
    """One buffer of rubrics for each training prompt. Prompts with equal tokens share a buffer."""

    def __init__(self, config: GRPOConfig) -> None:
        """Create empty buffers."""
        rewards = [reward for own in config.alone for reward in rewards_of(own.task.reward)]
        self._are_used = any(reward.kind == JUDGE for reward in rewards)
        self._rubrics: dict[str, tuple[Rubric, ...]] = {}  # digest of a prompt -> its rubrics
        # Prompt index -> (digest, rubrics), until the round that drew the prompt is collected.
        self._waiting: dict[int, tuple[str, tuple[Rubric, ...]]] = {}

    def attach(self, request: Request) -> Request:
        """Return a training request with the rubrics of its prompt.

        Without a judge, and for held-out prompts, the request is returned unchanged.
        """
        if not self._are_used or request.stream != "train":
            return request
        return replace(request, rubrics=self._rubrics.get(_digest(request.prompt_ids), ()))

    def add(self, scored: Scored) -> None:
        """Record an answer's rubrics, which take effect when their round is collected."""
        for group in scored.groups:
            if group.prompt_index in scored.rubrics:
                digest = _digest(group.prompt_ids.tolist())
                self._waiting[group.prompt_index] = (digest, scored.rubrics[group.prompt_index])

    def settle(self, drawn: Sequence[int]) -> None:
        """Apply the rubrics of the prompts that a round drew, in the order of the prompts."""
        for index in drawn:
            if index in self._waiting:
                digest, rubrics = self._waiting.pop(index)
                self._rubrics[digest] = rubrics

    # ---- Checkpoints -------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the buffers as plain data."""
        return {
            "rubrics": [[key, _plain(own)] for key, own in self._rubrics.items()],
            "waiting": [[i, key, _plain(own)] for i, (key, own) in sorted(self._waiting.items())],
        }

    def load_state(self, state: Mapping[str, Any], *, same_sampling: bool) -> None:
        """Continue from a state.

        Args:
            state: The result of `state`.
            same_sampling: If False, the rubrics of prompts that were not trained on are dropped.
        """
        self._rubrics = {key: _rubrics(own) for key, own in state["rubrics"]}
        waiting = state["waiting"] if same_sampling else ()
        self._waiting = {i: (key, _rubrics(own)) for i, key, own in waiting}


def _digest(prompt_ids: Sequence[int]) -> str:
    return hashlib.sha256(np.asarray(prompt_ids, dtype=np.int64).tobytes()).hexdigest()[:32]


def _plain(rubrics: Sequence[Rubric]) -> list[list[Any]]:
    return [list(rubric) for rubric in rubrics]


def _rubrics(plain: Sequence[Sequence[Any]]) -> tuple[Rubric, ...]:
    return tuple(Rubric(*own) for own in plain)
