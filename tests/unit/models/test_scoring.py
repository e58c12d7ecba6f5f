from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from policies import sharpened
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from grpo_trainable.algo import AGGREGATIONS, LOSSES, aggregate, loss_denominator
from grpo_trainable.models import scoring
from grpo_trainable.models.model_config import ModelConfig
from grpo_trainable.models.parameters import unique_parameters
from grpo_trainable.models.scoring import response_log_probs
from grpo_trainable.models.transformer import TransformerLM
from grpo_trainable.protocol.rollout import TrainBatch

pytestmark = pytest.mark.numerics

VOCAB, EOS, MAX_NEW = 50, 0, 9
LAW = {"temperature": 0.8, "min_new_tokens": 3, "end_ids": (EOS,)}


def policy(*, tied_head: bool = True, seed: int = 0) -> TransformerLM:
    config = ModelConfig(
        vocab_size=VOCAB,
        context_length=16,
        d_model=16,
        num_layers=1,
        num_heads=2,
        d_ff=24,
        tied_head=tied_head,
    )
    return sharpened(config, seed)


@pytest.fixture
def batch() -> TrainBatch:
    """Return seven rows, which include a hole, an empty response and padding."""
    generator = torch.Generator().manual_seed(0)
    rows, width = 7, 13
    starts, lengths = [2, 0, 5, 3, 1, 4, 6], [9, 5, 8, 0, 1, 6, 7]
    mask = torch.zeros(rows, width, dtype=torch.bool)
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        mask[row, start : start + length] = True
    mask[5, 6] = False
    ids = torch.randint(1, VOCAB, (rows, width + 1), generator=generator)
    return TrainBatch(
        input_ids=ids[:, :-1],
        target_ids=ids[:, 1:],
        response_mask=mask,
        behaviour_log_probs=-4 * torch.rand(rows, width, generator=generator) * mask,
        advantages=torch.randn(rows, 1, generator=generator) * mask,
    )


def plain(model: TransformerLM, batch: TrainBatch, law: dict) -> tuple[Tensor, Tensor]:
    """Compute log-probs and entropy at every position with the textbook formulas."""
    logits = model(batch.input_ids) / law["temperature"]
    sampled_before = batch.response_mask.cumsum(dim=1) - batch.response_mask.int()
    early = sampled_before < law["min_new_tokens"] - 1
    forbidden = early[..., None] & torch.isin(torch.arange(VOCAB), torch.tensor(law["end_ids"]))
    log_probs = logits.masked_fill(forbidden, -torch.inf).log_softmax(dim=-1)
    entropy = -(log_probs.exp() * log_probs.masked_fill(forbidden, 0.0)).sum(dim=-1)
    return log_probs.gather(-1, batch.target_ids[..., None])[..., 0], entropy


def scored(model: TransformerLM, batch: TrainBatch, law: dict = LAW) -> tuple[Tensor, Tensor]:
    return response_log_probs(model, batch.input_ids, batch.target_ids, batch.response_mask, **law)


def gradient(model: TransformerLM) -> dict[str, Tensor]:
    """Return the gradient and clear it."""
    grads = {}
    for name, parameter in unique_parameters(model).items():
        assert parameter.grad is not None
        grads[name], parameter.grad = parameter.grad, None
    return grads


def clipped_loss(
    model: TransformerLM, batch: TrainBatch, aggregation: str, denominator: float
) -> Tensor:
    log_probs, _ = scored(model, batch)
    token_loss, _ = LOSSES["grpo_clip"](
        log_probs,
        batch.behaviour_log_probs,
        batch.advantages,
        batch.response_mask,
        clip_low=0.2,
        clip_high=0.2,
    )
    return aggregate(token_loss, batch.response_mask, aggregation, denominator)


