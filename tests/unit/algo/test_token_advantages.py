"""Token advantages and the loss of a critic, against values computed by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from grpo_trainable.algo import (
    at_the_end,
    discounted_returns,
    explained_variance,
    gae,
    value_loss,
    vine,
    whitened_tokens,
)

NAN = math.nan


def double(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def random_rows(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return rewards, values and a mask, each (5, 7). The mask has holes and one empty row."""
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, 5, 7, generator=generator, dtype=torch.float64)
    mask = torch.rand(5, 7, generator=generator) < 0.7
    mask[3] = False
    return rewards, values, mask


# ---- Generalised advantage estimation ----------------------------------------------------------


def test_gae_of_three_tokens_by_hand():
    # δ: 0.9·0.25 − 0.5 = −0.275, 0.9·0.75 − 0.25 = 0.425, 1 − 0.75 = 0.25; γλ = 0.72.
    advantages = gae(
        double([0, 0, 1]),
        double([0.5, 0.25, 0.75]),
        torch.ones(1, 3, dtype=torch.bool),
        gamma=0.9,
        lam=0.8,
    )
    last, middle = 0.25, 0.425 + 0.72 * 0.25
    expected = double([-0.275 + 0.72 * middle, middle, last])
    torch.testing.assert_close(advantages, expected, rtol=1e-12, atol=0)
    assert middle == pytest.approx(0.605)
    assert float(advantages[0, 0]) == pytest.approx(0.1606)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.95), (0.5, 0.0), (0.0, 0.7)])
def test_gae_is_the_sum_of_its_definition(gamma, lam):
    rewards, values, mask = random_rows()
    expected = torch.zeros_like(values)
    for g, row in enumerate(mask):
        tokens = row.nonzero()[:, 0].tolist()
        worth = [float(values[g, t]) for t in tokens] + [0.0]
        deltas = [
            float(rewards[g, t]) + gamma * worth[i + 1] - worth[i] for i, t in enumerate(tokens)
        ]
        for i, t in enumerate(tokens):
            expected[g, t] = sum(
                (gamma * lam) ** (j - i) * deltas[j] for j in range(i, len(deltas))
            )
    found = gae(rewards, values, mask, gamma=gamma, lam=lam)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_lambda_one_gives_the_return_less_the_value():
    rewards, values, mask = random_rows()
    found = gae(rewards, values, mask, gamma=1.0, lam=1.0)
    to_go = (rewards * mask).flip(1).cumsum(dim=1).flip(1)
    torch.testing.assert_close(found, (to_go - values) * mask, rtol=1e-12, atol=1e-12)
    one_reward = at_the_end(torch.tensor([0.25, 1.0, 0.5, 3.0, 0.75]).double(), mask)
    found = gae(one_reward, values, mask, gamma=1.0, lam=1.0)
    earned = torch.tensor([[0.25], [1.0], [0.5], [3.0], [0.75]]).double()
    torch.testing.assert_close(found, (earned - values) * mask, rtol=1e-12, atol=1e-12)


def test_lambda_zero_gives_the_error_of_the_next_value():
    rewards, values = double([0, 2, 1]), double([0.5, 0.25, 4])
    found = gae(rewards, values, torch.ones(1, 3, dtype=torch.bool), gamma=1.0, lam=0.0)
    assert found.tolist() == [[-0.25, 5.75, -3.0]]


def test_padding_and_what_stands_there_change_no_advantage():
    rewards, values, mask = random_rows()
    off = ~mask
    width = torch.zeros(5, 4, dtype=torch.bool)
    wide = [
        torch.cat((t.masked_fill(off, NAN), torch.full((5, 4), NAN)), dim=1)
        for t in (rewards, values)
    ]
    found = gae(*wide, torch.cat((mask, width), dim=1), gamma=0.9, lam=0.5)
    assert found[:, :7].equal(gae(rewards, values, mask, gamma=0.9, lam=0.5))
    assert found[:, 7:].eq(0).all()
    assert found[:, :7][off].eq(0).all()


def test_a_reward_stands_at_the_last_token_of_its_response():
    mask = torch.tensor([[True, False, True, False], [False] * 4, [True] * 4])
    rewards = at_the_end(torch.tensor([0.5, 2.0, -1.0]), mask)
    assert rewards.tolist() == [[0, 0, 0.5, 0], [0] * 4, [0, 0, 0, -1]]


