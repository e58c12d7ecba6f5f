"""KL estimators."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_trainable.algo import KL_ESTIMATORS, kl_penalty, sequence_kl, steered_coefficient

pytestmark = pytest.mark.numerics

D = torch.tensor([[math.log(2), -1.0, 0.5], [0.25, 3.0, -3.0]])
REFERENCE = torch.full((2, 3), -2.0)
MASK = torch.tensor([[1, 1, 0], [1, 0, 0]])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("k1", [[math.log(2), -1.0, 0], [0.25, 0, 0]]),
        ("k2", [[math.log(2) ** 2 / 2, 0.5, 0], [0.03125, 0, 0]]),
        ("k3", [[math.log(2) - 0.5, math.e - 2, 0], [math.exp(-0.25) - 0.75, 0, 0]]),
    ],
)
def test_estimators_of_known_differences(name, expected):
    kl = KL_ESTIMATORS[name](REFERENCE + D, REFERENCE, MASK)
    torch.testing.assert_close(kl, torch.tensor(expected))


def test_sequence_kl_sums_a_response_and_averages_the_responses():
    expected = (math.log(2) - 1.0 + 0.25) / 2
    assert sequence_kl(REFERENCE + D, REFERENCE, MASK, "k1").item() == pytest.approx(expected)


def test_sequence_kl_does_not_count_empty_responses():
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    expected = math.log(2) - 1.0
    assert sequence_kl(REFERENCE + D, REFERENCE, mask, "k1").item() == pytest.approx(expected)
    assert sequence_kl(REFERENCE, REFERENCE, torch.zeros(2, 3), "k3").item() == 0.0


@pytest.mark.slow
@given(exponent=st.floats(-8, 1.5), sign=st.sampled_from([-1, 1]))
@settings(deadline=None)
def test_k2_and_k3_are_never_negative_and_agree_near_zero(exponent, sign):
    d = torch.tensor([[sign * 10**exponent]])
    mask = torch.ones(1, 1)
    k2, k3 = (KL_ESTIMATORS[name](d, torch.zeros(1, 1), mask) for name in ("k2", "k3"))
    assert k2.item() >= 0
    assert k3.item() >= 0
    if -3 < exponent < -2:
        assert k3.item() == pytest.approx(k2.item(), rel=0.02)


def test_the_mean_of_k3_and_of_k1_over_the_distribution_is_the_kl():
    policy, reference = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    exact = (policy * (policy / reference).log()).sum().item()
    for name in ("k1", "k3"):
        kl = KL_ESTIMATORS[name](policy.log(), reference.log(), torch.ones(3))
        assert (policy * kl).sum().item() == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize("garbage", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", list(KL_ESTIMATORS))
def test_padding_values_never_change_kl_or_gradient(name, garbage):
    results = []
    for fill in (0.0, garbage):
        log_probs = (REFERENCE + D).masked_fill(MASK == 0, fill).requires_grad_()
        reference = REFERENCE.masked_fill(MASK == 0, -fill)
        kl = sequence_kl(log_probs, reference, MASK, name)
        kl.backward()
        results.append((kl.detach(), log_probs.grad))
    (clean_kl, clean_grad), (dirty_kl, dirty_grad) = results
    assert torch.equal(clean_kl, dirty_kl)
    assert torch.equal(clean_grad, dirty_grad)


@pytest.mark.slow
def test_the_gradient_of_k3_is_one_minus_the_inverse_ratio():
    log_probs = (REFERENCE + D).requires_grad_()
    KL_ESTIMATORS["k3"](log_probs, REFERENCE, torch.ones(2, 3)).sum().backward()
    torch.testing.assert_close(log_probs.grad, 1 - torch.exp(-D))


# ---- KL as a penalty on the reward, and the control of its coefficient ---------------------------


def test_the_penalty_of_a_response_is_the_sum_of_its_differences():
    penalty = kl_penalty(REFERENCE + D, REFERENCE, MASK)
    torch.testing.assert_close(penalty, torch.tensor([math.log(2) - 1.0, 0.25]))
    garbage = REFERENCE.masked_fill(MASK == 0, math.nan)
    torch.testing.assert_close(kl_penalty(garbage + D, garbage, MASK), penalty)


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (6.0, 0.5),  # on target
        (6.6, 0.5 * 1.01),  # a tenth above the target: the factor is 1 + 0.1 · 0.1
        (60.0, 0.5 * 1.02),  # an error is clipped to a fifth: 1 + 0.1 · 0.2
        (0.0, 0.5 * 0.98),
        (-3.0, 0.5 * 0.98),  # an estimate of the KL can be negative
        (math.nan, 0.5),
        (math.inf, 0.5),
    ],
)
def test_a_coefficient_is_steered_towards_its_target(kl, expected):
    assert steered_coefficient(0.5, kl, target=6.0, gain=0.1) == pytest.approx(expected)


def test_the_expected_gradient_in_the_loss_is_that_of_the_kl_only_for_k2():
    """Average the gradients of all three actions of a state, weighted by their probabilities."""
    logits = torch.tensor([1.0, -0.5, 0.3], dtype=torch.float64, requires_grad=True)
    log_probs = logits.log_softmax(0)
    reference = torch.zeros(3, dtype=torch.float64).log_softmax(0)
    mask = torch.ones(3, 1, dtype=torch.bool)
    kl = (log_probs.exp() * (log_probs - reference)).sum()
    (of_the_kl,) = torch.autograd.grad(kl, logits, retain_graph=True)

    expected = {}
    for name, estimator in KL_ESTIMATORS.items():
        of_actions = estimator(log_probs[:, None], reference[:, None], mask)[:, 0]
        total = (log_probs.exp().detach() * of_actions).sum()
        (expected[name],) = torch.autograd.grad(total, logits, retain_graph=True)
    assert expected["k1"].abs().max() < 1e-15
    torch.testing.assert_close(expected["k2"], of_the_kl, rtol=1e-12, atol=0)
    assert (expected["k3"] @ of_the_kl) > 0
    assert (expected["k3"] - of_the_kl).abs().max() > 0.01
