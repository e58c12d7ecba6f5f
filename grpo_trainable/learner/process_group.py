"""The communication between learners in separate processes, with torch.distributed.

The process group uses gloo on CPUs and nccl on GPUs. It is the default group of its process,
because sharding needs a default group.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

# Maximum time that a rank waits for the others in a collective operation, such as a sum over the
# ranks, as a multiple of `resources.deadline_s`. The pipeline gives up on a silent actor after one
# deadline, and must do this before the operation fails. In an elastic group, a rank that waits for
# a lost rank must give up well before the deadline, because other ranks may in turn be waiting for
# the rank that gives up.
PATIENCE, ELASTIC_PATIENCE = 2.0, 0.25


class Rendezvous:
    """The place where the ranks of a group meet: a store in the first rank's process."""

    def __init__(self, address: str, deadline_s: float) -> None:
        """Open the store, on a port that the system chooses.

        Args:
            address: The address by which the other ranks reach this machine.
            deadline_s: Maximum number of seconds for one operation of the store.
        """
        self.store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            address,
            0,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=deadline_s),
        )
        self.place = (address, self.store.port)


class ProcessGroup:
    """A `ranks.Communicator` that uses torch.distributed. The number of ranks may change."""

    rank: int
    size: int

    def __init__(self, device: torch.device, deadline_s: float, *, elastic: bool = False) -> None:
        """Prepare to create the group in `join`.

        Args:
            device: The device of the tensors.
            deadline_s: Maximum number of seconds that a rank waits for the others to join. The
                maximum wait in a collective operation, such as a sum, is a multiple of
                `deadline_s`.
            elastic: True if the trial may continue after the group has lost ranks.
        """
        self.device = device
        self._deadline_s = deadline_s
        self._patience_s = deadline_s * (ELASTIC_PATIENCE if elastic else PATIENCE)

    def join(
        self, rank: int, size: int, place: tuple[str, int], own: Rendezvous | None = None
    ) -> None:
        """Create the group once all ranks have joined.

        Args:
            rank: Index of this rank.
            size: Number of ranks.
            place: Address and port of the `Rendezvous`.
            own: The `Rendezvous` object on the first rank, and None on all others.

        Raises:
            RuntimeError: The other ranks did not join within the deadline.
        """
        self.rank, self.size = rank, size
        if own is None:
            deadline = timedelta(seconds=self._deadline_s)
            store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
                *place, is_master=False, timeout=deadline
            )
        else:
            store = own.store
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=self._patience_s),
        )

    def sum_(self, tensor: Tensor) -> Tensor:
        """Replace a tensor with its sum over the ranks, and return it."""
        dist.all_reduce(tensor)
        return tensor

    def leave(self) -> None:
        """End the group, even if other ranks are gone."""
        dist.destroy_process_group()
