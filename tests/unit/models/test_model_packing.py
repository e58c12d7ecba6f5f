"""Packing computes each distinct token once, with the same states, log-probs and gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from grpo_trainable.models.model_config import ModelConfig
from grpo_trainable.models.packing import pack
from grpo_trainable.models.scoring import response_log_probs
from grpo_trainable.models.transformer import TransformerLM

pytestmark = pytest.mark.numerics

SHAPE = ModelConfig(
    vocab_size=16,
    context_length=24,
    num_layers=2,
    d_model=16,
    num_heads=2,
    d_ff=24,
    rope_theta=10_000.0,
    tied_head=True,
)
LAW = {"temperature": 0.8, "min_new_tokens": 2, "end_ids": [1]}


def test_a_prompt_is_packed_once_and_padding_never():
    ids = torch.tensor([[7, 8, 3, 4], [7, 8, 5, 0], [7, 9, 3, 4]])
    wanted = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 0], [0, 1, 1, 1]], dtype=torch.bool)

    packing = pack(ids, wanted)

    assert packing.ids.tolist() == [7, 8, 3, 4, 5, 9, 3, 4]
    assert packing.positions.tolist() == [0, 1, 2, 3, 2, 1, 2, 3]
    assert packing.token_at_BS[wanted].tolist() == [1, 2, 3, 1, 4, 5, 6, 7]
    assert packing.token_at_BS[:, 0].tolist() == [0, 0, 0]
    assert packing.home_T.tolist() == [0, 1, 2, 3, 6, 9, 10, 11]


def test_what_is_alike_behind_the_end_of_a_row_is_not_shared():
    ids = torch.tensor([[7, 8, 3], [7, 8, 3]])
    wanted = torch.tensor([[1, 0, 0], [0, 0, 1]], dtype=torch.bool)
    assert pack(ids, wanted).ids.tolist() == [7, 8, 3]


def test_a_row_of_which_nothing_is_wanted_has_one_token():
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    assert pack(torch.tensor([[5, 6, 7], [6, 6, 7]]), nothing).ids.tolist() == [5, 6]


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 6), st.integers(1, 7)), min_size=1, max_size=7
    ),
    st.integers(0, 2**16),
    st.booleans(),
)
def test_packed_log_probs_and_gradients_are_those_of_padded_rows(
    rows: list[tuple[int, int, int]], seed: int, checkpoints: bool
):
    ids, targets, mask = made_up(rows, seed)
    padded, packed = (TransformerLM(SHAPE, seed).double() for _ in range(2))
    packed.pack_rows()
    if checkpoints:
        packed.checkpoint_gradients()
    weight = torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)).double()
    for model in (padded, packed):
        log_probs, _ = response_log_probs(model, ids, targets, mask, **LAW)
        (log_probs * weight).sum().backward()

    with torch.no_grad():
        expected = response_log_probs(padded, ids, targets, mask, **LAW)
        found = response_log_probs(packed, ids, targets, mask, **LAW)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    for name, parameter in packed.named_parameters():
        torch.testing.assert_close(
            parameter.grad, padded.get_parameter(name).grad, rtol=1e-9, atol=1e-12
        )


def made_up(rows: list[tuple[int, int, int]], seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs, targets and mask (B, S) of rows.

    Each row is given as (index of the prompt, number of prompt tokens, number of response tokens).
    In a response of three or more tokens, the second token was not sampled.
    """
    random = torch.Generator().manual_seed(seed)
    prompts = torch.randint(2, 16, (3, 7), generator=random)
    width = max(1 + prompt + response for _, prompt, response in rows)
    ids = torch.randint(2, 4, (len(rows), width), generator=random)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for row, (which, prompt, response) in enumerate(rows):
        ids[row, : prompt + 1] = prompts[which, : prompt + 1]
        mask[row, prompt : prompt + response] = True
        mask[row, prompt + 1] &= response < 3
    return ids, ids.roll(-1, dims=1), mask
