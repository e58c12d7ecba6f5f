"""Rows without padding and without repetition: each distinct token of a microbatch, once.

A token's hidden state depends on the tokens before it alone. So rows of one prompt share the states
of the prompt, and positions behind what a row is asked for need none.

B rows, S positions, T distinct tokens, D width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from grpo_trainable.models.policy import widened


class Packing(NamedTuple):
    """Which tokens of padded rows are computed, and where the rows find them."""

    ids: Tensor  # (T,)
    positions: Tensor  # (T,), each within its row
    token_at_BS: Tensor  # the token, of 0 to T - 1, at each position; any behind the end of a row
    home_T: Tensor  # a position of each token in the rows, of 0 to B S - 1

    def to_rows(self, x_TD: Tensor) -> Tensor:
        """(B, S, D). What several rows share gets the sum of their gradients."""
        return _picked(x_TD, self.token_at_BS)

    def from_rows(self, x_BSD: Tensor) -> Tensor:
        """(T, D)."""
        return _picked(x_BSD.flatten(0, 1), self.home_T)

    def at(self, wanted: Tensor, x_TD: Tensor) -> Tensor:
        """(positions of `wanted`, D), row by row; `wanted` is that of `pack`."""
        return _picked(x_TD, self.token_at_BS[wanted])


def _picked(x_TD: Tensor, index: Tensor) -> Tensor:
    """Gradients are added up in float32 at least."""
    return F.embedding(index, widened(x_TD)).to(x_TD.dtype)


def pack(input_ids: Tensor, wanted: Tensor) -> Packing:
    """The packing of ids (B, S), of which states at `wanted`, bool (B, S), are asked for.

    A row ends with the last state that is asked for, but has one token at least. It shares tokens
    with the row before it as far as both begin alike, so rows of a prompt should follow each other.
    """
    position = torch.arange(input_ids.shape[1], device=input_ids.device)
    end = (wanted * position).amax(dim=1, keepdim=True)
    there = position <= end
    alike = (input_ids[1:] == input_ids[:-1]) & there[1:] & there[:-1]
    own = there.clone()
    own[1:] &= ~alike.cumprod(dim=1).bool()
    number = torch.where(own.flatten(), own.flatten().cumsum(dim=0) - 1, 0).view_as(own)
    # Numbers grow from row to row: the largest above a shared token is the one that it shares.
    token_at = torch.where(there, number.cummax(dim=0).values, 0)
    home = own.flatten().nonzero()[:, 0]
    return Packing(
        ids=input_ids.flatten()[home],
        positions=position.expand_as(input_ids).flatten()[home],
        token_at_BS=token_at,
        home_T=home,
    )
