"""Which microbatches of a pass each learner runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor


def deal(
    parts: Sequence[Tensor], tokens: Callable[[Tensor], int], ranks: int
) -> list[list[Tensor]]:
    """The microbatches of each rank, as many for each of them, in the order in which they came.

    The largest is dealt first, each to the rank with the least to do among those that may have one
    more (Graham, 1969: longest processing time first). `parts`: rows of a batch; `tokens` is what
    one of them costs. Where their number is no multiple of the ranks, the largest are cut in two;
    only where every part is a single row some ranks get one less than others.
    """
    if ranks == 1:
        return [list(parts)]
    parts = _evened(list(parts), tokens, ranks)
    most = -(-len(parts) // ranks)
    hands: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for index in sorted(range(len(parts)), key=lambda i: -tokens(parts[i])):
        open_hands = [rank for rank in range(ranks) if len(hands[rank]) < most]
        rank = min(open_hands, key=lambda r: loads[r])
        hands[rank].append(index)
        loads[rank] += tokens(parts[index])
    return [[parts[index] for index in sorted(hand)] for hand in hands]


def _evened(parts: list[Tensor], tokens: Callable[[Tensor], int], ranks: int) -> list[Tensor]:
    """The parts, the largest cut in two until each rank can have as many."""
    while len(parts) % ranks:
        divisible = [i for i, part in enumerate(parts) if len(part) > 1]
        if not divisible:
            break
        largest = max(divisible, key=lambda i: tokens(parts[i]))
        half = len(parts[largest]) // 2
        parts[largest : largest + 1] = parts[largest][:half], parts[largest][half:]
    return parts
