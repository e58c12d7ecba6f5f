"""Which transport a trial uses, and whether that one can work where its actors are."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import ray

from grpo_trainable.config import GRPOConfig
from grpo_trainable.installed import missing_for
from grpo_trainable.transports.base import TransportError
from grpo_trainable.transports.frozen import FrozenApartReceiver, FrozenApartSender
from grpo_trainable.transports.object_store import ObjectStoreReceiver, ObjectStoreSender
from grpo_trainable.transports.rdt import (
    ONE_SIDED,
    TWO_SIDED,
    CudaIpcReceiver,
    NixlReceiver,
    OneSidedSender,
    TwoSidedReceiver,
    TwoSidedSender,
    start_nixl,
)
from grpo_trainable.transports.shm import ShmReceiver, ShmSender
from grpo_trainable.weight_transfer import WeightReceiver, WeightSender

COSTS = {
    "nixl": "; its agents poll: nearly a CPU core in each process, beside those reserved",
}
DIRECT = (*ONE_SIDED, *TWO_SIDED)  # Ray has to know of them when it starts an actor


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """What an actor's process found."""

    gpus: tuple[str, ...]  # that Ray gave it, where it matters
    seconds: float  # that setting up took


@dataclass(frozen=True, kw_only=True)
class Choice:
    name: str  # of a transport; never `auto`
    why: str

    @property
    def direct(self) -> bool:
        """Past the object store, by Ray Direct Transport."""
        return self.name in DIRECT

    @property
    def two_sided(self) -> bool:
        """Learner and generators are one group, which does not survive the loss of any."""
        return self.name in TWO_SIDED


def choose_transport(config: GRPOConfig, nodes: Sequence[str]) -> Choice:
    """`nodes`: of the trial's actors, in any order and as often as one likes.

    Raises:
        TransportError: the transport that the config names cannot work between them.
    """
    if config.placement == "colocated":
        return Choice(name="in_process", why="generator and learner are one process")
    machines = len(set(nodes))
    if config.transport != "auto":
        if config.transport in ("shm", "cuda_ipc") and machines > 1:
            raise TransportError(
                f"transport={config.transport}: the trial's actors are on {machines} machines, "
                "which share no memory; use transport=object_store, or auto"
            )
        return Choice(name=config.transport, why="asked for" + COSTS.get(config.transport, ""))
    if machines > 1:
        return Choice(name="object_store", why=f"actors on {machines} machines")
    missing = missing_for("shm")
    if missing is not None:
        return Choice(name="object_store", why=missing)
    return Choice(name="shm", why="all actors are on one machine")


def check_here(name: str) -> Preflight:
    """In the process of an actor, before training.

    Raises:
        TransportError: the transport cannot work in this process.
    """
    start = time.perf_counter()
    missing = missing_for(name)
    if missing is not None:
        raise TransportError(f"transport={name}: {missing}")
    if name == "nixl":
        start_nixl()
    gpus = ray.get_gpu_ids() if name == "cuda_ipc" else ()
    return Preflight(gpus=tuple(map(str, gpus)), seconds=time.perf_counter() - start)


def check_together(name: str, found: Sequence[Preflight]) -> None:
    """What the actors of a trial found, which are on one machine where that matters.

    Raises:
        TransportError: the transport cannot work between them.
    """
    gpus = sorted({gpu for each in found for gpu in each.gpus})
    if name == "cuda_ipc" and len(gpus) > 1:
        raise TransportError(
            f"transport=cuda_ipc: the trial's actors must share one GPU, and Ray gave them "
            f"{', '.join(gpus)}; use transport=shm"
        )


def make_sender(name: str) -> WeightSender:
    return FrozenApartSender(SENDERS[name]())


def make_receiver(name: str, deadline_s: float, device: str = "cpu") -> WeightReceiver:
    """`device`: where the generator's weights are to stand, "cpu" or "cuda"."""
    return FrozenApartReceiver(RECEIVERS[name](deadline_s, device), deadline_s)


SENDERS: Mapping[str, Callable[[], WeightSender]] = {
    "object_store": ObjectStoreSender,
    "shm": ShmSender,
    **{name: partial(OneSidedSender, name) for name in ONE_SIDED},
    **{name: partial(TwoSidedSender, name) for name in TWO_SIDED},
}
RECEIVERS: Mapping[str, Callable[[float, str], WeightReceiver]] = {
    "object_store": lambda deadline_s, device: ObjectStoreReceiver(deadline_s),
    "shm": lambda deadline_s, device: ShmReceiver(),
    "nixl": NixlReceiver,
    "cuda_ipc": lambda deadline_s, device: CudaIpcReceiver(deadline_s),
    "gloo": lambda deadline_s, device: TwoSidedReceiver("gloo"),
    "nccl": lambda deadline_s, device: TwoSidedReceiver("nccl"),
}
