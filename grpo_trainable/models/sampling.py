"""Keyed uniforms and inverse-CDF sampling."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64
STREAMS = {"train": 0, "eval": 1, "vine": 2}


def uniforms(
    seed: int,
    stream: str,
    prompt_index: int,
    response: int,
    count: int,
    state: tuple[int, int] | None = None,
) -> np.ndarray:
    """The (count,) float32 draws in [0, 1) of one response: token t always gets draw t.

    Philox (Salmon et al. 2011) is keyed by (seed, stream, prompt_index, response), and a `state`,
    (response of the group, tokens of it), is where its counter begins, so a draw depends on nothing
    else: not on the batch, the number of generators or what was sampled before.
    """
    bits = _philox(seed, stream, prompt_index, response, state).random_raw(count)
    # Every value of 24 bits is exact in float32 and below 1.
    return (bits >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)


def response_seed(
    seed: int, stream: str, prompt_index: int, response: int, state: tuple[int, int] | None = None
) -> int:
    """A seed of 63 bits, by the same key, for an engine that makes the draws of a response."""
    return int(_philox(seed, stream, prompt_index, response, state).random_raw()) >> 1


def _philox(
    seed: int, stream: str, prompt_index: int, response: int, state: tuple[int, int] | None
) -> np.random.Philox:
    if not 0 <= prompt_index < 1 << 44 or not 0 <= response < 1 << 16:
        raise ValueError(
            f"prompt_index={prompt_index}, response={response}: outside the key's 44 + 16 bits"
        )
    key = (STREAMS[stream] << 60) | (prompt_index << 16) | response
    # The lowest of its four words counts the draws.
    counter = np.array([0, *((0, 0) if state is None else state), 0], dtype=np.uint64)
    return np.random.Philox(counter=counter, key=np.array([seed, key], dtype=np.uint64))


def draw_tokens(logits: Tensor, uniform: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Tokens (B,) drawn from `logits` (B, V), which are overwritten, and their log-probs (B,).

    At temperature 0 each is the most likely token, the first of several, and `uniform` (B,) is not
    used. Its log-prob is then that of temperature 1, since under its own law it would always be 0.
    """
    if temperature == 0:
        tokens = logits.argmax(dim=-1)
        return tokens, logits.log_softmax(dim=-1).gather(1, tokens[:, None])[:, 0]
    return sample_tokens(logits.div_(temperature), uniform)


def sample_tokens(logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens (B,) drawn from softmax(logits) (B, V) by inverse CDF, and their log-probs (B,).

    `logits` are already divided by the temperature. A token of probability zero is never drawn.
    The search goes by blocks of the vocabulary and then inside one: a tenth of the time of
    `torch.multinomial` on a CPU, and sums of 64 terms round less than one of V.
    """
    rows, vocab_size = logits.shape
    probs = logits.softmax(dim=-1)
    if vocab_size % BLOCK:
        probs = F.pad(probs, (0, -vocab_size % BLOCK))
    blocks = probs.view(rows, -1, BLOCK)
    block, left = _search(blocks.sum(dim=-1), uniform)
    inside = blocks[torch.arange(rows, device=logits.device), block]
    token, _ = _search(inside, left)
    return block * BLOCK + token, inside.gather(1, token[:, None])[:, 0].log()


def _search(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Where `uniform` (B,) in [0, 1) falls among `weights` (B, W), and how far into that item.

    The item always has weight: a zero-weight one leaves the cumulative sum where it was, and the
    target is kept strictly below the total.
    """
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1:]
    target = torch.minimum(
        uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total))
    )
    item = torch.searchsorted(cumulative, target, right=True)
    weight = weights.gather(1, item)
    into = (target - (cumulative.gather(1, item) - weight)) / weight
    return item[:, 0], into[:, 0].clamp(0.0, 1.0)
