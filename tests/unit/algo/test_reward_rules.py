"""Changes to rewards before advantages: weighted parts and the length penalty."""

import pytest
import torch

from grpo_trainable.algo import ADVANTAGES, length_deviation, overlong_penalty, weighted_parts


def test_the_penalty_grows_over_the_last_tokens():
    lengths = torch.tensor([0, 6, 7, 8, 10])
    # The last three penalties are (7 − 6)/4, (8 − 6)/4 and (10 − 6)/4.
    assert overlong_penalty(lengths, longest=10, buffer=4).tolist() == [0, 0, 0.25, 0.5, 1]


@pytest.mark.parametrize(("buffer", "expected"), [(1, [0, 0, 1]), (10, [0.1, 0.9, 1])])
def test_the_buffer_may_be_one_token_or_all(buffer, expected):
    penalty = overlong_penalty(torch.tensor([1, 9, 10]), longest=10, buffer=buffer)
    assert penalty.tolist() == pytest.approx(expected)


def test_parts_are_summed_by_their_weights():
    # 1 · 0 + 0.5 · 1 + 2 · 0 = 0.5 and 1 · 1 + 0.5 · 1 + 2 · 4 = 9.5.
    parts = torch.tensor([[0.0, 1.0, 0.0], [1.0, 1.0, 4.0]])
    weights = torch.tensor([1.0, 0.5, 2.0])
    raw = weighted_parts(parts, weights, normalize=False, eps=1e-8)
    assert raw.tolist() == [0.5, 9.5]
    # Two different values are √½ standard deviations below and above their mean. Two equal values
    # are at their mean. So the weighted sums are ∓(1 + 2) · √½ = ∓2.1213203.
    normalized = weighted_parts(parts, weights, normalize=True, eps=1e-8)
    assert normalized.tolist() == pytest.approx([-2.1213203, 2.1213203])


def test_gdpo_tells_apart_what_the_sum_of_the_parts_does_not():
    # There are two groups of two responses, and each response has two reward parts of 0 or 1. The
    # second response is better by one part in the first group and by both parts in the second.
    groups = torch.tensor([[[0.0, 1.0], [1.0, 1.0]], [[0.0, 0.0], [1.0, 1.0]]])
    weights = torch.ones(2)
    summed = torch.stack([weighted_parts(g, weights, normalize=False, eps=1e-8) for g in groups])
    assert (
        ADVANTAGES["group_std"](summed, eps=1e-8).tolist()
        == [pytest.approx([-0.7071068, 0.7071068])] * 2
    )
    # The normalized sums are ∓√½ and ∓2√½. Over the batch, their mean is 0, and their variance is
    # (½ + ½ + 2 + 2)/3 = 5/3.
    combined = torch.stack([weighted_parts(g, weights, normalize=True, eps=1e-8) for g in groups])
    assert ADVANTAGES["batch"](combined, eps=1e-8).tolist() == [
        pytest.approx([-0.5477226, 0.5477226]),
        pytest.approx([-1.0954451, 1.0954451]),
    ]


@pytest.mark.parametrize("value", [0.0, 0.1, 1e6])
def test_a_part_that_is_the_same_for_all_counts_nothing_when_normalised(value):
    parts = torch.tensor([[0.0, value], [1.0, value], [1.0, value]])
    both = weighted_parts(parts, torch.tensor([1.0, 3.0]), normalize=True, eps=1e-8)
    alone = weighted_parts(parts[:, :1], torch.tensor([1.0]), normalize=True, eps=1e-8)
    assert both.equal(alone)


def test_a_response_may_be_too_long_or_too_short():
    assert length_deviation(torch.tensor([3, 10, 12]), target=10).tolist() == [7, 0, 2]
