"""Ray Direct Transport: tensors go from actor to actor past the object store.

https://docs.ray.io/en/latest/ray-core/direct-transport.html, alpha in Ray 2.60. A snapshot travels
as one buffer. `nixl` and `cuda_ipc` are one-sided: a receiver takes what the sender has laid out.
The two-sided `gloo` and `nccl` send within a collective group whenever the driver passes the value
of the learner's `staged` on to a generator; where one side fails, Ray ends both actors.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout  # another class before Python 3.11
from dataclasses import dataclass
from typing import Any

import ray
import torch
from ray import experimental
from ray.exceptions import RayError
from ray.experimental.collective import create_collective_group, destroy_collective_group
from ray.util.collective.const import get_store_name
from torch import Tensor

from grpo_trainable.rollout import LiveWeights, PolicyWeights
from grpo_trainable.transports.base import TransportError
from grpo_trainable.transports.object_store import get_in_time
from grpo_trainable.transports.packing import Layout, Packed, Slots, layout_for, pack

ONE_SIDED = ("nixl", "cuda_ipc")
TWO_SIDED = ("gloo", "nccl")
FREED_DEADLINE_S = 60.0  # for Ray to let go of a snapshot that nobody needs


@dataclass(frozen=True)
class DirectWeights:
    """The handle of a one-sided transport. The reference is nested: Ray passes it on as it is."""

    packed: Packed
    ref: Any


class _Buffer:
    """Memory for one snapshot; for nixl it is registered once, which takes longer than a copy."""

    def __init__(self, layout: Layout, device: torch.device, register: bool) -> None:
        self.layout = layout
        self.round: int | None = None
        # Zeros: all pages are there.
        self.bytes = torch.zeros(layout.size, dtype=torch.uint8, device=device)
        self.views = layout.of(self.bytes)
        self.ref: Any = None  # by which one-sided transports find it
        self._registered = register
        if register:
            experimental.register_nixl_memory(self.bytes)

    def close(self) -> None:
        """Ray knows registered memory by its address, which another buffer may come to have."""
        if self._registered:
            experimental.deregister_nixl_memory(self.bytes)


def _close(slots: Slots[_Buffer]) -> None:
    for buffer in slots:
        buffer.close()
    slots.clear()


class _PackingSender:
    """Packs snapshots into buffers on the device of the weights."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._slots: Slots[_Buffer] = Slots(_Buffer)

    def release(self, before_round: int) -> None:
        self._slots.release(before_round)

    def close(self) -> None:
        _close(self._slots)

    def _take(self, weights: LiveWeights, frozen: Collection[str]) -> _Buffer:
        device = next(iter(weights.tensors.values())).device
        layout = layout_for(weights.tensors, frozen)
        return self._slots.take(weights.round, layout, device, self.name == "nixl")

    def _fill(self, buffer: _Buffer, weights: LiveWeights) -> Packed:
        packed = pack(weights, buffer.views, buffer.layout)
        if buffer.bytes.is_cuda:
            torch.cuda.synchronize(buffer.bytes.device)  # Ray reads it on a stream of its own
        return packed


class OneSidedSender(_PackingSender):
    """Receivers read a buffer as it is when they fetch, so that it needs one reference for all that
    is ever published in it. With one a publication memory would grow: every process that borrows a
    reference of `ray.put` keeps what Ray 2.60 needs to fetch it, 10 KB, for good (its #57962).
    """

    def publish(self, weights: LiveWeights, frozen: Collection[str] = ()) -> DirectWeights:
        buffer = self._take(weights, frozen)
        packed = self._fill(buffer, weights)
        if buffer.ref is None:
            buffer.ref = ray.put([buffer.bytes], _tensor_transport=self.name)
        return DirectWeights(packed=packed, ref=buffer.ref)


class TwoSidedSender(_PackingSender):
    """The handle says only how the buffer is packed: the buffer is the value of `staged`."""

    def publish(self, weights: LiveWeights, frozen: Collection[str] = ()) -> Packed:
        """
        Raises:
            TransportError: Ray still holds what was in the buffer.
        """
        buffer = self._take(weights, frozen)
        try:
            # Everybody has fetched what was in it; Ray hears of it a moment later.
            experimental.wait_tensor_freed(buffer.bytes, FREED_DEADLINE_S)
        except TimeoutError as error:
            raise TransportError(
                f"transport={self.name}: Ray still holds a snapshot that nobody needs any more, "
                f"after {FREED_DEADLINE_S:g} s"
            ) from error
        return self._fill(buffer, weights)

    def staged(self, round_: int) -> list[Tensor]:
        """The snapshot of this round, to be sent."""
        (buffer,) = (buffer for buffer in self._slots if buffer.round == round_)
        return [buffer.bytes]


