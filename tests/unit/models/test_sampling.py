from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_trainable.models.sampling import BLOCK, draw_tokens, sample_tokens, uniforms

pytestmark = pytest.mark.numerics

KEY = {"seed": 7, "stream": "train", "prompt_index": 3, "response": 2}
SMALLEST, LARGEST = 0.0, 1 - 2**-24


# ---- The draws -------------------------------------------------------------------------------


def test_a_draw_does_not_depend_on_how_many_are_asked_for():
    assert uniforms(**KEY, count=100)[:10].tolist() == uniforms(**KEY, count=10).tolist()


@pytest.mark.parametrize(
    "change", [{"seed": 8}, {"stream": "eval"}, {"prompt_index": 4}, {"response": 3}]
)
def test_every_part_of_the_key_counts(change):
    here, there = uniforms(**KEY, count=50), uniforms(**{**KEY, **change}, count=50)
    assert not (here == there).any()


def test_cursor_and_response_are_never_confused():
    draws = {
        uniforms(7, stream, prompt_index, response, 3).tobytes()
        for stream in ("train", "eval")
        for prompt_index in (0, 1, 255, 256, 1 << 16, (1 << 44) - 1)
        for response in (0, 1, 255, 256, (1 << 16) - 1)
    }
    assert len(draws) == 2 * 6 * 5


@pytest.mark.parametrize(
    "outside", [{"prompt_index": -1}, {"prompt_index": 1 << 44}, {"response": 1 << 16}]
)
def test_keys_that_would_wrap_round_are_refused(outside):
    with pytest.raises(ValueError, match=str(next(iter(outside.values())))):
        uniforms(**{**KEY, **outside}, count=1)


def test_draws_are_even_in_the_half_open_unit_interval():
    draws = uniforms(**KEY, count=100_000)
    assert draws.dtype == np.float32
    assert draws.min() >= 0
    assert draws.max() < 1
    counts = np.histogram(draws, bins=50, range=(0, 1))[0]
    assert chi_square(counts, np.full(50, 2000.0)) < 49 + 5 * math.sqrt(2 * 49)


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


# ---- The tokens ------------------------------------------------------------------------------


def sample(logits: torch.Tensor, uniform: torch.Tensor | list[float]):
    """Return tokens and log-probs; a single row of logits serves every draw."""
    uniform = torch.as_tensor(uniform, dtype=torch.float32)
    return sample_tokens(logits.expand(len(uniform), -1).clone(), uniform)


def test_tokens_stand_in_the_order_of_the_vocabulary():
    logits = torch.tensor([0.5, 0.25, 0.25]).log()
    tokens, log_probs = sample(logits, [0.0, 0.49, 0.51, 0.74, 0.76, LARGEST])
    assert tokens.tolist() == [0, 0, 1, 1, 2, 2]
    expected = torch.tensor([0.5, 0.5, 0.25, 0.25, 0.25, 0.25]).log()
    torch.testing.assert_close(log_probs, expected)


