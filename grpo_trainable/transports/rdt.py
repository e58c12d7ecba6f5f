"""Ray Direct Transport: tensors are sent from actor to actor and bypass the object store.

This alpha feature is described at
https://docs.ray.io/en/latest/ray-core/direct-transport.html. A snapshot is sent as one buffer. With
`nixl` and `cuda_ipc`, a receiver fetches the buffer that the sender has prepared. With `gloo` and
`nccl`, the driver passes the result of the learner's method `staged` to a generator, and Ray then
sends the buffer within a collective group. If one side of a transfer fails, Ray ends both actors.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout  # a separate class before Python 3.11
from dataclasses import dataclass
from typing import Any, ClassVar

import ray
import torch
from ray.exceptions import RayError
from torch import Tensor

from grpo_trainable.protocol.rollout import LiveWeights, PolicyWeights
from grpo_trainable.storage import ray_private
from grpo_trainable.storage.ray_private import (
    create_collective_group,
    destroy_collective_group,
    get_store_name,
    get_tensor_transport_manager,
    register_nixl_memory,
    set_target_for_ref,
    wait_tensor_freed,
)
from grpo_trainable.transports.network_interface import let_gloo_use
from grpo_trainable.transports.object_store import get_in_time
from grpo_trainable.transports.packing import Layout, Packed, Slots, layout_for, pack
from grpo_trainable.transports.transport import TransportError

FREED_DEADLINE_S = 60.0  # time limit for Ray to release a snapshot that is no longer needed


@dataclass(frozen=True)
class DirectWeights:
    """The handle of `nixl` and `cuda_ipc`. Ray does not resolve a `ref` inside a handle."""

    packed: Packed
    ref: Any


class _Buffer:
    """Memory for one snapshot.

    A buffer is registered with `nixl` only once, because registering takes longer than copying.
    """

    def __init__(self, layout: Layout, device: torch.device, register: bool) -> None:
        self.layout = layout
        self.round: int | None = None
        # Writing zeros makes the system provide all memory pages immediately.
        self.bytes = torch.zeros(layout.size, dtype=torch.uint8, device=device)
        self.views = layout.of(self.bytes)
        self.ref: Any = None  # Ray's reference to the buffer, for receivers that fetch it
        self._registered = register
        if register:
            register_nixl_memory(self.bytes)

    def close(self) -> None:
        """Remove the registration, because another buffer may later get the same address."""
        if self._registered:
            ray_private.deregister_nixl_memory(self.bytes)


def _close(slots: Slots[_Buffer]) -> None:
    for buffer in slots:
        buffer.close()
    slots.clear()


class _PackingSender:
    """Packs snapshots into buffers on the device of the weights."""

    name: ClassVar[str]  # Ray's name for the transport

    def __init__(self) -> None:
        self._slots: Slots[_Buffer] = Slots(_Buffer)

    def release(self, before_round: int) -> None:
        """Free the buffers of rounds before `before_round`."""
        self._slots.release(before_round)

    def close(self) -> None:
        """Drop all buffers."""
        _close(self._slots)

    def _take(self, weights: LiveWeights, frozen: Collection[str]) -> _Buffer:
        device = next(iter(weights.tensors.values())).device
        layout = layout_for(weights.tensors, frozen)
        return self._slots.take(weights.round, layout, device, self.name == "nixl")

    def _fill(self, buffer: _Buffer, weights: LiveWeights) -> Packed:
        packed = pack(weights, buffer.views, buffer.layout)
        if buffer.bytes.is_cuda:
            torch.cuda.synchronize(buffer.bytes.device)  # Ray reads the buffer on another stream
        return packed


class _PullSender(_PackingSender):
    """Calls `ray.put` once for each buffer, and reuses the reference for later publications.

    Receivers get the content that the buffer has when they fetch it. A new reference for each
    publication would make memory grow: every process that borrows a reference from `ray.put`
    permanently keeps the 10 KB that Ray 2.60 needs to fetch the buffer (Ray issue #57962).
    """

    def publish(self, weights: LiveWeights, frozen: Collection[str] = ()) -> DirectWeights:
        """Pack a snapshot, without `frozen` tensors, into a free buffer, and return its handle."""
        buffer = self._take(weights, frozen)
        packed = self._fill(buffer, weights)
        if buffer.ref is None:
            buffer.ref = ray.put([buffer.bytes], _tensor_transport=self.name)
        return DirectWeights(packed=packed, ref=buffer.ref)


class NixlSender(_PullSender):
    """The sender of `nixl`."""

    name = "nixl"


class CudaIpcSender(_PullSender):
    """The sender of `cuda_ipc`."""

    name = "cuda_ipc"


class _TwoSidedSender(_PackingSender):
    """Sends a buffer as the result of `staged`. The handle only describes the buffer."""

    def publish(self, weights: LiveWeights, frozen: Collection[str] = ()) -> Packed:
        """Pack a snapshot into a free buffer, once Ray has released the previous content.

        Raises:
            TransportError: Ray still holds the previous content of the buffer.
        """
        buffer = self._take(weights, frozen)
        try:
            # Every generator has fetched the content, but Ray learns this only a moment later.
            wait_tensor_freed(buffer.bytes, FREED_DEADLINE_S)
        except TimeoutError as error:
            raise TransportError(
                f"transport={self.name}: Ray did not release an unused snapshot within "
                f"{FREED_DEADLINE_S:g} s"
            ) from error
        return self._fill(buffer, weights)

    def staged(self, round_: int) -> list[Tensor]:
        """Return the buffer with the snapshot of this round, so that Ray can send the buffer."""
        (buffer,) = (buffer for buffer in self._slots if buffer.round == round_)
        return [buffer.bytes]


class GlooSender(_TwoSidedSender):
    """The sender of `gloo`."""

    name = "gloo"

    def __init__(self) -> None:
        super().__init__()
        let_gloo_use(ray.util.get_node_ip_address())


class NcclSender(_TwoSidedSender):
    """The sender of `nccl`."""

    name = "nccl"


class NixlReceiver:
    """Receives into registered buffers, one for each snapshot in use."""

    name = "nixl"

    def __init__(self, deadline_s: float, device: str) -> None:
        self.deadline_s = deadline_s
        self._device = device
        self._slots: Slots[_Buffer] = Slots(_Buffer)

    def fetch(self, handle: DirectWeights, received: Any = None) -> PolicyWeights:
        """Fetch the snapshot behind `handle` into a free buffer."""
        packed, device = handle.packed, torch.device(self._device)
        buffer = self._slots.take(packed.round, packed.layout, device, True)
        set_target_for_ref(handle.ref, [buffer.bytes])
        get_in_time(handle.ref, self.deadline_s, self.name)
        return packed.unpacked(buffer.bytes)

    def release(self, before_round: int) -> None:
        """Free the buffers of rounds before `before_round`."""
        self._slots.release(before_round)

    def close(self) -> None:
        """Drop all buffers."""
        _close(self._slots)


class CudaIpcReceiver:
    """Reads the sender's buffers. Both ends share one GPU, so nothing is copied.

    A buffer is opened once and kept until `close`.
    """

    name = "cuda_ipc"

    def __init__(self, deadline_s: float, device: str = "cuda") -> None:
        self.deadline_s = deadline_s
        self._buffers: dict[Any, Tensor] = {}  # reference -> opened buffer

    def fetch(self, handle: DirectWeights, received: Any = None) -> PolicyWeights:
        """Return the snapshot behind `handle`, which shares the sender's memory."""
        buffer = self._buffers.get(handle.ref)
        if buffer is None:
            (buffer,) = get_in_time(handle.ref, self.deadline_s, self.name)
            self._buffers[handle.ref] = buffer
        return handle.packed.unpacked(buffer)

    def release(self, before_round: int) -> None:
        """Do nothing: the buffers belong to the sender."""

    def close(self) -> None:
        """Forget the buffers. The memory of a buffer is freed with its last tensor."""
        self._buffers = {}


class _TwoSidedReceiver:
    """Unpacks a buffer that Ray has already received when `fetch` is called."""

    def __init__(self, deadline_s: float, device: str) -> None:
        """Set up a receiver. Both arguments are ignored.

        Ray waits for the buffer, which arrives on the generator's device.
        """

    def fetch(self, handle: Packed, received: Any = None) -> PolicyWeights:
        """Return the snapshot in `received`, a list that contains its buffer."""
        (buffer,) = received
        return handle.unpacked(buffer)

    def release(self, before_round: int) -> None:
        """Do nothing: the memory of a snapshot is freed with its last tensor."""

    def close(self) -> None:
        """Do nothing: no buffer is kept."""


class GlooReceiver(_TwoSidedReceiver):
    """The receiver of `gloo`."""

    name = "gloo"

    def __init__(self, deadline_s: float, device: str) -> None:
        super().__init__(deadline_s, device)
        let_gloo_use(ray.util.get_node_ip_address())


class NcclReceiver(_TwoSidedReceiver):
    """The receiver of `nccl`."""

    name = "nccl"


class CollectiveGroup:
    """Collective group of the learner and the generators.

    Only the process that created the group can use it.
    """

    def __init__(self, backend: str, actors: Sequence[Any], deadline_s: float) -> None:
        """Create the group of all actors.

        Raises:
            TransportError: An actor has died, the backend does not start in time, or `nccl` finds
                no free CPU.
        """
        self._backend, self._size = backend, len(actors)
        if backend == "nccl" and ray.available_resources().get("CPU", 0.0) < 1:
            raise TransportError(
                "transport=nccl: Ray needs one CPU for the actor that forms the group, but every "
                "CPU is reserved; lower resources.*_cpus or run fewer trials in parallel"
            )
        try:
            self._group = _in_time(
                lambda: create_collective_group(list(actors), backend=backend), deadline_s
            )
        except FutureTimeout:
            raise TransportError(
                f"transport={backend}: the process group did not form within resources.deadline_s="
                f"{deadline_s:g} s; check that the actors' machines can reach each other"
            ) from None
        except (RayError, RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())[:300]
            raise TransportError(
                f"transport={backend}: the process group did not form ({reason})"
            ) from error

    def forget(self) -> None:
        """Remove the group.

        The caller must kill the group's actors first, because removal waits for live actors.
        """
        with contextlib.suppress(RayError, ValueError):
            destroy_collective_group(self._group)
        if self._backend == "nccl":
            for rank in range(1, self._size):  # the learner is rank 0
                with contextlib.suppress(ValueError):
                    ray.kill(ray.get_actor(nccl_store(self._group.name, rank)))


def _in_time(do: Callable[[], Any], deadline_s: float) -> Any:
    """Return the result of `do`, or raise its exception.

    If `do` takes longer than `deadline_s`, raise a TimeoutError and let `do` continue.
    """
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(do())
        except BaseException as error:
            future.set_exception(error)

    # A daemon thread, because the threads of a pool would keep the process from ending.
    threading.Thread(target=run, daemon=True).start()
    return future.result(deadline_s)


def nccl_store(group: str, rank: int) -> str:
    """Return the name of the Ray actor through which rank 0 and `rank` found each other.

    This actor outlives both ranks.
    """
    return get_store_name(f"0_0:{rank}_0@{group}")  # an actor sees only one GPU, number 0


def start_nixl() -> None:
    """Start the nixl agent of this process.

    If the agent were started later and could not start, Ray's errors would hide the reason.

    Raises:
        TransportError: The agent does not start.
    """
    try:
        manager: Any = get_tensor_transport_manager("NIXL")
        manager.get_nixl_agent()
    except Exception as error:  # the library may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise TransportError(f"transport=nixl: the nixl agent does not start ({reason})") from error
