"""Masked sums and means, and the accumulation of microbatches in a gradient step."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_trainable.algo import (
    AGGREGATIONS,
    aggregate,
    loss_denominator,
    masked_mean,
    masked_normalize,
    masked_row_mean,
    masked_sum,
)

VALUES = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
MASK = torch.tensor([[1, 0, 1], [0, 0, 1]])


def test_masked_mean_of_known_numbers():
    assert masked_mean(VALUES, MASK).item() == pytest.approx(10 / 3)
    assert masked_mean(VALUES, MASK, dim=1).tolist() == [2.0, 6.0]
    column_means = masked_mean(VALUES, MASK, dim=0).tolist()
    assert column_means[0] == 1.0
    assert math.isnan(column_means[1])
    assert column_means[2] == 4.5


def test_masked_mean_of_nothing_is_nan():
    assert math.isnan(masked_mean(VALUES, torch.zeros_like(MASK)).item())


def test_masked_normalize_divides_the_masked_sum_by_the_constant():
    assert masked_normalize(VALUES, MASK).item() == 10.0
    assert masked_normalize(VALUES, MASK, dim=1, constant_normalizer=4.0).tolist() == [1.0, 1.5]
    assert masked_normalize(VALUES, MASK, 0, 2.0).tolist() == [0.5, 0.0, 4.5]


def test_masked_row_mean_of_an_empty_row_is_zero():
    mask = torch.tensor([[True, False, True], [False, False, False]])
    assert masked_row_mean(VALUES, mask).tolist() == [2.0, 0.0]


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.float32])
def test_any_dtype_of_mask_selects_the_same(mask_dtype):
    assert masked_sum(VALUES, MASK.to(mask_dtype)).item() == 10.0
    assert masked_mean(VALUES, MASK.to(mask_dtype), dim=1).tolist() == [2.0, 6.0]


@pytest.mark.parametrize("garbage", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("reduce", [masked_sum, masked_mean, masked_normalize, masked_row_mean])
def test_garbage_off_the_mask_reaches_neither_value_nor_gradient(reduce, garbage):
    clean = VALUES.clone().requires_grad_()
    dirty = VALUES.masked_fill(MASK == 0, garbage).requires_grad_()
    for tensor in (clean, dirty):
        reduce(tensor, MASK).sum().backward()
    assert torch.equal(reduce(clean, MASK), reduce(dirty, MASK))
    assert torch.equal(clean.grad, dirty.grad)


def test_aggregations_of_known_numbers():
    expected = {
        "sequence_mean": ((1 + 3) / 2 + 6) / 2,
        "token_mean": (1 + 3 + 6) / 3,
        "constant": (1 + 3 + 6) / (2 * 4),
    }
    for aggregation in AGGREGATIONS:
        denominator = loss_denominator(aggregation, MASK, max_tokens=4)
        loss = aggregate(VALUES, MASK, aggregation, denominator)
        assert loss.item() == pytest.approx(expected[aggregation])


def test_an_empty_response_counts_as_a_response_of_loss_zero():
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    expected = {"sequence_mean": 1.5 / 2, "token_mean": 1.5, "constant": 3 / 6}
    for aggregation in AGGREGATIONS:
        denominator = loss_denominator(aggregation, mask, max_tokens=3)
        loss = aggregate(VALUES, mask, aggregation, denominator)
        assert loss.item() == pytest.approx(expected[aggregation])


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_step_without_any_token_has_loss_zero(aggregation):
    mask = torch.zeros_like(MASK)
    loss = aggregate(VALUES, mask, aggregation, loss_denominator(aggregation, mask, 3))
    assert loss.item() == 0.0


def test_unknown_aggregation_is_a_value_error_that_names_it():
    with pytest.raises(ValueError, match="'median'"):
        loss_denominator("median", MASK, 3)
    with pytest.raises(ValueError, match="'median'"):
        aggregate(VALUES, MASK, "median", 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_split_into_microbatches_gives_the_same_loss_and_gradient(aggregation, data):
    rows = data.draw(st.integers(1, 9), label="rows")
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31), label="seed"))
    values = torch.randn(rows, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(rows, 5, generator=generator) < 0.6  # with holes and empty rows
    cuts = data.draw(st.sets(st.integers(1, rows), max_size=rows), label="cuts")
    sizes = torch.tensor([0, *sorted(cuts | {rows})]).diff().tolist()
    denominator = loss_denominator(aggregation, mask, max_tokens=5)

    whole = values.clone().requires_grad_()
    loss = aggregate(whole.square(), mask, aggregation, denominator)
    loss.backward()
    split = values.clone().requires_grad_()
    split_loss = 0.0
    for micro, micro_mask in zip(split.split(sizes), mask.split(sizes), strict=True):
        micro_loss = aggregate(micro.square(), micro_mask, aggregation, denominator)
        micro_loss.backward()
        split_loss += micro_loss.item()

    assert split_loss == pytest.approx(loss.item(), abs=1e-12)
    torch.testing.assert_close(split.grad, whole.grad, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("aggregation", "short", "long"),
    [("sequence_mean", 1 / 2, 1 / 6), ("token_mean", 1 / 4, 1 / 4), ("constant", 1 / 8, 1 / 8)],
)
def test_what_a_token_of_a_short_and_of_a_long_response_weighs(aggregation, short, long):
    mask = torch.tensor([[1, 0, 0], [1, 1, 1]])
    losses = torch.zeros(2, 3, requires_grad=True)
    denominator = loss_denominator(aggregation, mask, max_tokens=4)
    aggregate(losses, mask, aggregation, denominator).backward()
    expected = torch.tensor([[short, 0, 0], [long, long, long]])
    torch.testing.assert_close(losses.grad, expected)
