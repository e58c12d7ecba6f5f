"""Which transport a trial uses, and whether that one can work where its actors are."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from grpo_trainable.config import GRPOConfig
from grpo_trainable.transports.base import Receiver, Sender, TransportError
from grpo_trainable.transports.object_store import ObjectStoreReceiver, ObjectStoreSender
from grpo_trainable.transports.shm import ShmReceiver, ShmSender


@dataclass(frozen=True, kw_only=True)
class Choice:
    name: str  # of a transport; never `auto`
    why: str


def choose_transport(config: GRPOConfig, nodes: Sequence[str]) -> Choice:
    """`nodes`: of the trial's actors, in any order and as often as one likes.

    Raises:
        TransportError: the transport that the config names cannot work between them.
    """
    apart = len(set(nodes)) > 1
    if config.placement == "colocated":
        return Choice(name="in_process", why="generator and learner are one process")
    if config.transport != "auto":
        if config.transport == "shm" and apart:
            raise TransportError(
                f"transport=shm: the trial's actors are on {len(set(nodes))} machines, which share "
                "no memory; use transport=object_store, or auto"
            )
        return Choice(name=config.transport, why="asked for")
    if apart:
        return Choice(name="object_store", why=f"actors on {len(set(nodes))} machines")
    if not hasattr(os, "memfd_create"):
        return Choice(name="object_store", why="this system has no memfd_create")
    return Choice(name="shm", why="all actors are on one machine")


def make_sender(name: str) -> Sender:
    return SENDERS[name]()


def make_receiver(name: str, deadline_s: float) -> Receiver:
    return ObjectStoreReceiver(deadline_s) if name == "object_store" else ShmReceiver()


SENDERS: dict[str, Callable[[], Sender]] = {"object_store": ObjectStoreSender, "shm": ShmSender}