def loss_of(
    model: TransformerLM, batch: TrainBatch, aggregation: str, parts: Sequence[Tensor]
) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradient of one gradient step, in microbatches of the rows in `parts`."""
    denominator = loss_denominator(aggregation, batch.response_mask, MAX_NEW)
    total = 0.0
    for rows in parts:
        micro = batch.select(rows)
        loss = clipped_loss(model, micro, aggregation, denominator)
        loss.backward()
        total += loss.item()
    return total, gradient(model)


WHOLE = [torch.arange(7)]


# ---- Values ----------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("min_new_tokens", [1, 2, 100])
@pytest.mark.parametrize("chunk", [64, 5])
def test_log_probs_and_entropy_equal_log_softmax(
    monkeypatch, batch, temperature, min_new_tokens, chunk
):
    monkeypatch.setattr(scoring, "CHUNK", chunk)
    model = policy()
    law = {"temperature": temperature, "min_new_tokens": min_new_tokens, "end_ids": (EOS, 49)}
    log_probs, entropy = scored(model, batch, law)
    expected, expected_entropy = plain(model, batch, law)
    mask = batch.response_mask
    torch.testing.assert_close(log_probs[mask], expected[mask], rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy[mask], expected_entropy[mask], rtol=0, atol=1e-5)
    assert (log_probs[~mask] == 0).all()
    assert (entropy[~mask] == 0).all()
    assert not entropy.requires_grad


def test_uniform_logits_give_log_of_the_tokens_that_are_possible(batch):
    model = policy()
    with torch.no_grad():
        model.final_norm.weight.zero_()
    log_probs, entropy = scored(model, batch)
    # Row 0: the first two of its nine tokens cannot be end-of-text.
    possible = torch.tensor([VOCAB - 1] * 2 + [VOCAB] * 7).log()
    torch.testing.assert_close(log_probs[0, 2:11], -possible)
    torch.testing.assert_close(entropy[0, 2:11], possible)


def test_a_batch_without_response_tokens_scores_zero(batch):
    model = policy()
    log_probs, entropy = scored(model, batch.select(torch.tensor([3])))
    assert log_probs.tolist() == entropy.tolist() == [[0.0]]
    log_probs.sum().backward()
    assert all((grad == 0).all() for grad in gradient(model).values())


# ---- Gradients -------------------------------------------------------------------------------


@pytest.mark.parametrize("tied_head", [True, False])
@pytest.mark.parametrize("law", [LAW, {**LAW, "temperature": 1.7, "min_new_tokens": 1}])
def test_the_gradient_equals_autograd_through_log_softmax(monkeypatch, batch, tied_head, law):
    monkeypatch.setattr(scoring, "CHUNK", 5)
    model = policy(tied_head=tied_head).double()
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(batch.response_mask.shape, generator=generator) * batch.response_mask
    (scored(model, batch, law)[0] * weight).sum().backward()
    ours = gradient(model)
    (plain(model, batch, law)[0] * weight).sum().backward()
    for name, expected in gradient(model).items():
        torch.testing.assert_close(ours[name], expected, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_targets_off_the_mask_and_ids_after_it_never_change_loss_or_gradient(batch, aggregation):
    model = policy()
    clean = loss_of(model, batch, aggregation, WHOLE)
    mask = batch.response_mask
    later = mask.flip(1).cumsum(dim=1).flip(1)  # number of response tokens from each position on
    for ids, target in ((EOS, -100), (VOCAB - 1, 10**9)):
        dirty = TrainBatch(
            input_ids=batch.input_ids.masked_fill(later == 0, ids),
            target_ids=batch.target_ids.masked_fill(~mask, target),
            response_mask=mask,
            behaviour_log_probs=batch.behaviour_log_probs.masked_fill(~mask, torch.nan),
            advantages=batch.advantages.masked_fill(~mask, torch.inf),
        )
        loss, grads = loss_of(model, dirty, aggregation, WHOLE)
        assert loss == clean[0]
        for name, grad in grads.items():
            # The row without a response now has different ids, which must not affect any parameter.
            assert torch.equal(grad, clean[1][name]), name


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_more_padding_never_changes_loss_or_gradient(batch, aggregation):
    model = policy()
    loss, grads = loss_of(model, batch, aggregation, WHOLE)

    def padded(field: Tensor) -> Tensor:
        return torch.cat((field, field.new_full((7, 3), 7 if field.dtype == torch.int64 else 0)), 1)

    fields = {name: getattr(batch, name) for name in TrainBatch.__slots__}
    wide = TrainBatch(
        **{name: padded(field) for name, field in fields.items() if field is not None}
    )
    # The loss is computed without `loss_of`, which would remove the padding again.
    denominator = loss_denominator(aggregation, batch.response_mask, MAX_NEW)
    wide_loss = clipped_loss(model, wide, aggregation, denominator)
    wide_loss.backward()
    assert wide_loss.item() == pytest.approx(loss, rel=1e-5)
    assert_close_gradients(gradient(model), grads)


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(
    "sizes",
    [[1] * 7, [2, 2, 2, 1], [3, 4], [1, 5, 1]],
    ids=["one by one", "equal with a rest", "halves", "unequal"],
)
def test_any_split_into_microbatches_gives_the_same_loss_and_gradient(batch, aggregation, sizes):
    model = policy()
    loss, grads = loss_of(model, batch, aggregation, WHOLE)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(2))
    split_loss, split_grads = loss_of(model, batch, aggregation, order.split(sizes))
    assert split_loss == pytest.approx(loss, rel=1e-5)
    assert_close_gradients(split_grads, grads)


def assert_close_gradients(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Check that gradients agree to 1e-5 of the norm of each parameter's gradient."""
    for name, grad in expected.items():
        assert float(grad.norm()) > 0, name
        assert float((ours[name] - grad).norm() / grad.norm()) < 1e-5, name


