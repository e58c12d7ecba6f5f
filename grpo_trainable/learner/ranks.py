"""What a learner needs of the other learners of its trial; each of them is a rank.

Every rank gets all groups of a round, so advantages, plan and denominators are the same everywhere
without a message. A rank runs its share of the microbatches (`deal`), and what these leave is
summed: a row's log-probs are 0 on every rank but one, gradients are shares of the step's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from grpo_trainable.models.policy import NamedWeights

# Gradients are summed in messages of at most this size, which a second copy of is made meanwhile.
MESSAGE_BYTES = 32 << 20


class Communicator(Protocol):
    """Sends messages between the ranks of a trial."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum_(self, tensor: Tensor) -> Tensor:
        """Replaces a tensor by its sum over the ranks, the same bits on each, and returns it.

        All ranks call it, in the same order, with tensors of one shape and type.
        """
        ...


class Ranks(Protocol):
    """The ranks of a trial as their learners see them. What a method says to be collective, all
    ranks call in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sums the tensor over the ranks, as `Communicator.sum_` does."""
        ...

    def sum_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Replaces gradients by their sums over the ranks. Collective."""
        ...

    def divide(self, policy: NamedWeights) -> NamedWeights:
        """The policy, as the ranks hold it between them. Collective."""
        ...

    def weights(self, policy: NamedWeights) -> Iterator[tuple[str, Tensor]]:
        """The policy's `weights`, as `gathered` yields tensors, stored as the policy was before it
        was divided."""
        ...

    def gathered(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The tensors, whole, one after the other, on the first rank, which alone publishes and
        answers; nothing on the others. Collective."""
        ...

    def whole(self, tensor: Tensor) -> Tensor:
        """What `tensor` is the part of, on every rank. Collective."""
        ...

    def part(self, tensor: Tensor, like: Tensor) -> Tensor:
        """This rank's part of a whole tensor, held as `like` is."""
        ...

    def held(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What a checkpoint has from this rank: some of the tensors, or some of their rows. Those
        of all ranks, in their order, are the whole."""
        ...

    def settle(self) -> None:
        """Gives back what a pass has gathered. The next one gathers anew, as it must after the
        parameters have changed other than by a gradient step."""
        ...


class ConnectedRanks:
    """Ranks that reach each other by a communicator."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    @property
    def rank(self) -> int:
        return self._communicator.rank

    @property
    def size(self) -> int:
        return self._communicator.size

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sums the tensor over the ranks, as `Communicator.sum_` does."""
        return self._communicator.sum_(tensor)


class Replicas(ConnectedRanks):
    """Ranks each of which holds the whole policy."""

    @torch.no_grad()
    def sum_gradients(self, parameters: Sequence[Tensor]) -> None:
        """A parameter without a gradient on any rank keeps none; a rank that ran no microbatch
        contributes zeros."""
        if self.size == 1:
            return
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        has_one = [float(parameter.grad is not None) for parameter in trained]
        ranks_with_one = self.sum_(torch.tensor(has_one)).tolist()
        summed = [p for p, ranks in zip(trained, ranks_with_one, strict=True) if ranks]
        for parameter in summed:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for message in _messages(summed):
            views = [_in_memory_order(parameter) for parameter in message]
            flat = self.sum_(torch.cat([view.reshape(-1) for view in views]))
            sizes = [view.numel() for view in views]
            for view, total in zip(views, flat.split(sizes), strict=True):
                view.copy_(total.view_as(view))

    def divide(self, policy: NamedWeights) -> NamedWeights:
        return policy

    def weights(self, policy: NamedWeights) -> Iterator[tuple[str, Tensor]]:
        if self.rank == 0:  # merging adapters would make a second copy on every rank
            yield from policy.weights().items()

    def gathered(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        if self.rank == 0:
            yield from tensors.items()

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor

    def part(self, tensor: Tensor, like: Tensor) -> Tensor:
        return tensor

    def held(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A share of the tensors, of as many bytes on each rank: all of them hold the same."""
        written = [0] * self.size
        mine = {}
        for name, tensor in tensors.items():
            rank = written.index(min(written))
            written[rank] += tensor.nbytes
            if rank == self.rank:
                mine[name] = tensor
        return mine

    def settle(self) -> None:
        pass


def _messages(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The parameters in runs of one type whose gradients have at most `MESSAGE_BYTES` together; a
    larger one is alone."""
    message: list[Tensor] = []
    size = 0
    for parameter in parameters:
        other_kind = message and parameter.dtype != message[0].dtype
        if message and (other_kind or size + parameter.nbytes > MESSAGE_BYTES):
            yield message
            message, size = [], 0
        message.append(parameter)
        size += parameter.nbytes
    if message:
        yield message


def _in_memory_order(parameter: Tensor) -> Tensor:
    """A view of the gradient by whose rows the parameter lies in memory: a matrix that is stored by
    column is turned, since copying it across its columns is slow."""
    assert parameter.grad is not None
    by_column = parameter.ndim == 2 and not parameter.is_contiguous()
    return parameter.grad.t() if by_column else parameter.grad


class _Alone:
    """The communicator of a single rank."""

    rank = 0
    size = 1

    def sum_(self, tensor: Tensor) -> Tensor:
        return tensor


ALONE: Ranks = Replicas(_Alone())


# ---- Which microbatches of a pass each rank runs -------------------------------------------------


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
