"""The transports of weights from the learner to the generators: one record for each.

This module imports only the standard library, so the config and the launcher can read the records.
Objects that a record names by `module:name` are imported in the processes that use them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

from grpo_trainable.plugins import PluginError, load, load_instance, missing_library

Sidedness = Literal["in_process", "pull", "two_sided"]
GPUs = Literal["any", "none", "shared", "own"]

INSTALL_NIXL = "pip install --no-deps nixl nixl-cu12"


def _nothing() -> str | None:
    return None


@dataclass(frozen=True, kw_only=True)
class Transport:
    """A way of moving weights, with its requirements, limits and cost.

    `grpo_trainable.protocol.weight_transfer` defines the interfaces of the sender and the receiver.
    For each of the two, the record contains the callable that creates it, or the callable's name as
    `module:name`. The callable runs in the process that uses the sender or receiver. The callable
    for the sender takes no arguments. The callable for the receiver takes two: `deadline_s`,
    the number of seconds within which weights must arrive, and `device` ("cpu" or "cuda"), on which
    the receiver's generator computes.
    """

    name: str  # name of the transport in metric rows, traces and errors
    sender: str | Callable[[], Any]
    receiver: str | Callable[[float, str], Any]
    # in_process: one object is both sender and receiver, in a colocated worker. pull: the receiver
    # fetches the snapshot that the sender has prepared. two_sided: the learner and the generators
    # form one Ray collective group. The group transfers weights on the driver's request, and does
    # not survive the loss of an actor.
    sidedness: Sidedness = "pull"
    # any: weights may be on GPUs or in main memory. none: weights must be in main memory. shared:
    # all actors share one GPU. own: each actor has its own GPU.
    gpus: GPUs = "any"
    one_machine: bool = False  # True: all actors must be on one machine
    # True: snapshots are sent to other machines in parts. In this case, the callable for the sender
    # takes one argument: the number of other machines that fetch snapshots. The callable for the
    # receiver takes a third argument, in [0, 1): the index of the part to begin with, divided by
    # the number of parts.
    in_parts: bool = False
    tensor_transport: bool = False  # True: Ray must know the transport when it starts an actor
    start: str | Callable[[], None] | None = None  # called in each actor's process before training
    missing_library: Callable[[], str | None] = _nothing  # returns what this process lacks, or None
    cost: str = ""  # a cost that a user should know before choosing the transport

    def __post_init__(self) -> None:
        for name, valid in (("sidedness", get_args(Sidedness)), ("gpus", get_args(GPUs))):
            value = getattr(self, name)
            if value not in valid:
                raise ValueError(
                    f"transport {self.name}: {name}={value}: must be one of {', '.join(valid)}"
                )

    @property
    def two_sided(self) -> bool:
        """Return True if the learner and the generators form one collective group."""
        return self.sidedness == "two_sided"

    def missing(self) -> str | None:
        """Return what this process lacks and how to get it, or None."""
        if self.gpus in ("shared", "own") and not _gpus_seen():
            return "torch sees no CUDA device"
        return self.missing_library()

    def missing_on_machine(self) -> str | None:
        """Return what this machine lacks, or None. Call this in a process that sees all GPUs."""
        missing = self.missing()
        if missing is None and self.gpus == "own" and _gpus_seen() < 2:
            return "needs a GPU for each actor, but there is only one"
        return missing

    def refuses_actors(
        self,
        *,
        generator_gpus: float,
        learner_gpus: float,
        num_generators: int,
        num_learners: int,
    ) -> str | None:
        """Return why the transport does not suit the trial's actors and GPUs, or None."""
        if num_learners > 1 and (self.two_sided or self.gpus == "shared"):
            return (
                f"works with only one learner, got resources.num_learners={num_learners}; use "
                "transport=auto"
            )
        both = (generator_gpus, learner_gpus)
        if self.gpus == "none" and max(both) > 0:
            return "moves only weights in main memory; on GPUs, use transport=nccl or auto"
        if self.gpus in ("shared", "own") and min(both) == 0:
            return (
                "needs resources.generator_gpus > 0 and resources.learner_gpus > 0, "
                f"got {generator_gpus:g} and {learner_gpus:g}"
            )
        asked = generator_gpus * num_generators + learner_gpus
        if self.gpus == "shared" and asked > 1:
            return f"all actors must share one GPU, but they request {asked:g} GPUs"
        if self.gpus == "own" and min(both) < 1:
            return (
                "every actor needs its own GPU, got "
                f"resources.generator_gpus={generator_gpus:g} and "
                f"resources.learner_gpus={learner_gpus:g}"
            )
        return None


