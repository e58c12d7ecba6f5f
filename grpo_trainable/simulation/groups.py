"""Groups of synthetic responses with given rewards and given versions of the weights."""

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
    """Return a scored group of synthetic responses, all with format reward 1.

    Args:
        prompt_index: index of the prompt.
        rewards: reward of each response. The answer reward is the same.
        weights: (version, round) of the weights that sampled each token.
        uses: number of training batches that have contained the group.
        interrupted: for each response, True if it reads its second token instead of sampling it.
            None: no response is interrupted.
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
