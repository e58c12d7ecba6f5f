"""Groups of made-up responses, with chosen rewards and weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from grpo_trainable.protocol.rollout import RolloutGroup


def group_of(
    prompt_index: int,
    *,
    rewards: Sequence[float],
    weights: Sequence[tuple[int, int]],
    uses: int = 0,
    interrupted: Sequence[bool] | None = None,
) -> RolloutGroup:
    """A group whose responses have a token by each of `weights`: (version, round). Their format
    is right, and their answers earn their `rewards`.

    `interrupted`: which of the responses read their second token in place of sampling it, so that
    no weights have a part in it; None: none does.
    """
    shape = (len(rewards), len(weights))
    versions, rounds = torch.tensor(weights, dtype=torch.int32).T
    mask = torch.ones(shape, dtype=torch.bool)
    if interrupted is not None:
        mask[:, 1:2] = ~torch.tensor(interrupted).unsqueeze(1)
    return RolloutGroup(
        prompt_index=prompt_index,
        prompt_ids=torch.tensor([1]),
        response_ids=torch.zeros(shape, dtype=torch.int64),
        response_mask=mask,
        behaviour_log_probs=torch.zeros(shape),
        rewards=torch.tensor(rewards, dtype=torch.float32),
        finished=torch.ones(len(rewards), dtype=torch.bool),
        token_versions=versions * mask,
        token_rounds=rounds * mask,
        format_rewards=torch.ones(len(rewards), dtype=torch.float64),
        answer_rewards=torch.tensor(rewards, dtype=torch.float64),
        uses=uses,
    )
