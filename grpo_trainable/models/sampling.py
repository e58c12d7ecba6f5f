"""Uniform draws that depend only on a key, and sampling by inverse CDF."""

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
    """Return one response's float32 draws in [0, 1), (count,). The t-th draw is for the t-th token.

    Philox (Salmon et al. 2011) is keyed by (seed, stream, prompt_index, response). If the
    response continues an earlier response, `state` also sets the start of Philox's counter. `state`
    is (index of the earlier response in its group, number of that response's tokens before the
    continuation). A draw depends on nothing else: not on the batch, the number of generators or
    earlier samples.
    """
    bits = _philox(seed, stream, prompt_index, response, state).random_raw(count)
    # Each value has 24 bits, so it is exact in float32 and below 1.
    return (bits >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)


def response_seed(
    seed: int, stream: str, prompt_index: int, response: int, state: tuple[int, int] | None = None
) -> int:
    """Return a 63-bit seed from the key of `uniforms`, for engines with their own random draws."""
    return int(_philox(seed, stream, prompt_index, response, state).random_raw()) >> 1


def _philox(
    seed: int, stream: str, prompt_index: int, response: int, state: tuple[int, int] | None
) -> np.random.Philox:
    if not 0 <= prompt_index < 1 << 44 or not 0 <= response < 1 << 16:
        raise ValueError(
            f"prompt_index={prompt_index}, response={response}: do not fit the key's 44 + 16 bits"
        )
    key = (STREAMS[stream] << 60) | (prompt_index << 16) | response
    # The lowest of the counter's four words counts the draws.
    counter = np.array([0, *((0, 0) if state is None else state), 0], dtype=np.uint64)
    return np.random.Philox(counter=counter, key=np.array([seed, key], dtype=np.uint64))


def draw_tokens(
    logits: Tensor, uniform: Tensor, temperature: float, top_p: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Draw tokens (B,) from `logits` (B, V), and return them with their log-probs (B,).

    `logits` are overwritten. At temperature 0, each drawn token is the most likely token (the first
    in case of a tie), and `uniform` (B,) is ignored. Log-probs are then computed at temperature 1,
    because they would all be 0 at temperature 0. With `top_p` below 1, tokens are drawn from the
    nucleus, and log-probs are computed within the nucleus.
    """
    if temperature == 0:
        tokens = logits.argmax(dim=-1)
        return tokens, logits.log_softmax(dim=-1).gather(1, tokens[:, None])[:, 0]
    logits = logits.div_(temperature)
    if top_p < 1:
        _keep_nucleus(logits, top_p)
    return sample_tokens(logits, uniform)


def _keep_nucleus(logits: Tensor, top_p: float) -> None:
    """Set `logits` (B, V) outside the nucleus to -inf, in place.

    The nucleus is the smallest set of most likely tokens whose probabilities add up to at least
    `top_p` (Holtzman et al., arXiv 1904.09751). Of equally likely tokens, the one with the lowest
    id enters first.
    """
    probs, order = logits.softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    outside = probs.cumsum(dim=-1) - probs >= top_p
    logits.masked_fill_(torch.zeros_like(outside).scatter_(1, order, outside), -torch.inf)


def sample_tokens(logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Draw tokens (B,) from softmax(logits) (B, V) by inverse CDF; return them with log-probs (B,).

    `logits` must already be divided by the temperature. A token of probability zero is never drawn.
    The search finds a block of the vocabulary first, and then a token within it. On a CPU, this
    takes a tenth of the time of `torch.multinomial`, and sums of 64 terms have smaller rounding
    errors than a sum of V terms.
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
    """Find the item of `weights` (B, W) into which a number `uniform` (B,) from [0, 1) falls.

    Also return how far into the item `uniform` falls, as a fraction of the item's weight. An item
    of weight zero is never found, because it leaves the cumulative sum unchanged, and the target,
    `uniform` times the total weight, stays strictly below the total.
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
