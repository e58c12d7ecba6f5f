"""Losses, the tokens that they clip, and the microbatch step."""

import math

import pytest
import torch
from bound_losses import LOSSES
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_trainable.algo import (
    AGGREGATIONS,
    aggregate,
    compute_grpo_clip_loss,
    compute_naive_policy_gradient_loss,
    compute_policy_gradient_loss,
    grpo_microbatch_train_step,
    importance_weight,
    loss_denominator,
)

pytestmark = pytest.mark.numerics

CLIP = {"clip_low": 0.2, "clip_high": 0.28}
GARBAGE = [0.0, 7.0, math.inf, -math.inf, math.nan]

# One row for each sign of A. The ratios are 0.5, 1, 1.25, 2.
OLD = torch.full((2, 4), -1.0)
NEW = OLD + torch.tensor([0.5, 1.0, 1.25, 2.0]).log()
ADVANTAGES = torch.tensor([[3.0], [-3.0]]).expand(2, 4)
FULL = torch.ones(2, 4, dtype=torch.bool)


def batch_of(seed: int, rows: int = 4, length: int = 6):
    """Return log-probs, old log-probs, row advantages, and a mask with holes and an empty row."""
    generator = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(rows, length, generator=generator)
    new = old + 0.5 * torch.randn(rows, length, generator=generator)
    advantages = torch.randn(rows, 1, generator=generator).expand(rows, length).clone()
    mask = torch.rand(rows, length, generator=generator) < 0.7
    mask[0] = False
    return new, old, advantages, mask


# ---- Formulas --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["grpo_clip", "dapo", "ppo"])
def test_clipped_losses_of_known_ratios(name):
    loss, _ = LOSSES[name](NEW, OLD, ADVANTAGES, FULL, **CLIP)
    expected = [[-1.5, -3.0, -3.75, -3.84], [2.4, 3.0, 3.75, 6.0]]
    torch.testing.assert_close(loss, torch.tensor(expected))


@pytest.mark.parametrize("name", ["no_baseline", "reinforce_with_baseline"])
def test_policy_gradient_loss_is_minus_advantage_times_log_prob(name):
    loss, _ = LOSSES[name](NEW, OLD, ADVANTAGES, FULL, **CLIP)
    torch.testing.assert_close(loss, -ADVANTAGES * NEW)


def test_cispo_weighs_the_score_function_of_every_token_by_the_clipped_ratio():
    log_probs = NEW.clone().requires_grad_()
    loss, _ = LOSSES["cispo"](log_probs, OLD, ADVANTAGES, FULL, **CLIP)
    weight = torch.tensor([0.5, 1.0, 1.25, 1.28])
    torch.testing.assert_close(loss.detach(), -weight * ADVANTAGES * NEW)
    loss.sum().backward()
    torch.testing.assert_close(log_probs.grad, -weight * ADVANTAGES)


def test_gspo_uses_the_geometric_mean_of_the_masked_ratios():
    mask = torch.tensor([[True, False, False, True], [False, False, True, True]])
    # √(0.5 · 2) = 1 is within the clip range. √(1.25 · 2) = 1.58 is above it, but for A < 0 the
    # loss does not clip a ratio above the range.
    loss, _ = LOSSES["gspo"](NEW, OLD, ADVANTAGES, mask, **CLIP)
    expected = torch.tensor([[-3.0, 0, 0, -3.0], [0, 0, 3 * math.sqrt(2.5), 3 * math.sqrt(2.5)]])
    torch.testing.assert_close(loss, expected)


def test_a_token_is_clipped_only_on_the_side_that_its_advantage_favours():
    def clipped(name):
        return LOSSES[name](NEW, OLD, ADVANTAGES, FULL, **CLIP)[1].tolist()

    above, below, none = [False] * 3 + [True], [True] + [False] * 3, [False] * 4
    assert clipped("grpo_clip") == clipped("dapo") == [above, below]
    assert clipped("cispo") == [above, above]
    assert clipped("gspo") == [none, none]  # the ratio of both rows is 1.06
    assert clipped("reinforce_with_baseline") == clipped("no_baseline") == [none, none]


def test_a_gspo_row_is_clipped_as_a_whole():
    mask = torch.tensor([[False, False, True, True]] * 2)
    _, clipped = LOSSES["gspo"](NEW, OLD, ADVANTAGES, mask, **CLIP)
    assert clipped.tolist() == [[False, False, True, True], [False] * 4]


