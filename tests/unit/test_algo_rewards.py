"""What is taken off rewards for the length of a response."""

import pytest
import torch

from grpo_trainable.algo import length_deviation, overlong_penalty


def test_the_penalty_grows_over_the_last_tokens():
    lengths = torch.tensor([0, 6, 7, 8, 10])
    # (7 − 6)/4, (8 − 6)/4, (10 − 6)/4.
    assert overlong_penalty(lengths, longest=10, buffer=4).tolist() == [0, 0, 0.25, 0.5, 1]


@pytest.mark.parametrize(("buffer", "expected"), [(1, [0, 0, 1]), (10, [0.1, 0.9, 1])])
def test_the_buffer_may_be_one_token_or_all(buffer, expected):
    penalty = overlong_penalty(torch.tensor([1, 9, 10]), longest=10, buffer=buffer)
    assert penalty.tolist() == pytest.approx(expected)


def test_a_response_may_be_too_long_or_too_short():
    assert length_deviation(torch.tensor([3, 10, 12]), target=10).tolist() == [7, 0, 2]
