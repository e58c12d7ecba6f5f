"""Errors of advantages, computed by hand for two responses."""

from __future__ import annotations

import math

import pytest
import torch
from advantage_errors import segments, squared_errors, tokens_per_response

from grpo_trainable.protocol.rollout import RolloutGroup

NAN = math.nan
MASK = torch.tensor([[True, True, True], [True, False, False]])
ZEROS = torch.zeros((2, 3), dtype=torch.int32)
# The first response has the valued states 0 and 2, and so two segments. The second has state 0.
GROUP = RolloutGroup(
    prompt_index=0,
    prompt_ids=torch.tensor([3]),
    response_ids=torch.tensor([[4, 5, 6], [4, 0, 0]]),
    response_mask=MASK,
    behaviour_log_probs=torch.zeros(2, 3),
    rewards=torch.tensor([1.0, 0.0]),
    finished=torch.tensor([True, True]),
    token_versions=ZEROS,
    token_rounds=ZEROS,
    state_values=torch.tensor([[0.5, NAN, 0.8], [0.5, NAN, NAN]]),
)
CRITIC = torch.tensor([[0.4, 0.6, 0.9], [0.4, 0.0, 0.0]])


def test_the_squared_errors_are_means_over_the_tokens():
    # The true advantages are 0.3 on two tokens, 0.2 on one token and -0.5 on one token.
    found = squared_errors(segments([GROUP], [CRITIC], gamma=1.0, lam=1.0), truth=2)
    assert found["return"] == pytest.approx((2 * 0.7**2 + 0.8**2 + 0.5**2) / 4)
    assert found["group"] == pytest.approx((2 * 0.2**2 + 0.3**2 + 0.0**2) / 4)
    assert found["critic"] == pytest.approx((2 * 0.2**2 + 0.1**2 + 0.1**2) / 4)
    assert found["gae"] == pytest.approx((2 * 0.3**2 + 0.1**2 + 0.1**2) / 4)
    # With two completions, the unbiased variance of a state of value p is 2 p (1 - p).
    variances = 2 * (2 * 0.25 + 2 * 0.16) + 2 * 0.16 + 2 * 0.25
    assert found["vine_k4"] == pytest.approx(variances / 4 / 4)
    assert found["vine_k9"] == pytest.approx(variances / 9 / 4)


def test_completions_cost_the_rest_of_the_response_once_per_state():
    # Two states at the prompt count once for the group: (3 + 1) / 2 tokens. State 2 has one left.
    assert tokens_per_response([GROUP]) == {
        **dict.fromkeys(("return", "group", "gae", "critic"), 2.0),
        "vine_k4": 2.0 + 4 * (2.0 + 1.0) / 2,
        "vine_k9": 2.0 + 9 * (2.0 + 1.0) / 2,
    }