# ---- A head computed in blocks -----------------------------------------------------------------


class Largest(TorchDispatchMode):
    """A mode that records the size of the largest tensor that any operation creates."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.numbers = max(self.numbers, leaf.numel())
        return result


@pytest.mark.parametrize("tied_head", [True, False])
@pytest.mark.parametrize("rows", [1, 5, 34, 35])
def test_blocks_of_rows_give_the_log_probs_and_gradient_of_one_block(
    monkeypatch, batch, tied_head, rows
):
    assert int(batch.response_mask.sum()) == 35
    model = policy(tied_head=tied_head).double()
    weight = torch.arange(float(batch.response_mask.numel())).view(batch.response_mask.shape)
    results = []
    for held in (scoring.HELD, rows * VOCAB):
        monkeypatch.setattr(scoring, "HELD", held)
        log_probs, entropy = scored(model, batch)
        (log_probs * weight).sum().backward()
        results.append((log_probs.detach(), entropy, gradient(model)))
    (log_probs, entropy, grads), (blocked, blocked_entropy, blocked_grads) = results
    torch.testing.assert_close(blocked, log_probs, rtol=0, atol=1e-12)
    torch.testing.assert_close(blocked_entropy, entropy, rtol=0, atol=1e-12)
    for name, grad in grads.items():
        torch.testing.assert_close(blocked_grads[name], grad, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.slow
def test_no_tensor_of_the_head_has_rows_times_vocabulary_numbers(monkeypatch):
    monkeypatch.setattr(scoring, "HELD", 64 * 256)
    rows, vocab, width = 512, 256, 8
    hidden, weight = torch.randn(rows, width), torch.randn(vocab, width)
    law = scoring._Law(1.0, (EOS,), torch.arange(rows) % 2 == 0)
    with Largest() as largest:
        log_probs, _ = scoring._HeadLogProbs.apply(
            hidden.requires_grad_(), weight.requires_grad_(), torch.ones(rows).long(), law
        )
        log_probs.sum().backward()
    assert largest.numbers == 64 * vocab
    assert hidden.grad is not None
    assert weight.grad is not None


def test_a_frozen_head_has_no_gradient(batch):
    model = policy(tied_head=False)
    model.head.weight.requires_grad_(False)
    scored(model, batch)[0].sum().backward()
    assert model.head.weight.grad is None
    assert float(model.embedding.weight.grad.norm()) > 0
