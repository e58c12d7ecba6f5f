"""Comparisons of two samples for the same requests: equal bits, or equal up to rounding.

Only the same call, with the same shapes and the same setup, gives the same bits. A different
batch or engine sums in a different order, so its log-probs differ by rounding. A draw within
rounding distance of the border between two tokens may then pick the other token, and from that
token on the response differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import torch

from grpo_trainable.protocol.rollout import RolloutGroup

# Maximum number of responses per comparison that may diverge. Rounding moves the border between two
# tokens by about a millionth. In thousands of tokens, one divergence is rare, and two show a bug.
FORKS = 1


def assert_same_bits(some: Sequence[RolloutGroup], others: Sequence[RolloutGroup]) -> None:
    """Check that both samples contain the same responses, and log-probs with the same bits."""
    for one, other in zip(some, others, strict=True):
        for name in ("response_ids", "response_mask", "finished", "token_versions", "token_rounds"):
            assert torch.equal(getattr(one, name), getattr(other, name)), name
        assert torch.equal(one.behaviour_log_probs, other.behaviour_log_probs)


def assert_agree(
    some: Sequence[RolloutGroup], others: Sequence[RolloutGroup], *, atol: float
) -> None:
    """Check that both samples contain the same responses, with log-probs equal to within `atol`.

    Up to `FORKS` responses may diverge after tokens that agree.
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
    """Check that all but `FORKS` sequences in `some` are prefixes of those in `others`."""
    forks = sum(
        list(one) != list(other[: len(one)]) for one, other in zip(some, others, strict=True)
    )
    assert forks <= FORKS, f"{forks} of {len(some)} begin differently"


def common_length(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the length of the prefix that both sequences share."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _tokens(group: RolloutGroup, row: int) -> list[tuple[int, bool]]:
    """Return the tokens of a response as pairs (token id, True if it was sampled)."""
    length = int(group.extents[row])
    ids, mask = group.response_ids[row, :length], group.response_mask[row, :length]
    return list(zip(ids.tolist(), mask.tolist(), strict=True))
