"""Episodes without environments: answers that depend only on the actions, and a slow reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor

from grpo_trainable.engines.engine import Action, Observation
from grpo_trainable.models.sampling import draw_tokens, uniforms
from grpo_trainable.protocol.rollout import Request


def said(action: Sequence[int], turn: int) -> tuple[int, ...]:
    """Return an environment's reply to the action of a turn, or () at the end of the episode."""
    ends = turn == 4 or sum(action) % 5 == 0
    return () if ends else tuple(2 + (token + turn) % 6 for token in action[:4])


class Scripted:
    """A stand-in for environments. An answer takes a random number of polls, or comes at once."""

    def __init__(self, delays: Random | None = None) -> None:
        self._delays = delays
        self._waiting: list[tuple[int, Observation]] = []
        self._turns: dict[int, int] = {}
        self.actions: list[Action] = []

    def act(self, action: Action) -> None:
        turn = self._turns[action.row] = self._turns.get(action.row, 0) + 1
        ids = said(action.ids, turn)
        over = not ids
        delay = 0 if self._delays is None else self._delays.randrange(12)
        self.actions.append(action)
        self._waiting.append((delay, Observation(action.row, ids, over, finished=over)))

    def observations(self, *, waits: bool) -> list[Observation]:
        self._waiting = [(delay - 1, answer) for delay, answer in self._waiting]
        least = min(delay for delay, _ in self._waiting) if waits else 0
        come = [answer for delay, answer in self._waiting if delay <= max(least, 0)]
        self._waiting = [item for item in self._waiting if item[1] not in come]
        return sorted(come)


@torch.no_grad()
def by_hand(
    logits_of: Callable[[Tensor], Tensor],
    tokenizer: Any,
    request: Request,
    response: int,
    *,
    seed: int,
) -> dict[str, list]:
    """Sample an episode with one full forward pass per token, as a reference.

    Args:
        logits_of: Maps ids (1, S) to logits (1, S, V).
        tokenizer: Has the bytes of each token.
        request: Request of the episode.
        response: Index of the episode in its group.
        seed: Seed of the draws.
    """
    limits = request.limits
    draws = torch.from_numpy(
        uniforms(seed, request.stream, request.prompt_index, response, limits.max_new_tokens)
    )
    ids: list[int] = []
    mask: list[bool] = []
    log_probs: list[float] = []
    turn, action = 0, []
    while len(ids) < limits.max_new_tokens:
        logits = logits_of(torch.tensor([[*request.prompt_ids, *ids]]))[:, -1]
        token, log_prob = draw_tokens(logits, draws[len(ids)][None], limits.temperature)
        action.append(int(token))
        ids, mask, log_probs = [*ids, int(token)], [*mask, True], [*log_probs, float(log_prob)]
        # A head may have more rows than the tokenizer has tokens.
        text = b"".join(piece for i in action for piece in tokenizer.token_bytes[i : i + 1])
        stopped = any(string.encode() in text for string in limits.stop_strings)
        if action[-1] not in limits.end_ids and not stopped:
            continue
        turn += 1
        answer = said(action, turn)
        if not answer:
            return {"ids": ids, "mask": mask, "log_probs": log_probs, "finished": [True]}
        if len(ids) + len(answer) >= limits.max_new_tokens:
            break
        ids, mask = [*ids, *answer], [*mask, *[False] * len(answer)]
        log_probs, action = [*log_probs, *[0.0] * len(answer)], []
    return {"ids": ids, "mask": mask, "log_probs": log_probs, "finished": [False]}
