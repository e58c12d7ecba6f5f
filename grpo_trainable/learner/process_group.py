"""Learners in processes of their own: a group of torch.distributed, gloo on CPUs and nccl on GPUs.

It is the default group of its process, as sharding needs one.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

# How long a rank waits for another in a sum, in deadlines. The pipeline gives up a silent actor
# after `resources.deadline_s`, which has to come first. In an elastic group a rank that waits for
# one that waits for a lost one has to notice before.
PATIENCE, ELASTIC_PATIENCE = 2.0, 0.25


class Rendezvous:
    """Where the ranks of a group find one another: a store in the process of the first."""

    def __init__(self, address: str, deadline_s: float) -> None:
        """`address`: by which the others reach this machine. The system chooses the port."""
        self.store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            address,
            0,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=deadline_s),
        )
        self.place = (address, self.store.port)


class ProcessGroup:
    """A `ranks.Communicator` by torch.distributed. The number of its ranks may change."""

    rank: int
    size: int

    def __init__(self, device: torch.device, deadline_s: float, *, elastic: bool = False) -> None:
        """`join` makes the group."""
        self.device = device
        self._deadline_s = deadline_s
        self._patience_s = deadline_s * (ELASTIC_PATIENCE if elastic else PATIENCE)

    def join(
        self, rank: int, size: int, place: tuple[str, int], own: Rendezvous | None = None
    ) -> None:
        """Waits for the others. `place`: of the `Rendezvous`, which is `own` in the first rank.

        Raises:
            RuntimeError: they did not come within the deadline.
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
        dist.all_reduce(tensor)
        return tensor

    def leave(self) -> None:
        """Ends the group, whether or not the others are there."""
        dist.destroy_process_group()