def test_discounted_returns_by_hand():
    found = discounted_returns(double([1, 0, 2]), torch.ones(1, 3, dtype=torch.bool), gamma=0.5)
    assert found.tolist() == [[1.5, 1.0, 2.0]]


# ---- Values of completions ---------------------------------------------------------------------


def test_vine_of_two_chunks_by_hand():
    values = torch.tensor([[0.5, NAN, 0.75, NAN], [0.5, NAN, 0.75, NAN], [0.25, NAN, NAN, NAN]])
    mask = torch.tensor([[True] * 4, [True, True, True, False], [True, False, False, False]])
    found = vine(torch.tensor([1.0, 0.0, 1.0]), values, mask)
    assert found.tolist() == [
        [0.25, 0.25, 0.25, 0.25],
        [0.25, 0.25, -0.75, 0],
        [0.75, 0, 0, 0],
    ]


def test_vine_ignores_values_off_the_mask_and_empty_responses():
    values = torch.tensor([[0.5, 9.0, 0.25], [NAN, NAN, NAN]])
    mask = torch.tensor([[True, False, True], [False] * 3])
    found = vine(torch.tensor([1.0, 7.0]), values, mask)
    assert found.tolist() == [[-0.25, 0, 0.75], [0, 0, 0]]


# ---- Whitening ---------------------------------------------------------------------------------


def test_tokens_of_all_groups_are_whitened_together():
    advantages = [torch.tensor([[1.0, 50.0], [2.0, 50.0]]), torch.tensor([[3.0]])]
    masks = [torch.tensor([[True, False], [True, False]]), torch.tensor([[True]])]
    first, second = whitened_tokens(advantages, masks, eps=0.0)
    assert first.tolist() == [[-1, 0], [0, 0]]
    assert second.tolist() == [[1]]


@pytest.mark.parametrize("tokens", [1, 3])
def test_equal_advantages_are_whitened_to_zero(tokens):
    mask = torch.ones(1, tokens, dtype=torch.bool)
    (found,) = whitened_tokens([torch.full((1, tokens), 0.1)], [mask], eps=1e-8)
    assert found.eq(0).all()


# ---- The value loss ----------------------------------------------------------------------------


def test_value_loss_and_its_clip_by_hand():
    # A clipped value stays within 0.2 of the old value 0.5. For the second value, the clipped value
    # is nearer to the return, so the loss uses the unclipped value.
    values = double([0.9, 0.9, 0.6, 7.0]).requires_grad_()
    old, returns = double([0.5, 0.5, 0.5, 0.0]), double([1.0, 0.2, 1.0, 0.0])
    mask = torch.tensor([[True, True, True, False]])
    loss, clipped = value_loss(values, old, returns, mask, clip=0.2)
    expected = double([0.3**2 / 2, 0.7**2 / 2, 0.4**2 / 2, 0])
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-12, atol=1e-15)
    assert clipped.tolist() == [[True, False, False, False]]
    loss.sum().backward()
    torch.testing.assert_close(values.grad, double([0, 0.7, -0.4, 0]), rtol=1e-12, atol=1e-15)


def test_value_loss_without_a_clip_is_half_the_square():
    values, returns = double([0.9, -3.0]), double([1.0, NAN])
    mask = torch.tensor([[True, False]])
    loss, clipped = value_loss(values, torch.full_like(values, NAN), returns, mask, clip=None)
    torch.testing.assert_close(loss, double([0.005, 0]), rtol=1e-12, atol=0)
    assert not clipped.any()


def test_explained_variance_by_hand():
    returns = torch.tensor([0.0, 0.0, 1.0, 1.0])
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(returns + 3, returns) == 1.0
    assert explained_variance(torch.full((4,), 0.5), returns) == 0.0
    assert explained_variance(1 - returns, returns) == pytest.approx(-3.0)
    # The errors 0, 0, 0.5 and 0.5 have variance 1/16, and the returns have variance 1/4.
    assert explained_variance(returns / 2, returns) == pytest.approx(0.75)
    assert explained_variance(returns, torch.ones(4)) is None