@given(seed=st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
def test_clipped_tokens_are_those_that_give_no_gradient(seed):
    new, old, advantages, mask = batch_of(seed)
    new.requires_grad_()
    loss, clipped = LOSSES["grpo_clip"](new, old, advantages, mask, **CLIP)
    loss.sum().backward()
    assert torch.equal(new.grad == 0, clipped | ~mask)


# ---- Invariants ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(LOSSES))
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_on_policy_gradients_agree_for_every_loss(name, aggregation):
    new, _, advantages, mask = batch_of(seed=1)
    denominator = loss_denominator(aggregation, mask, max_tokens=6)
    gradients = []
    for loss_name in ("reinforce_with_baseline", name):
        log_probs = new.clone().requires_grad_()
        token_loss, _ = LOSSES[loss_name](log_probs, new, advantages, mask, **CLIP)
        aggregate(token_loss, mask, aggregation, denominator).backward()
        gradients.append(log_probs.grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(LOSSES))
@given(
    seed=st.integers(0, 2**31), garbage=st.lists(st.sampled_from(GARBAGE), min_size=3, max_size=3)
)
@settings(max_examples=12, deadline=None)
def test_padding_values_never_change_loss_gradient_or_clipped_tokens(name, seed, garbage):
    new, old, advantages, mask = batch_of(seed)

    def run(fills):
        log_probs, old_log_probs, filled_advantages = (
            tensor.masked_fill(~mask, fill)
            for tensor, fill in zip((new, old, advantages), fills, strict=True)
        )
        log_probs.requires_grad_()
        tensors = (log_probs, old_log_probs, filled_advantages, mask)
        token_loss, clipped = LOSSES[name](*tensors, **CLIP)
        token_loss.sum().backward()
        return token_loss.detach(), log_probs.grad, clipped

    clean, dirty = run([0.0, 0.0, 0.0]), run(garbage)
    for clean_tensor, dirty_tensor in zip(clean, dirty, strict=True):
        assert clean_tensor.shape == mask.shape
        assert torch.equal(clean_tensor, dirty_tensor)
        assert clean_tensor[~mask].eq(0).all()


@pytest.mark.parametrize("name", list(LOSSES))
def test_zero_advantage_gives_zero_loss_and_gradient(name):
    new, old, advantages, mask = batch_of(seed=2)
    new.requires_grad_()
    loss, clipped = LOSSES[name](new, old, torch.zeros_like(advantages), mask, **CLIP)
    loss.sum().backward()
    assert loss.sum().item() == 0.0
    assert new.grad.eq(0).all()
    # CISPO clips its weight whatever the advantage is.
    assert name == "cispo" or not clipped.any()


@pytest.mark.parametrize("name", list(LOSSES))
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_any_split_into_microbatches_gives_the_same_gradient(name, aggregation):
    tensors = batch_of(seed=3, rows=6)
    mask = tensors[-1]
    denominator = loss_denominator(aggregation, mask, max_tokens=6)

    def gradient(split_sizes):
        log_probs = tensors[0].clone().requires_grad_()
        parts = [t.split(split_sizes) for t in (log_probs, *tensors[1:])]
        for micro in zip(*parts, strict=True):
            token_loss, _ = LOSSES[name](*micro, **CLIP)
            aggregate(token_loss, micro[-1], aggregation, denominator).backward()
        return log_probs.grad

    whole = gradient([6])
    for sizes in ([2, 2, 2], [1, 5], [3, 2, 1]):
        torch.testing.assert_close(gradient(sizes), whole, rtol=1e-6, atol=1e-8)


# ---- The named building blocks ---------------------------------------------------------------


def test_naive_policy_gradient_loss_broadcasts_the_advantage_over_the_row():
    loss = compute_naive_policy_gradient_loss(torch.tensor([[2.0], [-1.0]]), NEW)
    torch.testing.assert_close(loss, torch.stack([-2 * NEW[0], NEW[1]]))


def test_grpo_clip_loss_of_known_ratios_and_its_clip_indicator():
    loss, metadata = compute_grpo_clip_loss(ADVANTAGES[:, :1], NEW, OLD, 0.2)
    expected = torch.tensor([[-1.5, -3.0, -3.6, -3.6], [2.4, 3.0, 3.75, 6.0]])
    torch.testing.assert_close(loss, expected)
    assert metadata["clipped"].tolist() == [[0, 0, 1, 1], [1, 0, 0, 0]]


def test_policy_gradient_loss_dispatches_to_the_named_loss():
    column = ADVANTAGES[:, :1]
    naive = compute_naive_policy_gradient_loss(column, NEW)
    for loss_type, argument in (
        ("no_baseline", "raw_rewards"),
        ("reinforce_with_baseline", "advantages"),
    ):
        loss, metadata = compute_policy_gradient_loss(NEW, loss_type, **{argument: column})
        assert torch.equal(loss, naive)
        assert metadata == {}
    loss, metadata = compute_policy_gradient_loss(
        NEW, "grpo_clip", advantages=column, old_log_probs=OLD, cliprange=0.2
    )
    expected_loss, expected_metadata = compute_grpo_clip_loss(column, NEW, OLD, 0.2)
    assert torch.equal(loss, expected_loss)
    assert torch.equal(metadata["clipped"], expected_metadata["clipped"])


@pytest.mark.parametrize(
    ("loss_type", "missing"),
    [
        ("no_baseline", "raw_rewards"),
        ("reinforce_with_baseline", "advantages"),
        ("grpo_clip", "advantages"),
        ("grpo_clip", "old_log_probs"),
        ("grpo_clip", "cliprange"),
    ],
)
def test_a_missing_argument_is_a_value_error_that_names_it(loss_type, missing):
    column = ADVANTAGES[:, :1]
    arguments = {
        "raw_rewards": column, "advantages": column, "old_log_probs": OLD, "cliprange": 0.2
    }  # fmt: skip
    del arguments[missing]
    with pytest.raises(ValueError, match=f"'{loss_type}' needs the argument {missing}"):
        compute_policy_gradient_loss(NEW, loss_type, **arguments)


def test_an_unknown_loss_type_is_a_value_error_that_names_it():
    with pytest.raises(ValueError, match="'a2c'"):
        compute_policy_gradient_loss(NEW, "a2c")


# ---- The microbatch step ---------------------------------------------------------------------


def test_microbatch_step_of_known_numbers():
    log_probs = torch.tensor([[-1.0, -2.0, -9.0], [-4.0, -9.0, -9.0]], requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    loss, _ = grpo_microbatch_train_step(
        log_probs, mask, 2, "reinforce_with_baseline", advantages=torch.tensor([[2.0], [-1.0]])
    )
    # The rows give 2 · (1 + 2) / 2 = 3 and −1 · 4 = −4. Their mean, −0.5, is divided by the number
    # of accumulation steps, 2.
    assert loss.item() == pytest.approx(-0.25)
    expected = torch.tensor([[-2 / 2, -2 / 2, 0], [1.0, 0, 0]]) / (2 * 2)
    torch.testing.assert_close(log_probs.grad, expected)


def test_equal_microbatches_add_up_to_the_gradient_of_the_whole_batch():
    new, old, advantages, mask = batch_of(seed=4, rows=4)

    def gradient(microbatch_rows):
        log_probs = new.clone().requires_grad_()
        parts = [t.split(microbatch_rows) for t in (log_probs, mask, advantages[:, :1], old)]
        for part, part_mask, part_advantages, part_old in zip(*parts, strict=True):
            grpo_microbatch_train_step(
                part, part_mask, 4 // microbatch_rows, "grpo_clip",
                advantages=part_advantages, old_log_probs=part_old, cliprange=0.2,
            )  # fmt: skip
        return log_probs.grad

    torch.testing.assert_close(gradient(1), gradient(4))
    torch.testing.assert_close(gradient(2), gradient(4))


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("loss_type", ["no_baseline", "reinforce_with_baseline", "grpo_clip"])
def test_microbatch_step_ignores_padding_and_empty_rows(loss_type, garbage):
    new, old, advantages, mask = batch_of(seed=5)
    column = advantages[:, :1]

    def run(fill):
        log_probs = new.masked_fill(~mask, fill).requires_grad_()
        loss, metadata = grpo_microbatch_train_step(
            log_probs, mask, 1, loss_type, column, column, old.masked_fill(~mask, fill), 0.2
        )
        return loss, log_probs.grad, *metadata.values()

    clean, dirty = run(-1.0), run(garbage)
    for clean_tensor, dirty_tensor in zip(clean, dirty, strict=True):
        assert torch.equal(clean_tensor, dirty_tensor)
        assert clean_tensor.isfinite().all()

    # An empty row adds 0 but counts as a row. Without the empty row, the loss is 4/3 as large.
    filled = mask.any(dim=-1)
    log_probs = new[filled].requires_grad_()
    loss, _ = grpo_microbatch_train_step(
        log_probs, mask[filled], 1, loss_type, column[filled], column[filled], old[filled], 0.2
    )
    torch.testing.assert_close(clean[0] * len(mask) / filled.sum(), loss)


def test_a_microbatch_of_empty_rows_has_loss_zero_and_no_gradient():
    log_probs = torch.full((2, 3), math.nan, requires_grad=True)
    loss, _ = grpo_microbatch_train_step(
        log_probs, torch.zeros(2, 3), 1, "no_baseline", raw_rewards=torch.ones(2, 1)
    )
    assert loss.item() == 0.0
    assert log_probs.grad.eq(0).all()


def test_importance_weight_is_the_ratio_up_to_its_cap():
    behaviour = torch.full((1, 5), -2.0)
    start = behaviour + torch.tensor([0.5, 1.0, 1.25, 4.0, 1.0]).log()
    start[0, 4] = math.nan
    mask = torch.tensor([[True, True, True, True, False]])
    weight = importance_weight(start, behaviour, mask, cap=2.0)
    assert weight.tolist()[0] == pytest.approx([0.5, 1.0, 1.25, 2.0, 1.0])