def _gpus_seen() -> int:
    return load("transport", "grpo_trainable.transports.transport:gpus_seen")()


def _no_memfd() -> str | None:
    return (
        None if hasattr(os, "memfd_create") else "this system has no memfd_create; it needs Linux"
    )


def _no_nixl() -> str | None:
    # Without `deregister_nixl_memory`, Ray keeps the registrations of memory that has been freed.
    too_old = load("transport", "grpo_trainable.storage.ray_private:too_old_for")
    return missing_library("nixl", INSTALL_NIXL) or too_old("deregister_nixl_memory")


TRANSPORTS: dict[str, Transport] = {
    transport.name: transport
    for transport in (
        Transport(
            name="in_process",
            sender="grpo_trainable.transports.in_process:InProcess",
            receiver="grpo_trainable.transports.in_process:InProcess",
            sidedness="in_process",
        ),
        Transport(
            name="object_store",
            sender="grpo_trainable.transports.object_store:ObjectStoreSender",
            receiver="grpo_trainable.transports.object_store:ObjectStoreReceiver",
            in_parts=True,
        ),
        Transport(
            name="shm",
            sender="grpo_trainable.transports.shm:ShmSender",
            receiver="grpo_trainable.transports.shm:ShmReceiver",
            one_machine=True,
            missing_library=_no_memfd,
        ),
        Transport(
            name="by_machine",
            sender="grpo_trainable.transports.by_machine:ByMachineSender",
            receiver="grpo_trainable.transports.by_machine:ByMachineReceiver",
            in_parts=True,
            missing_library=_no_memfd,
        ),
        Transport(
            name="nixl",
            sender="grpo_trainable.transports.rdt:NixlSender",
            receiver="grpo_trainable.transports.rdt:NixlReceiver",
            tensor_transport=True,
            start="grpo_trainable.transports.rdt:start_nixl",
            missing_library=_no_nixl,
            cost="its agents poll, so each process uses nearly one CPU core in addition to its "
            "reserved cores",
        ),
        Transport(
            name="gloo",
            sender="grpo_trainable.transports.rdt:GlooSender",
            receiver="grpo_trainable.transports.rdt:GlooReceiver",
            sidedness="two_sided",
            gpus="none",
            tensor_transport=True,
        ),
        Transport(
            name="nccl",
            sender="grpo_trainable.transports.rdt:NcclSender",
            receiver="grpo_trainable.transports.rdt:NcclReceiver",
            sidedness="two_sided",
            gpus="own",
            tensor_transport=True,
            missing_library=partial(missing_library, "cupy", "pip install cupy-cuda12x"),
        ),
        Transport(
            name="cuda_ipc",
            sender="grpo_trainable.transports.rdt:CudaIpcSender",
            receiver="grpo_trainable.transports.rdt:CudaIpcReceiver",
            gpus="shared",
            one_machine=True,
            tensor_transport=True,
        ),
    )
}


def transport_named(key: str) -> Transport:
    """Return the record of a transport: one of TRANSPORTS, or a user's record `file.py:NAME`.

    Raises:
        PluginError: The user's record cannot be loaded, is not a `Transport`, or has a sidedness
            other than `pull`.
    """
    if key in TRANSPORTS:
        return TRANSPORTS[key]
    found = load_instance("transport", key, Transport)
    if found.sidedness != "pull":
        raise PluginError(
            f"transport={key}: sidedness={found.sidedness} is only for built-in transports; "
            "use pull"
        )
    return found
