"""Errors of advantages, computed by hand for two responses, and by simulation."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from advantage_errors import PROMPTS, Segments, errors, held_out, segments, tokens_per_response

from grpo_trainable.config import GRPOConfig
from grpo_trainable.protocol.rollout import RolloutGroup
from grpo_trainable.tasks import as_text
from grpo_trainable.tasks.keyword import split_of
from grpo_trainable.tasks.prompts import build_task

TRUTH = 128

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


def test_variance_and_bias_given_a_segment():
    # The true advantages are 0.3, 0.2 and -0.5. Only the first segment is followed by a draw.
    found = errors(segments([GROUP], [CRITIC]), truth=TRUTH, group_size=2)
    noise = 0.25 / (TRUTH - 1)  # of the true value 0.5; the other one is 0.8
    other = 0.16 / (TRUTH - 1)
    unbiased = TRUTH / (TRUTH - 1)
    after = 0.16 * unbiased  # variance of the reward after the first segment
    squares = (0.3**2 + 0.2**2 + 0.5**2 - (noise + other) - other - noise) / 3
    assert found["zero"] == pytest.approx(parts(0.0, squares))
    baseline = (0.5**2 + 0.8**2 + 0.5**2 - 2 * noise - other) / 3
    assert found["return"] == pytest.approx(parts(after / 3, baseline))
    # For the group: 0.5 - 0.8/2 - 0.5/2, 0.8 - 1/2 - 0.5/2, and 0.5 - 0/2 - 0.5/2.
    biases = (0.15**2 + 0.05**2 + 0.25**2) / 3
    noises = (noise / 4 + other / 4) + (other + noise / 4) + noise / 4
    variance = (after / 4 + 3 * 0.25 * unbiased / 4) / 3
    assert found["group"] == pytest.approx(parts(variance, biases - noises / 3))
    baseline = (0.1**2 + 0.1**2 + 0.1**2 - 2 * noise - other) / 3
    assert found["gae"] == pytest.approx(parts(after / 3, baseline))
    # For the critic: 0.1 - -0.1, -0.1 and 0.1.
    biases = (0.2**2 + 0.1**2 + 0.1**2 - (noise + other) - other - noise) / 3
    assert found["critic"] == pytest.approx(parts(0.0, biases))
    completions = (0.25 + 0.16 + 0.16 + 0.25) * unbiased / 3
    assert found["vine_k4"] == pytest.approx(parts(completions / 4, 0.0))
    assert found["vine_k9"] == pytest.approx(parts(completions / 9, 0.0))


def parts(variance: float, squared_bias: float) -> dict[str, float]:
    return {
        "variance": variance,
        "squared_bias": squared_bias,
        "squared_error": variance + squared_bias,
    }


def test_errors_agree_with_simulated_estimates():
    """The states of a response have the values 0.5, 0.7, and the reward."""
    rng, draws, size, truth = np.random.default_rng(0), 400_000, 4, 16
    others = rng.binomial(size - 1, 0.5, draws)
    reward = rng.binomial(1, 0.7, draws)  # given the first segment
    estimates = {
        "zero": np.zeros(draws),
        "return": reward,
        "group": reward - (reward + others) / size,
        "gae": reward - 0.4,
        "critic": np.full(draws, 0.9 - 0.4),
        **{
            f"vine_k{k}": rng.binomial(k, 0.7, draws) / k - rng.binomial(k, 0.5, draws) / k
            for k in (4, 9)
        },
    }
    exact = {
        name: (float(own.var()), float(own.mean() - 0.2) ** 2) for name, own in estimates.items()
    }
    # True values from a few completions: the squares must not contain their noise.
    before, after = (torch.tensor(rng.binomial(truth, p, draws) / truth) for p in (0.5, 0.7))
    no = torch.zeros(draws, dtype=torch.bool)
    own = Segments(
        prompt=before,
        before=before,
        after=after,
        is_first=~no,
        is_last=no,
        critic_before=torch.full((draws,), 0.4, dtype=torch.float64),
        critic_after=torch.full((draws,), 0.9, dtype=torch.float64),
    )
    found = errors(own, truth=truth, group_size=size)
    for name, (variance, squared_bias) in exact.items():
        assert found[name]["variance"] == pytest.approx(variance, abs=0.003), name
        assert found[name]["squared_bias"] == pytest.approx(squared_bias, abs=0.003), name


def test_the_prompts_are_held_out(tmp_path: Path):
    config = GRPOConfig.from_dict({"loss": {"type": "ppo", "advantage": "gae"}})
    task = build_task(held_out(config, tmp_path))
    prompts = [as_text(task.train_example(i).prompt) for i in range(PROMPTS)]
    words = [prompt.split()[-1] for prompt in prompts]
    assert len(set(words)) == PROMPTS
    assert {split_of(word) for word in words} == {"heldout"}


def test_completions_cost_the_rest_of_the_response_once_per_state():
    # Two states at the prompt count once for the group: (3 + 1) / 2 tokens. State 2 has one left.
    assert tokens_per_response([GROUP]) == {
        **dict.fromkeys(("return", "group", "gae", "critic"), 2.0),
        "vine_k4": 2.0 + 4 * (2.0 + 1.0) / 2,
        "vine_k9": 2.0 + 9 * (2.0 + 1.0) / 2,
    }