@pytest.mark.parametrize("vocab_size", [1, 2, 50, BLOCK, BLOCK + 1, 3 * BLOCK - 1, 1000])
def test_log_probs_are_those_of_log_softmax(vocab_size):
    generator = torch.Generator().manual_seed(vocab_size)
    logits = 4 * torch.randn(200, vocab_size, generator=generator)
    reference = logits.double().log_softmax(dim=-1)
    tokens, log_probs = sample_tokens(logits.clone(), torch.rand(200, generator=generator))
    assert int(tokens.min()) >= 0
    assert int(tokens.max()) < vocab_size
    expected = reference.gather(1, tokens[:, None])[:, 0].float()
    torch.testing.assert_close(log_probs, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("vocab_size", [50, BLOCK, 150])
def test_evenly_spread_draws_give_every_token_its_share(vocab_size):
    draws = 20_000
    logits = 2 * torch.randn(vocab_size, generator=torch.Generator().manual_seed(0))
    tokens, _ = sample(logits, (torch.arange(draws) + 0.5) / draws)
    counts = tokens.bincount(minlength=vocab_size)
    # An interval of length p contains draws * p of the points, give or take one, up to rounding.
    assert (counts - draws * logits.double().softmax(dim=-1)).abs().max() <= 1.1


def test_frequencies_match_the_probabilities():
    draws, vocab_size = 40_000, 150
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(1))
    uniform = np.concatenate([uniforms(1, "train", c, 0, 1000) for c in range(draws // 1000)])
    tokens, _ = sample(logits, torch.from_numpy(uniform))
    expected = draws * logits.double().softmax(dim=-1).numpy()
    statistic = chi_square(tokens.bincount(minlength=vocab_size).numpy(), expected)
    assert statistic < vocab_size - 1 + 5 * math.sqrt(2 * (vocab_size - 1))


@pytest.mark.slow
@given(
    vocab_size=st.integers(2, 200),
    seed=st.integers(0, 2**32 - 1),
    forbidden=st.floats(0, 1),
    spread=st.sampled_from([0.0, 1.0, 30.0, 200.0]),
)
@settings(deadline=None, max_examples=150)
def test_a_token_of_probability_zero_is_never_drawn(vocab_size, seed, forbidden, spread):
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(vocab_size, generator=generator)
    out = torch.rand(vocab_size, generator=generator) < forbidden
    out[torch.randint(vocab_size, (), generator=generator)] = False
    logits[out] = -torch.inf
    draws = torch.rand(20, generator=generator)
    tokens, log_probs = sample(logits, [SMALLEST, 2**-24, 0.5, LARGEST, *draws.tolist()])
    assert not out[tokens].any()
    assert log_probs.isfinite().all()
    assert (log_probs <= 0).all()


@pytest.mark.parametrize("allowed", [[0], [199], [63], [64], [0, 199], [70, 130]])
@pytest.mark.parametrize("uniform", [SMALLEST, LARGEST])
def test_extreme_draws_give_the_first_and_the_last_possible_token(allowed, uniform):
    logits = torch.full((200,), -torch.inf)
    logits[allowed] = 0.0
    tokens, _ = sample(logits, [uniform])
    assert tokens.tolist() == [allowed[0] if uniform == SMALLEST else allowed[-1]]


def test_rows_do_not_see_each_other():
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(9, 130, generator=generator)
    # In the middle of a token's interval, rounding cannot select another token.
    p = logits.softmax(dim=-1)
    uniform = (p.cumsum(dim=-1) - p / 2)[range(9), torch.randint(130, (9,), generator=generator)]
    together = sample_tokens(logits.clone(), uniform)
    for row in range(9):
        alone = sample_tokens(logits[row : row + 1].clone(), uniform[row : row + 1])
        assert alone[0] == together[0][row]
        torch.testing.assert_close(alone[1][0], together[1][row])


# ---- Temperature -----------------------------------------------------------------------------


def test_temperature_divides_the_logits():
    logits, uniform = torch.randn(4, 70), torch.tensor([0.1, 0.4, 0.7, 0.99])
    expected = sample_tokens(logits / 0.5, uniform)
    tokens, log_probs = draw_tokens(logits.clone(), uniform, 0.5)
    assert tokens.equal(expected[0])
    assert log_probs.equal(expected[1])


def test_temperature_zero_takes_the_most_likely_token_whatever_is_drawn():
    logits = torch.tensor([[0.0, 1.0, 2.0, -torch.inf], [3.0, 1.0, 3.0, 0.0]])
    for uniform in (SMALLEST, LARGEST):
        tokens, log_probs = draw_tokens(logits.clone(), torch.full((2,), uniform), 0.0)
        assert tokens.tolist() == [2, 0]  # the first of equal logits
        # e² / (1 + e + e²), and e³ / (2 e³ + e + 1)
        by_hand = [7.38906 / 11.10734, 20.08554 / 43.88935]
        assert log_probs.exp().tolist() == pytest.approx(by_hand, abs=1e-5)


# ---- Nucleus ---------------------------------------------------------------------------------

NUCLEUS = torch.tensor([0.1, 0.4, 0.1, 0.25, 0.15]).log()


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (0.3, [1]),
        (0.39, [1]),
        (0.41, [1, 3]),
        (0.79, [1, 3, 4]),
        (0.81, [0, 1, 3, 4]),
        (1.0, range(5)),
    ],
)
def test_tokens_are_drawn_from_the_nucleus_alone(top_p, kept):
    uniform = torch.linspace(0, LARGEST, 101)
    tokens, log_probs = draw_tokens(NUCLEUS.repeat(101, 1), uniform, 1.0, top_p)
    assert set(tokens.tolist()) == set(kept)
    share = NUCLEUS.exp()[list(kept)].sum()
    torch.testing.assert_close(log_probs.exp(), NUCLEUS.exp()[tokens] / share)


def test_the_nucleus_follows_the_temperature():
    # At temperature 1/2 the squares of the probabilities count: 16 of 26.5 belong to token 1.
    logits, uniform = NUCLEUS.repeat(9, 1), torch.linspace(0, LARGEST, 9)
    assert set(draw_tokens(logits.clone(), uniform, 0.5, 0.5)[0].tolist()) == {1}
    assert set(draw_tokens(logits.clone(), uniform, 1.0, 0.5)[0].tolist()) == {1, 3}


def test_a_nucleus_of_everything_draws_the_same_bits():
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(50, 200, generator=generator)
    uniform = torch.rand(50, generator=generator)
    expected = draw_tokens(logits.clone(), uniform, 0.7)
    found = draw_tokens(logits.clone(), uniform, 0.7, 1.0)
    assert all(map(torch.equal, found, expected))
