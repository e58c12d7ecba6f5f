"""Responses to the same requests, sampled twice: equal bits, or equal to rounding.

Only the same call, with the same shapes, in the same setup gives the same bits. Another batch or
another engine adds up in another order. Its log-probs differ by rounding, and a draw that lies
within rounding of the border between two tokens may give the other one. From there on that response
is another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import torch

from grpo_trainable.protocol.rollout import RolloutGroup

# Responses of a comparison that may go on differently. Rounding moves the border between two tokens
# by a millionth or so: a first one is rare in thousands of tokens, and a second one no accident.
FORKS = 1


def assert_same_bits(some: Sequence[RolloutGroup], others: Sequence[RolloutGroup]) -> None:
    """Check that both hold the same responses, whose log-probs have the same bits."""
    for one, other in zip(some, others, strict=True):
        for name in ("response_ids", "response_mask", "finished", "token_versions", "token_rounds"):
            assert torch.equal(getattr(one, name), getattr(other, name)), name
        assert torch.equal(one.behaviour_log_probs, other.behaviour_log_probs)


def assert_agree(
    some: Sequence[RolloutGroup], others: Sequence[RolloutGroup], *, atol: float
) -> None:
    """Check that both hold the same responses, whose log-probs differ by `atol` at most.

    `FORKS` of them may go on differently after tokens that agree.
    """
    forks = 0
    for one, other in zip(some, others, strict=True):
        for row in range(len(one.response_ids)):
            mine, theirs = _tokens(one, row), _tokens(other, row)
            length = common_length(mine, theirs)
            torch.testing.assert_close(
                one.behaviour_log_probs[row, :length],
                other.behaviour_log_probs[row, :length],
                rtol=0,
                atol=atol,
            )
            if mine == theirs:
                assert one.finished[row] == other.finished[row]
            else:
                forks += 1
    assert forks <= FORKS, f"{forks} responses differ"


def assert_agree_as_far(some: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> None:
    """Check that each of `some` is the beginning of its counterpart, but for `FORKS` of them."""
    forks = sum(
        list(one) != list(other[: len(one)]) for one, other in zip(some, others, strict=True)
    )
    assert forks <= FORKS, f"{forks} of {len(some)} begin differently"


def common_length(one: Sequence[object], other: Sequence[object]) -> int:
    """Return how many entries both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _tokens(group: RolloutGroup, row: int) -> list[tuple[int, bool]]:
    """Return the tokens of a response, each with whether it was sampled."""
    length = int(group.extents[row])
    ids, mask = group.response_ids[row, :length], group.response_mask[row, :length]
    return list(zip(ids.tolist(), mask.tolist(), strict=True))