class NixlReceiver:
    """Receives into registered buffers of its own, as many as are in use at a time."""

    name = "nixl"

    def __init__(self, deadline_s: float, device: str) -> None:
        self.deadline_s = deadline_s
        self._device = device
        self._slots: Slots[_Buffer] = Slots(_Buffer)

    def fetch(self, handle: DirectWeights, received: Any = None) -> PolicyWeights:
        packed, device = handle.packed, torch.device(self._device)
        buffer = self._slots.take(packed.round, packed.layout, device, True)
        experimental.set_target_for_ref(handle.ref, [buffer.bytes])
        get_in_time(handle.ref, self.deadline_s, self.name)
        return packed.unpacked(buffer.bytes)

    def release(self, before_round: int) -> None:
        self._slots.release(before_round)

    def close(self) -> None:
        _close(self._slots)


class CudaIpcReceiver:
    """Sees the sender's own buffers: both are on one GPU, and nothing is copied. Each is opened
    once, and kept until `close`."""

    name = "cuda_ipc"

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self._buffers: dict[Any, Tensor] = {}  # by reference

    def fetch(self, handle: DirectWeights, received: Any = None) -> PolicyWeights:
        buffer = self._buffers.get(handle.ref)
        if buffer is None:
            (buffer,) = get_in_time(handle.ref, self.deadline_s, self.name)
            self._buffers[handle.ref] = buffer
        return handle.packed.unpacked(buffer)

    def release(self, before_round: int) -> None:
        """The sender's buffers are the sender's."""

    def close(self) -> None:
        """Memory goes with its last tensor."""
        self._buffers = {}


class TwoSidedReceiver:
    """Ray has received the buffer before the call begins."""

    def __init__(self, name: str) -> None:
        self.name = name

    def fetch(self, handle: Packed, received: Any = None) -> PolicyWeights:
        (buffer,) = received
        return handle.unpacked(buffer)

    def release(self, before_round: int) -> None:
        """Memory goes with its last tensor."""

    def close(self) -> None:
        pass


class Group:
    """Learner and generators as one collective group, which the process that makes it may use."""

    def __init__(self, backend: str, actors: Sequence[Any], deadline_s: float) -> None:
        """
        Raises:
            TransportError: an actor is gone, or the backend does not start in time.
        """
        self._backend, self._size = backend, len(actors)
        if backend == "nccl" and ray.available_resources().get("CPU", 0.0) < 1:
            raise TransportError(
                "transport=nccl: Ray starts an actor of its own that brings the group together, "
                "and every CPU is reserved; leave one, by fewer resources.*_cpus or trials at once"
            )
        try:
            self._group = _in_time(
                lambda: create_collective_group(list(actors), backend=backend), deadline_s
            )
        except FutureTimeout:
            raise TransportError(
                f"transport={backend}: no group within resources.deadline_s={deadline_s:g} s; can "
                "the actors' machines reach each other?"
            ) from None
        except (RayError, RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())[:300]
            raise TransportError(f"transport={backend}: no group ({reason})") from error

    def forget(self) -> None:
        """Once its actors were killed; of live ones it would wait for answers."""
        with contextlib.suppress(RayError, ValueError):
            destroy_collective_group(self._group)
        if self._backend == "nccl":
            for rank in range(1, self._size):  # the learner is rank 0
                with contextlib.suppress(ValueError):
                    ray.kill(ray.get_actor(nccl_store(self._group.name, rank)))


def _in_time(do: Callable[[], Any], deadline_s: float) -> Any:
    """What `do` returns or raises; TimeoutError when it takes longer, and then it is left alone."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(do())
        except BaseException as error:
            future.set_exception(error)

    # No pool: its threads keep the process from ending.
    threading.Thread(target=run, daemon=True).start()
    return future.result(deadline_s)


def nccl_store(group: str, rank: int) -> str:
    """Name of Ray's actor by which rank 0 and this one met; it is detached and outlives them."""
    return get_store_name(f"0_0:{rank}_0@{group}")  # an actor's only GPU has number 0


def start_nixl() -> None:
    """Starts this process's agent, without which Ray's errors are about something else.

    Raises:
        TransportError: it does not start.
    """
    from ray.experimental.rdt.util import get_tensor_transport_manager

    try:
        manager: Any = get_tensor_transport_manager("NIXL")
        manager.get_nixl_agent()
    except Exception as error:  # of the library, whatever they are
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise TransportError(f"transport=nixl: its agent does not start ({reason})") from error
