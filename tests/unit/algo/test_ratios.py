"""Ratios beyond the range of float32: losses and gradients follow the formula and stay finite."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_trainable.algo import (
    KL_ESTIMATORS,
    LOG_RATIO_MAX,
    LOSSES,
    bounded_log_ratio,
    bounded_tokens,
    compute_grpo_clip_loss,
    effective_sample_fraction,
    importance_weight,
    sequence_ratio,
    token_ratio,
)

pytestmark = pytest.mark.numerics

CLIP = {"clip_low": 0.2, "clip_high": 0.28}
LARGEST = math.exp(20)

# Two tokens with A = 3 and two with A = −3.
NEW = torch.full((2, 2), -1.0)
ADVANTAGES = torch.tensor([[3.0], [-3.0]]).expand(2, 2)
FULL = torch.ones(2, 2, dtype=torch.bool)


def loss_and_gradient(name: str, log_ratio: float) -> tuple[list[float], list[float]]:
    """Return loss and gradient of a token with A = 3 and of one with A = −3.

    Each row has two equal tokens, so the results come from the first token.
    """
    log_probs = NEW.clone().requires_grad_()
    loss, _ = LOSSES[name](log_probs, NEW - log_ratio, ADVANTAGES, FULL, **CLIP)
    loss.sum().backward()
    assert log_probs.grad is not None
    for tensor in (loss.detach(), log_probs.grad):
        assert torch.equal(tensor[:, 0], tensor[:, 1])
    return loss[:, 0].tolist(), log_probs.grad[:, 0].tolist()


@pytest.mark.parametrize("name", ["grpo_clip", "dapo", "gspo"])
def test_a_log_ratio_of_100_is_clipped_for_a_good_token_and_held_at_20_for_a_bad_one(name):
    loss, gradient = loss_and_gradient(name, 100.0)
    assert loss == pytest.approx([-1.28 * 3, 3 * LARGEST])
    # d(ρA)/d log π = ρA: a larger ratio lowers the bad token's probability more strongly.
    assert gradient == pytest.approx([0.0, 3 * LARGEST])
    _, clipped = LOSSES[name](NEW, NEW - 100, ADVANTAGES, FULL, **CLIP)
    assert clipped.tolist() == [[True, True], [False, False]]


@pytest.mark.parametrize("name", ["grpo_clip", "dapo", "gspo"])
def test_a_log_ratio_of_minus_100_is_a_ratio_of_0(name):
    loss, gradient = loss_and_gradient(name, -100.0)
    assert loss == pytest.approx([0.0, 0.8 * 3])
    assert gradient == pytest.approx([0.0, 0.0])


@pytest.mark.parametrize(
    ("name", "weight"), [("cispo", 1.28), ("no_baseline", 1.0), ("reinforce_with_baseline", 1.0)]
)
def test_a_loss_with_a_constant_weight_is_the_score_function_at_any_ratio(name, weight):
    loss, gradient = loss_and_gradient(name, 100.0)
    assert loss == pytest.approx([3 * weight, -3 * weight])  # −w · A · log π
    assert gradient == pytest.approx([-3 * weight, 3 * weight])


def test_the_public_clipped_loss_is_finite_at_a_log_ratio_of_100():
    log_probs = NEW.clone().requires_grad_()
    loss, metadata = compute_grpo_clip_loss(ADVANTAGES[:, :1], log_probs, NEW - 100, 0.2)
    loss.sum().backward()
    assert loss[:, 0].tolist() == pytest.approx([-1.2 * 3, 3 * LARGEST])
    assert log_probs.grad[:, 0].tolist() == pytest.approx([0.0, 3 * LARGEST])
    assert metadata["clipped"].tolist() == [[1, 1], [0, 0]]


def test_ratios_and_weights_of_known_log_ratios():
    log_ratio = torch.tensor([[-200.0, 0.0, 20.0, 100.0]])
    mask = torch.tensor([[True, True, True, True]])
    ratio = token_ratio(log_ratio, torch.zeros(1, 4), mask)
    assert ratio.tolist()[0] == pytest.approx([0.0, 1.0, LARGEST, LARGEST])
    weight = importance_weight(log_ratio, torch.zeros(1, 4), mask, cap=2.0)
    assert weight.tolist() == [[0.0, 1.0, 2.0, 2.0]]
    # The mean log ratio is −20 with the first token, and 40 without it.
    without_first = torch.tensor([[False, True, True, True]])
    assert sequence_ratio(log_ratio, torch.zeros(1, 4), without_first).item() == pytest.approx(
        LARGEST
    )
    assert sequence_ratio(log_ratio, torch.zeros(1, 4), mask).item() == pytest.approx(math.exp(-20))


def test_only_tokens_beyond_the_bound_are_counted_and_none_off_the_mask():
    log_ratio = torch.tensor([[19.9, 20.0, 20.1, 100.0, -100.0, math.inf]])
    mask = torch.tensor([[True, True, True, True, True, False]])
    counted = bounded_tokens(log_ratio, torch.zeros(1, 6), mask)
    assert counted.tolist() == [[False, False, True, True, False, False]]


@pytest.mark.slow
@given(st.lists(st.floats(max_value=LOG_RATIO_MAX, width=32), min_size=1, max_size=8))
def test_up_to_the_bound_every_ratio_and_gradient_is_that_of_exp_bit_for_bit(values):
    plain = torch.tensor(values, requires_grad=True)
    bounded = torch.tensor(values, requires_grad=True)
    plain.exp().sum().backward()
    bounded_log_ratio(bounded).exp().sum().backward()
    assert bits(bounded_log_ratio(bounded)) == bits(plain)
    assert bits(bounded.grad) == bits(plain.grad)


@pytest.mark.slow
@given(st.floats(LOG_RATIO_MAX, 1e4, width=32))
def test_beyond_the_bound_ratio_and_gradient_stay_what_they_are_there(value):
    log_ratio = torch.tensor([value], requires_grad=True)
    ratio = bounded_log_ratio(log_ratio).exp()
    ratio.sum().backward()
    # The rounding error of a log ratio of 1e4 is 1e-3.
    assert ratio.item() == pytest.approx(LARGEST, rel=2e-3)
    assert log_ratio.grad.tolist() == ratio.tolist()


def test_k3_of_a_token_that_became_impossible_is_finite():
    log_probs = torch.tensor([[-101.0]], requires_grad=True)
    kl = KL_ESTIMATORS["k3"](log_probs, torch.tensor([[-1.0]]), torch.ones(1, 1))
    kl.sum().backward()
    assert kl.item() == pytest.approx(LARGEST - 1 - 20)
    assert log_probs.grad.item() == pytest.approx(1 - LARGEST)


def bits(tensor: torch.Tensor) -> list[int]:
    """Return the bits of each value. Unlike ==, they distinguish −0 from 0."""
    return tensor.detach().view(torch.int32).tolist()


# ---- Effective sample size -----------------------------------------------------------------------


def effective(log_ratios: list[list[float]], mask: list[list[int]] | None = None) -> float:
    """Return the effective sample size, as a fraction, of responses with these token log ratios."""
    log_ratio = torch.tensor(log_ratios, dtype=torch.float64)
    counted = torch.ones_like(log_ratio) if mask is None else torch.tensor(mask)
    behaviour = torch.full_like(log_ratio, -2.0)
    return effective_sample_fraction(behaviour + log_ratio, behaviour, counted.bool())


def test_effective_sample_size_by_hand():
    two = math.log(2)
    # The weights of the responses are 1/2 · 2 = 1, 2 and 2 · 2 = 4. So the effective sample size is
    # 7² / (1 + 4 + 16) = 7/3 of 3 responses.
    log_ratios = [[-two, two], [two, math.nan], [two, two]]
    assert effective(log_ratios, [[1, 1], [1, 0], [1, 1]]) == pytest.approx(7 / 9, abs=1e-6)
    # The weights 1 and 3 give 4² / (1 + 9) = 1.6 of 2 responses.
    assert effective([[0.0], [math.log(3)]]) == pytest.approx(0.8, abs=1e-6)


@pytest.mark.parametrize("log_ratio", [-1e4, -1.0, 0.0, 1.0, 1e4])
def test_equal_weights_are_a_full_sample(log_ratio):
    assert effective([[log_ratio, 0.0], [0.0, log_ratio]]) == pytest.approx(1, abs=1e-6)


def test_one_weight_that_outweighs_the_others_is_a_single_sample():
    # e^5000 is beyond the range of float64.
    assert effective([[5000.0], [0.0], [-5000.0], [1.0]]) == pytest.approx(1 / 4, abs=1e-6)


def test_responses_without_tokens_are_no_part_of_the_sample():
    assert effective([[0.0], [9.0]], [[1], [0]]) == 1
    assert effective([[3.0], [9.0]], [[0], [0]]) == 1


@given(st.lists(st.floats(-50, 50), min_size=1, max_size=8))
def test_effective_sample_size_is_between_one_and_all_responses(log_ratios):
    fraction = effective([[value] for value in log_ratios])
    assert 1 / len(log_ratios) - 1e-9 <= fraction <= 1 + 1e-9
