"""Advantages: values computed by hand, then properties that hold for any rewards."""

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_trainable.algo import ADVANTAGES, compute_group_normalized_rewards

REWARDS = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0]])
STD_0, STD_1 = math.sqrt(1 / 3), 0.5  # sample standard deviations of the two groups


def float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("none", [[1, 0, 0, 1], [0, 0, 0, 1]]),
        ("group_mean", [[0.5, -0.5, -0.5, 0.5], [-0.25, -0.25, -0.25, 0.75]]),
        (
            "group_std",
            [
                [0.5 / STD_0, -0.5 / STD_0, -0.5 / STD_0, 0.5 / STD_0],
                [-0.25 / STD_1, -0.25 / STD_1, -0.25 / STD_1, 0.75 / STD_1],
            ],
        ),
        ("rloo", [[2 / 3, -2 / 3, -2 / 3, 2 / 3], [-1 / 3, -1 / 3, -1 / 3, 1]]),
    ],
)
def test_advantages_of_known_rewards(name, expected):
    advantages = ADVANTAGES[name](REWARDS, eps=0.0)
    torch.testing.assert_close(advantages, torch.tensor(expected, dtype=torch.float32))


@pytest.mark.slow
def test_batch_whitens_over_all_groups_together():
    # Eight rewards, three of which are 1: mean 3/8, sample variance 8/7 · 3/8 · 5/8.
    std = math.sqrt(8 / 7 * 15 / 64)
    expected = (REWARDS - 3 / 8) / (std + 0.1)
    torch.testing.assert_close(ADVANTAGES["batch"](REWARDS, eps=0.1), expected)


def test_eps_is_added_to_the_standard_deviation():
    advantages = ADVANTAGES["group_std"](REWARDS[1:], eps=0.5)
    assert advantages.tolist() == [[-0.25, -0.25, -0.25, 0.75]]


@pytest.mark.slow
@pytest.mark.parametrize("eps", [0.0, 1e-8, 1e-6])
@pytest.mark.parametrize("name", [name for name in ADVANTAGES if name != "none"])
@given(reward=st.floats(-1e6, 1e6, width=32), group_size=st.integers(2, 9))
@settings(max_examples=30, deadline=None)
def test_equal_rewards_give_exactly_zero_advantage(name, eps, reward, group_size):
    if name == "maxrl":
        reward = abs(reward)  # maxrl rejects negative rewards
    rewards = torch.full((3, group_size), reward)
    assert ADVANTAGES[name](rewards, eps=eps).eq(0).all()


def test_equal_rewards_whose_float32_mean_is_rounded_give_exactly_zero_advantage():
    # The float32 mean of seven rewards of 0.1 is not 0.1.
    rewards = torch.full((1, 7), 0.1)
    assert (rewards - rewards.mean(dim=-1, keepdim=True)).ne(0).any()
    assert ADVANTAGES["group_std"](rewards, eps=1e-8).eq(0).all()


@pytest.mark.parametrize("name", list(ADVANTAGES))
def test_rewards_are_never_overwritten(name):
    rewards = REWARDS.clone()
    advantages = ADVANTAGES[name](rewards, eps=1e-6)
    assert advantages.shape == rewards.shape
    assert torch.equal(rewards, REWARDS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["group_std", "group_mean", "rloo"])
@given(
    rewards=st.lists(
        st.lists(st.floats(-10, 10, width=32), min_size=4, max_size=4), min_size=1, max_size=5
    )
)
@settings(max_examples=50, deadline=None)
def test_a_group_knows_nothing_of_the_others_and_sums_to_zero(name, rewards):
    rewards = torch.tensor(rewards)
    advantages = ADVANTAGES[name](rewards, eps=1e-4)
    alone = torch.cat([ADVANTAGES[name](row.unsqueeze(0), eps=1e-4) for row in rewards])
    torch.testing.assert_close(advantages, alone)
    assert advantages.sum(dim=-1).abs().max() < 1e-3


@pytest.mark.parametrize("name", ["group_std", "rloo"])
def test_a_group_of_one_is_a_value_error_where_it_means_nothing(name):
    with pytest.raises(ValueError, match="at least 2"):
        ADVANTAGES[name](torch.ones(3, 1), eps=1e-8)


# ---- compute_group_normalized_rewards --------------------------------------------------------


def table_reward(response: str, ground_truth: float) -> dict[str, float]:
    return {
        "reward": float(response) * ground_truth,
        "format_reward": 1.0,
        "answer_reward": float(response),
    }


def normalized(responses, *, group_size=2, eps=0.0, by_std=True, truths=None):
    truths = [1.0] * len(responses) if truths is None else truths
    return compute_group_normalized_rewards(
        table_reward, responses, truths, group_size, eps, by_std
    )


def test_group_normalized_rewards_of_known_rewards():
    advantages, raw_rewards, metadata = normalized(["1", "3", "2", "2"], eps=1e-6)
    root = math.sqrt(2)
    assert raw_rewards.tolist() == [1, 3, 2, 2]
    assert advantages.tolist() == pytest.approx([-1 / root, 1 / root, 0, 0], abs=1e-6)
    assert metadata == pytest.approx(
        {
            "reward_mean": 2.0,
            "reward_std": math.sqrt(2 / 3),
            "reward_min": 1.0,
            "reward_max": 3.0,
            "format_reward_mean": 1.0,
            "answer_reward_mean": 2.0,
        }
    )
    assert all(type(value) is float for value in metadata.values())


def test_without_std_only_the_mean_is_subtracted():
    advantages, _, _ = normalized(["1", "3", "2", "2"], by_std=False)
    assert advantages.tolist() == [-1, 1, 0, 0]


def test_each_response_is_scored_against_its_own_ground_truth():
    _, raw_rewards, _ = normalized(["1", "1"], truths=[0.25, 4.0])
    assert raw_rewards.tolist() == [0.25, 4.0]


def test_one_group_of_one_is_fine_without_std():
    advantages, _, metadata = normalized(["5"], group_size=1, by_std=False)
    assert advantages.tolist() == [0]
    assert metadata["reward_std"] == 0.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"responses": ["1", "2", "3"]}, "3 rollout_responses .* group_size=2"),
        ({"responses": []}, "0 rollout_responses"),
        ({"responses": ["1", "2"], "truths": [1.0]}, "2 rollout_responses but 1"),
        ({"responses": ["1", "2"], "group_size": 0}, "group_size=0"),
        ({"responses": ["1", "2"], "group_size": 1}, "at least 2 rewards, got 1"),
    ],
)
def test_what_cannot_be_grouped_is_a_value_error_with_the_numbers(arguments, message):
    with pytest.raises(ValueError, match=message):
        normalized(**arguments)


def test_a_single_reward_of_a_whole_batch_has_no_advantage():
    assert ADVANTAGES["batch"](torch.tensor([[0.7]]), eps=1e-8).tolist() == [[0.0]]
