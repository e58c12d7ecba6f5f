"""Ray Direct Transport: tensors go from actor to actor past the object store.

https://docs.ray.io/en/latest/ray-core/direct-transport.html, alpha in Ray 2.60. A snapshot travels
as one buffer. With `nixl` and `cuda_ipc` a receiver fetches what the sender has laid out. The other
two, `gloo` and `nccl`, send within a collective group whenever the driver passes the value of the
learner's `staged` on to a generator; where one side fails, Ray ends both actors.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout  # another class before Python 3.11
from dataclasses import dataclass
from typing import Any, ClassVar

import ray
import torch
from ray.exceptions import RayError
from torch import Tensor

from grpo_trainable.protocol.rollout import LiveWeights, PolicyWeights
from grpo_trainable.storage.ray_private import (
    create_collective_group,
    deregister_nixl_memory,
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

FREED_DEADLINE_S = 60.0  # how long Ray may take to let go of a snapshot that nobody needs


@dataclass(frozen=True)
class DirectWeights:
    """The handle of `nixl` and `cuda_ipc`. The reference is nested: Ray passes it on as it is."""

    packed: Packed
    ref: Any


class _Buffer:
    """Memory for one snapshot; `nixl` registers it once, which takes longer than a copy."""

    def __init__(self, layout: Layout, device: torch.device, register: bool) -> None:
        self.layout = layout
        self.round: int | None = None
        # Zeros make the system provide all pages now.
        self.bytes = torch.zeros(layout.size, dtype=torch.uint8, device=device)
        self.views = layout.of(self.bytes)
        self.ref: Any = None  # receivers that fetch find the snapshot here
        self._registered = register
        if register:
            register_nixl_memory(self.bytes)

    def close(self) -> None:
        """Takes back the registration: another buffer may come to have the same address."""
        if self._registered:
            deregister_nixl_memory(self.bytes)


def _close(slots: Slots[_Buffer]) -> None:
    for buffer in slots:
        buffer.close()
    slots.clear()


class _PackingSender:
    """Packs snapshots into buffers on the device of the weights."""

    name: ClassVar[str]  # Ray knows the transport by it

    def __init__(self) -> None:
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


class _PullSender(_PackingSender):
    """Puts each buffer into Ray once, whatever is published in it later.

    Receivers read a buffer as it is when they fetch. With a reference for each publication memory
    would grow: every process that borrows a reference of `ray.put` keeps what Ray 2.60 needs to
    fetch it, 10 KB, for good (its #57962).
    """

    def publish(self, weights: LiveWeights, frozen: Collection[str] = ()) -> DirectWeights:
        buffer = self._take(weights, frozen)
        packed = self._fill(buffer, weights)
        if buffer.ref is None:
            buffer.ref = ray.put([buffer.bytes], _tensor_transport=self.name)
        return DirectWeights(packed=packed, ref=buffer.ref)


class NixlSender(_PullSender):
    name = "nixl"


class CudaIpcSender(_PullSender):
    name = "cuda_ipc"


class _TwoSidedSender(_PackingSender):
    """Sends a buffer as the value of `staged`; the handle says only how the buffer is packed."""

    def publish(self, weights: LiveWeights, frozen: Collection[str] = ()) -> Packed:
        """Fills a free buffer, once Ray has let go of its last content.

        Raises:
            TransportError: Ray still holds what was in the buffer.
        """
        buffer = self._take(weights, frozen)
        try:
            # Every generator has fetched its content; Ray learns of that a moment later.
            wait_tensor_freed(buffer.bytes, FREED_DEADLINE_S)
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


class GlooSender(_TwoSidedSender):
    name = "gloo"

    def __init__(self) -> None:
        super().__init__()
        let_gloo_use(ray.util.get_node_ip_address())


class NcclSender(_TwoSidedSender):
    name = "nccl"


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
        set_target_for_ref(handle.ref, [buffer.bytes])
        get_in_time(handle.ref, self.deadline_s, self.name)
        return packed.unpacked(buffer.bytes)

    def release(self, before_round: int) -> None:
        self._slots.release(before_round)

    def close(self) -> None:
        _close(self._slots)


class CudaIpcReceiver:
    """Reads the sender's own buffers: both ends are on one GPU, and nothing is copied.

    A buffer is opened once and kept until `close`.
    """

    name = "cuda_ipc"

    def __init__(self, deadline_s: float, device: str = "cuda") -> None:
        self.deadline_s = deadline_s
        self._buffers: dict[Any, Tensor] = {}  # reference -> the buffer that was opened

    def fetch(self, handle: DirectWeights, received: Any = None) -> PolicyWeights:
        buffer = self._buffers.get(handle.ref)
        if buffer is None:
            (buffer,) = get_in_time(handle.ref, self.deadline_s, self.name)
            self._buffers[handle.ref] = buffer
        return handle.packed.unpacked(buffer)

    def release(self, before_round: int) -> None:
        """Does nothing: the buffers belong to the sender."""

    def close(self) -> None:
        """Forgets the buffers; memory is freed with its last tensor."""
        self._buffers = {}


class _TwoSidedReceiver:
    """Unpacks the buffer that Ray has received before the call begins."""

    def __init__(self, deadline_s: float, device: str) -> None:
        """Needs neither: Ray waits for the buffer, which arrives on the generator's device."""

    def fetch(self, handle: Packed, received: Any = None) -> PolicyWeights:
        (buffer,) = received
        return handle.unpacked(buffer)

    def release(self, before_round: int) -> None:
        """Does nothing: the memory is freed with its last tensor."""

    def close(self) -> None:
        """Does nothing: no buffer is kept."""


class GlooReceiver(_TwoSidedReceiver):
    name = "gloo"

    def __init__(self, deadline_s: float, device: str) -> None:
        super().__init__(deadline_s, device)
        let_gloo_use(ray.util.get_node_ip_address())


class NcclReceiver(_TwoSidedReceiver):
    name = "nccl"


class CollectiveGroup:
    """Learner and generators as one collective group, used by the process that made it."""

    def __init__(self, backend: str, actors: Sequence[Any], deadline_s: float) -> None:
        """Makes the group of all actors.

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
        """Removes the group after its actors were killed; live ones would be waited for."""
        with contextlib.suppress(RayError, ValueError):
            destroy_collective_group(self._group)
        if self._backend == "nccl":
            for rank in range(1, self._size):  # the learner is rank 0
                with contextlib.suppress(ValueError):
                    ray.kill(ray.get_actor(nccl_store(self._group.name, rank)))


def _in_time(do: Callable[[], Any], deadline_s: float) -> Any:
    """What `do` returns or raises. After `deadline_s` a TimeoutError, while `do` goes on."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(do())
        except BaseException as error:
            future.set_exception(error)

    # A daemon thread, since the threads of a pool would keep the process from ending.
    threading.Thread(target=run, daemon=True).start()
    return future.result(deadline_s)


def nccl_store(group: str, rank: int) -> str:
    """The name of Ray's actor through which rank 0 and this rank met, and which outlives both."""
    return get_store_name(f"0_0:{rank}_0@{group}")  # an actor's only GPU has number 0


def start_nixl() -> None:
    """Starts this process's agent now, since Ray's own errors would hide why it cannot start.

    Raises:
        TransportError: it does not start.
    """
    try:
        manager: Any = get_tensor_transport_manager("NIXL")
        manager.get_nixl_agent()
    except Exception as error:  # the library may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise TransportError(f"transport=nixl: its agent does not start ({reason})") from error
