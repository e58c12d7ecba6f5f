"""Packing of rows, so that each distinct token of a microbatch is processed once.

The hidden state of a token depends only on this token and the tokens before it. Rows with the same
prompt therefore share the states of the prompt. Positions after the last wanted state of a row need
no state.

B rows, S positions, T distinct tokens, D width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from grpo_trainable.models.policy import widened


class Packing(NamedTuple):
    """The distinct tokens of padded rows, and the positions at which they occur in the rows."""

    ids: Tensor  # (T,)
    positions: Tensor  # (T,), position of each token within its row
    token_at_BS: Tensor  # index of the token at each position; arbitrary after a row's end
    home_T: Tensor  # one position of each token among the B·S positions of the rows

    def to_rows(self, x_TD: Tensor) -> Tensor:
        """Spread the values of the tokens, (T, D), over the rows, (B, S, D).

        A token that several rows share gets the sum of their gradients.
        """
        return _picked(x_TD, self.token_at_BS)

    def from_rows(self, x_BSD: Tensor) -> Tensor:
        """Collect each token's values, (T, D), from rows."""
        return _picked(x_BSD.flatten(0, 1), self.home_T)

    def at(self, wanted: Tensor, x_TD: Tensor) -> Tensor:
        """Return the values at `wanted`, (wanted positions, D), in the order of rows.

        `wanted` is the argument of `pack`.
        """
        return _picked(x_TD, self.token_at_BS[wanted])


def _picked(x_TD: Tensor, index: Tensor) -> Tensor:
    """Select rows by index. Gradients are summed in at least float32."""
    return F.embedding(index, widened(x_TD)).to(x_TD.dtype)


def pack(input_ids: Tensor, wanted: Tensor) -> Packing:
    """Pack the tokens of ids (B, S) that are needed for the states at `wanted`, bool (B, S).

    A row ends with its last wanted state, but has at least one token. A row shares its first
    tokens with the row before it, as far as the two rows are equal. Rows of one prompt should
    therefore be adjacent.
    """
    position = torch.arange(input_ids.shape[1], device=input_ids.device)
    end = (wanted * position).amax(dim=1, keepdim=True)
    there = position <= end
    alike = (input_ids[1:] == input_ids[:-1]) & there[1:] & there[:-1]
    own = there.clone()
    own[1:] &= ~alike.cumprod(dim=1).bool()
    number = torch.where(own.flatten(), own.flatten().cumsum(dim=0) - 1, 0).view_as(own)
    # Token numbers increase from row to row. So a shared token's number is the largest number in
    # its column, in this row and the rows above.
    token_at = torch.where(there, number.cummax(dim=0).values, 0)
    home = own.flatten().nonzero()[:, 0]
    return Packing(
        ids=input_ids.flatten()[home],
        positions=position.expand_as(input_ids).flatten()[home],
        token_at_BS=token_at,
        home_T=home,
    )
