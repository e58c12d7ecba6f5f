"""Choose the transport of a trial, and check that it works between the trial's actors."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray

from grpo_trainable.config import GRPOConfig
from grpo_trainable.config.transport_catalog import TRANSPORTS, Transport, transport_named
from grpo_trainable.plugins import load
from grpo_trainable.protocol.weight_transfer import WeightReceiver, WeightSender
from grpo_trainable.transports.frozen import FrozenApartReceiver, FrozenApartSender
from grpo_trainable.transports.transport import TransportError


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """Results of the checks that an actor's process makes before training."""

    # Ids of the GPUs that Ray gave the actor. Empty unless the transport requires that all actors
    # share one GPU.
    gpus: tuple[str, ...]
    seconds: float  # duration of the checks, in seconds


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The transport of a trial."""

    key: str  # a name in TRANSPORTS or a reference to a user's transport, but never `auto`
    transport: Transport
    why: str  # reason for the choice, for the console
    # Number of machines that fetch weights, not counting the machine of the publishing learner.
    far_machines: int = 0


def choose_transport(config: GRPOConfig, nodes: Sequence[str]) -> Choice:
    """Return the transport that the config names or, for `auto`, the most suitable one.

    Args:
        config: Config of the trial.
        nodes: Machines of the publishing learner and of the generators, in this order.

    Raises:
        TransportError: The named transport cannot work between these machines.
        PluginError: The user's transport cannot be loaded.
    """
    if config.placement == "colocated":
        return _built_in("in_process", "generator and learner are one process")
    home, far = nodes[0], set(nodes) - {nodes[0]}
    chosen = _suiting(home, far, nodes[1:]) if config.transport == "auto" else _named(config, far)
    return replace(chosen, far_machines=len(far))


def _suiting(home: str, far: set[str], generators: Sequence[str]) -> Choice:
    """Return the most suitable transport.

    Args:
        home: Machine of the learner.
        far: Other machines that run generators.
        generators: Machine of each generator.
    """
    missing = TRANSPORTS["shm"].missing()
    if missing is not None:
        return _built_in("object_store", missing)
    if not far:
        return _built_in("shm", "all actors are on one machine")
    if home not in generators:
        return _built_in("object_store", "no generator is on the learner's machine")
    return _built_in("by_machine", "shm on the learner's machine, object_store on others")


def _built_in(name: str, why: str) -> Choice:
    return Choice(key=name, transport=TRANSPORTS[name], why=why)


def _named(config: GRPOConfig, far: set[str]) -> Choice:
    key = config.transport
    transport = transport_named(key)
    refused = transport.refuses_actors(**config.resources.actors)
    if refused is not None:
        raise TransportError(f"transport={key}: {refused}")
    if transport.one_machine and far:
        raise TransportError(
            f"transport={key}: the trial's actors are on {1 + len(far)} machines, which do not "
            "share memory; use transport=object_store or auto"
        )
    return Choice(
        key=key, transport=transport, why="; ".join(filter(None, ("as configured", transport.cost)))
    )


def check_here(key: str) -> Preflight:
    """Check, before training, that the transport works in this actor's process.

    Raises:
        TransportError: The transport does not work here.
    """
    began = time.perf_counter()
    transport = transport_named(key)
    missing = transport.missing()
    if missing is not None:
        raise TransportError(f"transport={key}: {missing}")
    if transport.start is not None:
        _made(transport.start)()
    gpus = ray.get_gpu_ids() if transport.gpus == "shared" else ()
    return Preflight(gpus=tuple(map(str, gpus)), seconds=time.perf_counter() - began)


def check_together(transport: Transport, found: Sequence[Preflight]) -> None:
    """Compare the check results of a trial's actors.

    Raises:
        TransportError: The transport cannot work between the actors.
    """
    gpus = sorted({gpu for each in found for gpu in each.gpus})
    if transport.gpus == "shared" and len(gpus) > 1:
        raise TransportError(
            f"transport={transport.name}: the trial's actors must share one GPU, but Ray gave them "
            f"GPUs {', '.join(gpus)}; use transport=shm"
        )


def make_sender(key: str, far_machines: int = 0) -> WeightSender:
    """Return the learner's end of a transport. It sends frozen tensors only once.

    Args:
        key: The transport, as `Choice.key`.
        far_machines: Number of machines that fetch weights, not counting the learner's.
    """
    transport = transport_named(key)
    told = (far_machines,) if transport.in_parts else ()
    return FrozenApartSender(_made(transport.sender)(*told), far_machines)


def make_receiver(
    key: str, deadline_s: float, device: str = "cpu", first: float = 0.0
) -> WeightReceiver:
    """Return a generator's end of a transport.

    Args:
        key: The transport, as `Choice.key`.
        deadline_s: Time limit in seconds for a fetch.
        device: Device for the weights, "cpu" or "cuda".
        first: Index of the part of a snapshot that is fetched first, divided by the number of
            parts; in [0, 1).
    """
    transport = transport_named(key)
    told = (first,) if transport.in_parts else ()
    trained = _made(transport.receiver)(deadline_s, device, *told)
    return FrozenApartReceiver(trained, transport.name, deadline_s, first)


def make_both_ends(key: str) -> Any:
    """Return one object that is both the sender and the receiver of a colocated worker."""
    return _made(transport_named(key).sender)()


def _made(by: str | Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that a transport record gives directly or as `module:name`."""
    return load("transport", by) if isinstance(by, str) else by
