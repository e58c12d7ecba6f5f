"""The learner's and the generator's side of a transport, for tests with real actors."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import time
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import psutil
import torch
from ray import cloudpickle

from grpo_trainable.cluster.ray_actors import RayActor, RayRuntime
from grpo_trainable.cluster.transport_choice import (
    check_here,
    choose_transport,
    make_receiver,
    make_sender,
)
from grpo_trainable.config import GRPOConfig
from grpo_trainable.protocol.calls import OutOfBand, await_call
from grpo_trainable.protocol.checksums import storage_checksum
from grpo_trainable.protocol.rollout import LiveWeights
from grpo_trainable.protocol.weight_transfer import WeightSender
from grpo_trainable.transports.rdt import CollectiveGroup

# The actors' processes can import the product, but not its tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Restless:
    """The learner's side of a transport. Its weights keep changing, except during a publication."""

    def __init__(self, sender: WeightSender, device: str, scale: int = 1) -> None:
        """Start to change the weights, whose size is `scale` times 640 KB."""
        self._sender = sender
        self._tensors = {
            "by_row": torch.arange(100_000.0 * scale, device=device).view(-1, 400),
            "by_column": torch.arange(60_000.0 * scale, device=device).view(-1, 300).t(),
        }
        self._publishing = Lock()
        self._asked = False  # pauses `_train`, which would take the lock again at once
        Thread(target=self._train, daemon=True).start()

    def _train(self) -> None:
        while True:
            while self._asked:
                time.sleep(1e-5)
            with self._publishing:
                for tensor in self._tensors.values():
                    tensor += 1

    def publish(self, round_: int) -> tuple[Any, str]:
        self._asked = True
        with self._publishing:
            self._asked = False
            checksum = storage_checksum(self._tensors)
            weights = LiveWeights(version=round_, round=round_, tensors=self._tensors)
            self._sender.release(round_ - 1)  # the generator still uses this round
            return self._sender.publish(weights), checksum

    def staged(self, round_: int) -> list[torch.Tensor]:
        return self._sender.staged(round_)  # type: ignore[attr-defined]

    def held(self) -> tuple[int, int, float]:
        return held()


class Reader:
    """The generator's side of a transport."""

    def __init__(self, receiver: Any, device: str) -> None:
        self._receiver = receiver
        self._device = device

    def load(self, handle: Any, received: Any = None, sent_at: float = 0.0) -> str:
        self.fetch(handle, received)
        return self.read()

    def fetch(self, handle: Any, received: Any = None, sent_at: float = 0.0) -> None:
        self._last = self._receiver.fetch(handle, received)  # in use until the next fetch
        self._receiver.release(self._last.round)

    def read(self) -> str:
        used = {name: tensor.to(self._device) for name, tensor in self._last.tensors.items()}
        return storage_checksum(used)

    def held(self) -> tuple[int, int, float]:
        return held()


def held() -> tuple[int, int, float]:
    """Return the number of files and mappings, and the private memory in MB, GPU memory included.

    Ray's store is a single mapping, and processes touch its pages one by one. The freed memory that
    glibc keeps varies, so it is returned to the system first.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    gpu = torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0
    mappings = Path("/proc/self/maps").read_text().count("\n")
    memory = psutil.Process().memory_full_info().uss + gpu
    return len(os.listdir("/proc/self/fd")), mappings, memory / 1e6


class Line:
    """The learner's and the generator's side of a transport, as actors."""

    def __init__(self, name: str, gpus: float = 0, scale: int = 1) -> None:
        """Start both actors with `gpus` GPUs each and weights of the given `scale`."""
        self.runtime = RayRuntime()
        resources = {"generator_gpus": gpus, "learner_gpus": gpus}
        config = GRPOConfig.from_dict(
            {"placement": "disaggregated", "transport": name, "resources": resources}
        )
        self.transport = choose_transport(config, ["one"]).transport
        self._device = "cuda" if gpus else "cpu"
        self._scale = scale
        self._kwargs = {"num_cpus": 1, "num_gpus": gpus, "direct": self.transport.tensor_transport}
        self.learner = self._learner()
        self.generator = self._generator()
        self.check(self.learner, self.generator)
        if self.transport.two_sided:
            self.group = CollectiveGroup(name, [actor.handle for actor in self.actors], 60.0)

    @property
    def actors(self) -> list[RayActor]:
        return [self.learner, self.generator]

    def _learner(self) -> RayActor:
        sender = make_sender(self.transport.name)
        return RayActor(Restless, "learner", sender, self._device, self._scale, **self._kwargs)

    def _generator(self) -> RayActor:
        receiver = make_receiver(self.transport.name, 60.0)
        return RayActor(Reader, "generator", receiver, self._device, **self._kwargs)

    def check(self, *actors: RayActor) -> None:
        for actor in actors:
            self.ask(actor.submit_function("sync", check_here, self.transport.name))

    def ask(self, call: Any) -> Any:
        return await_call(self.runtime, call, 60.0)

    def publish(self, round_: int) -> tuple[Any, str]:
        """Return the handle that a generator loads and the checksum that it should find."""
        handle, published = self.ask(self.learner.submit("sync", "publish", round_))
        if self.transport.two_sided:
            ref = self.learner.tensors(self.transport.name, "staged", round_)
            handle = OutOfBand(handle, ref, sent_at=0.0)
        return handle, published

    def sync(self, round_: int) -> bool:
        """Return True if the weights arrive as they were published."""
        handle, published = self.publish(round_)
        return self.load(handle) == published

    def load(self, handle: Any) -> str:
        """Return the checksum of the weights that the generator received."""
        return self.ask(self.generator.submit("sync", "load", handle))

    def process(self, actor: RayActor) -> psutil.Process:
        return psutil.Process(self.ask(actor.submit_function("sync", os.getpid)))

    def kill_learner(self) -> None:
        """Kill the learner, and return when its process has ended."""
        process = self.process(self.learner)
        self.learner.kill()
        process.wait(60.0)

    def replace_learner(self) -> None:
        """Start a new learner that knows nothing about the old learner."""
        self.learner = self._learner()
        self.check(self.learner)

    def replace_generator(self) -> None:
        self.generator = self._generator()
        self.check(self.generator)

    def held(self) -> list[tuple[int, int, float]]:
        """Return the smallest of several readings, because Ray frees received data with a delay."""
        readings = []
        for _ in range(5):
            readings.append([self.ask(a.submit("sync", "held")) for a in self.actors])
            time.sleep(0.1)
        return [
            (min(files), min(mappings), min(memory))
            for files, mappings, memory in (
                zip(*own, strict=True) for own in zip(*readings, strict=True)
            )
        ]
