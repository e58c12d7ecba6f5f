"""The interface between the learners of a trial. Each learner is a rank.

Every rank gets all groups of a round, so it computes the advantages, the plan of the gradient steps
and the denominators of the losses without communication. A rank runs its share of the microbatches
(`deal`). Then the results are summed over the ranks: before the sum, a row's log-probs are 0 on
every rank but one, and a rank's gradients are its share of the step's gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from grpo_trainable.models.policy import NamedWeights

# Maximum size of a message in which gradients are summed. A message contains copies of the
# gradients, which take additional memory.
MESSAGE_BYTES = 32 << 20


class Communicator(Protocol):
    """Sends messages between the ranks of a trial."""

    @property
    def rank(self) -> int:
        """Index of this rank."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def sum_(self, tensor: Tensor) -> Tensor:
        """Replace a tensor with its sum over the ranks, bit-identical on all ranks, and return it.

        All ranks must call this in the same order, with tensors of the same shape and type.
        """
        ...


class Ranks(Protocol):
    """The ranks of a trial, as the learners see them.

    Some methods are collective: all ranks must call them, in the same order.
    """

    @property
    def rank(self) -> int:
        """Index of this rank."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the ranks, as `Communicator.sum_` does."""
        ...

    def sum_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Replace gradients with their sums over the ranks. Collective."""
        ...

    def divide(self, policy: NamedWeights) -> NamedWeights:
        """Return the policy as this rank holds it: whole, or only a part. Collective."""
        ...

    def weights(self, policy: NamedWeights) -> Iterator[tuple[str, Tensor]]:
        """Like `gathered`, yield the policy's `weights`, in their original memory layout."""
        ...

    def gathered(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole tensors, one by one, on the first rank. Yield nothing on other ranks.

        Only the first rank publishes weights and returns tensors. Collective.
        """
        ...

    def whole(self, tensor: Tensor) -> Tensor:
        """Return, on every rank, the whole tensor of which `tensor` is a part. Collective."""
        ...

    def part(self, tensor: Tensor, like: Tensor) -> Tensor:
        """Divide a whole tensor in the same way as `like`, and return this rank's part."""
        ...

    def held(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's share of a checkpoint: some of the tensors, or some of their rows.

        The shares of all ranks, in rank order, make up the whole checkpoint.
        """
        ...

    def settle(self) -> None:
        """Release the parameters that a pass has gathered, so the next pass gathers them again.

        This is necessary if anything other than a gradient step has changed parameters.
        """
        ...


class ConnectedRanks:
    """Ranks that are connected by a communicator."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    @property
    def rank(self) -> int:
        """Index of this rank."""
        return self._communicator.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._communicator.size

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the ranks, as `Communicator.sum_` does."""
        return self._communicator.sum_(tensor)


class Replicas(ConnectedRanks):
    """Ranks that each hold the whole policy."""

    @torch.no_grad()
    def sum_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Replace gradients with their sums over the ranks.

        A parameter that has no gradient on any rank is left out. A rank that ran no microbatch
        contributes zeros.
        """
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
        """Return the policy unchanged."""
        return policy

    def weights(self, policy: NamedWeights) -> Iterator[tuple[str, Tensor]]:
        """Yield the policy's weights on the first rank."""
        if self.rank == 0:  # other ranks need not merge adapters
            yield from policy.weights().items()

    def gathered(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors on the first rank."""
        if self.rank == 0:
            yield from tensors.items()

    def whole(self, tensor: Tensor) -> Tensor:
        """Return the tensor, which is already whole."""
        return tensor

    def part(self, tensor: Tensor, like: Tensor) -> Tensor:
        """Return the whole tensor."""
        return tensor

    def held(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's share of the tensors. All shares have about the same size in bytes.

        All ranks hold the same tensors, so any rank can write any of them.
        """
        written = [0] * self.size
        mine = {}
        for name, tensor in tensors.items():
            rank = written.index(min(written))
            written[rank] += tensor.nbytes
            if rank == self.rank:
                mine[name] = tensor
        return mine

    def settle(self) -> None:
        """Do nothing: nothing was gathered."""
        pass


def _messages(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield lists of parameters.

    The parameters in a list have the same type, and their total size is at most `MESSAGE_BYTES`.
    A parameter larger than `MESSAGE_BYTES` is yielded alone.
    """
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
    """Return a view of the gradient, with rows that match the parameter's memory layout.

    A matrix that is stored by column is transposed, because copying it across its columns is slow.
    """
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


# ---- Distribution of a pass's microbatches over the ranks ----------------------------------------


def deal(
    parts: Sequence[Tensor], tokens: Callable[[Tensor], int], ranks: int
) -> list[list[Tensor]]:
    """Distribute microbatches over ranks, an equal number to each rank.

    Microbatches are dealt from largest to smallest, each to the least loaded rank that still has
    room (longest processing time first, Graham 1969). Each rank keeps its microbatches
    in their original order.

    If the number of microbatches is not a multiple of the number of ranks, the largest microbatches
    are cut in two until it is. Microbatches of one row cannot be cut. If no larger ones are left,
    some ranks get fewer microbatches than others.

    Args:
        parts: The microbatches. Each one is given by the indices of its rows.
        tokens: Returns the cost of a microbatch, in tokens.
        ranks: Number of ranks.
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
    """Cut the largest parts in two until every rank can get the same number of parts."""
    while len(parts) % ranks:
        divisible = [i for i, part in enumerate(parts) if len(part) > 1]
        if not divisible:
            break
        largest = max(divisible, key=lambda i: tokens(parts[i]))
        half = len(parts[largest]) // 2
        parts[largest : largest + 1] = parts[largest][:half], parts[largest][half:]
    return parts
