"""Every transport that this machine has, between real actors: never torn, nothing left, faults."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import psutil
import pytest
import ray
import torch
from conftest import assert_no_actor_left, fit, trial_config
from ray import cloudpickle, tune

from grpo_trainable.calls import ActorFailed, OutOfBand
from grpo_trainable.config import GRPOConfig
from grpo_trainable.installed import missing_for
from grpo_trainable.metrics import NAMES, TIMED
from grpo_trainable.remote import RayActor, RayRuntime
from grpo_trainable.rollout import PolicyWeights, storage_checksum
from grpo_trainable.transports import (
    Group,
    Sender,
    ShmReceiver,
    ShmSender,
    check_here,
    choose_transport,
    make_receiver,
    make_sender,
)

# The actors' processes know the product, not its tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

# cuda_ipc and nccl need GPUs: tests/gpu.
ALL = ("object_store", "shm", "gloo", "nixl")
HERE = [
    pytest.param(name, marks=pytest.mark.skipif(bool(missing), reason=str(missing)))
    for name, missing in ((name, missing_for(name)) for name in ALL)
]


class Restless:
    """A learner's part: its weights change all the time except while they are published."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._tensors = {
            "by_row": torch.arange(100_000.0).view(250, 400),
            "by_column": torch.arange(60_000.0).view(200, 300).t(),
        }
        self._publishing = Lock()
        Thread(target=self._train, daemon=True).start()

    def _train(self) -> None:
        while True:
            with self._publishing:
                for tensor in self._tensors.values():
                    tensor += 1

    def publish(self, round_: int) -> tuple[Any, str]:
        with self._publishing:
            checksum = storage_checksum(self._tensors)
            weights = PolicyWeights(
                version=round_, round=round_, checksum=checksum, tensors=self._tensors
            )
            self._sender.release(round_)
            return self._sender.publish(weights), checksum

    def staged(self, round_: int) -> list[torch.Tensor]:
        return self._sender.staged(round_)  # type: ignore[attr-defined]

    def held(self) -> tuple[int, float]:
        return held()


class Reader:
    """A generator's part."""

    def __init__(self, receiver: Any) -> None:
        self._receiver = receiver

    def load(self, handle: Any, *received: Any) -> str:
        fetched = self._receiver.fetch(handle, *received)
        self._receiver.release(fetched.round)
        self._last = fetched  # in use until the next
        return storage_checksum(fetched.tensors)

    def held(self) -> tuple[int, float]:
        return held()


def held() -> tuple[int, float]:
    """Files, and MB of memory, this process's share of shared pages."""
    return len(os.listdir("/proc/self/fd")), psutil.Process().memory_full_info().pss / 1e6


class Line:
    """A learner's and a generator's part on one transport."""

    def __init__(self, name: str) -> None:
        self.runtime = RayRuntime()
        config = GRPOConfig.from_dict({"placement": "disaggregated", "transport": name})
        self.choice = choose_transport(config, ["one"])
        kwargs: dict[str, Any] = {"num_cpus": 1, "num_gpus": 0, "direct": self.choice.direct}
        self.learner = RayActor(Restless, "learner", make_sender(name), **kwargs)
        self.generator = RayActor(Reader, "generator", make_receiver(name, 60.0), **kwargs)
        self.actors = [self.learner, self.generator]
        for actor in self.actors:
            self.ask(actor, actor.submit_function("sync", check_here, name))
        if self.choice.two_sided:
            self.group = Group(name, [actor.handle for actor in self.actors])

    def ask(self, actor: RayActor, call: Any) -> Any:
        self.runtime.wait([call], 60.0)
        return self.runtime.result(call)

    def sync(self, round_: int) -> bool:
        """Whether the weights arrived as they were published."""
        handle, published = self.ask(self.learner, self.learner.submit("sync", "publish", round_))
        if self.choice.two_sided:
            handle = OutOfBand(handle, self.learner.tensors(self.choice.name, "staged", round_))
        return self.ask(self.generator, self.generator.submit("sync", "load", handle)) == published

    def held(self) -> list[tuple[int, float]]:
        return [self.ask(actor, actor.submit("sync", "held")) for actor in self.actors]


@pytest.fixture
def line(ray_session: None) -> Iterator[Any]:
    made: list[Line] = []

    def make(name: str) -> Line:
        made.append(Line(name))
        return made[-1]

    yield make
    for line in made:
        for actor in line.actors:
            actor.kill()


@pytest.mark.parametrize("name", HERE)
def test_weights_that_never_rest_arrive_whole_and_leave_nothing(line: Any, name: str) -> None:
    """500 syncs; memory, files and /dev/shm stay as they were after the first hundred."""
    way = line(name)
    for round_ in range(100):
        assert way.sync(round_)
    before, names = way.held(), set(os.listdir("/dev/shm"))
    for round_ in range(100, 500):
        assert way.sync(round_)
    for (files, memory), (files_before, memory_before) in zip(way.held(), before, strict=True):
        assert files <= files_before + 2
        assert memory <= 1.02 * memory_before + 2
    assert set(os.listdir("/dev/shm")) - names == set()


class Live(ShmSender):
    """What no transport may do: the learner's own memory is what receivers see."""

    def publish(self, weights: PolicyWeights) -> Any:
        handle = super().publish(weights)
        (slot,) = self.slots
        for place, view in zip(slot.places, slot._views, strict=True):
            weights.tensors[place.name] = view
        return handle


def test_tearing_would_be_seen(ray_session: None) -> None:
    learner = ray.remote(num_cpus=1)(Restless).remote(Live())
    generator = ray.remote(num_cpus=1)(Reader).remote(ShmReceiver())
    handle, published = ray.get(learner.publish.remote(0), timeout=60)  # type: ignore[attr-defined]
    seen = [
        ray.get(generator.load.remote(handle), timeout=60)  # type: ignore[attr-defined]
        for _ in range(20)
    ]
    assert sum(checksum != published for checksum in seen) > 15
    for actor in (learner, generator):
        ray.kill(actor)  # type: ignore[arg-type]


def untimed(row: dict[str, Any]) -> dict[str, float]:
    return {k: row[k] for k in row if k in NAMES and not k.startswith(TIMED)}


def test_the_transport_never_changes_a_synchronous_run(trainable: Any) -> None:
    told = {}
    for name in ALL:
        if missing_for(name) is None:
            running = trainable(trial_config(transport=name, rounds=2))
            running.step()
            told[name] = untimed(running.step())
            running.stop()
    first, *others = told.values()
    assert len(others) >= 2
    assert all(other == first for other in others)


def test_weights_may_travel_as_bfloat16(trainable: Any) -> None:
    bytes_ = {}
    for dtype in ("float32", "bfloat16"):
        running = trainable(trial_config(transport_dtype=dtype, rounds=1))
        row = running.step()
        bytes_[dtype] = row["sync/bytes"]
        running.stop()
    # The sampler's rounding is in the ratio from the first step on.
    assert 1e-5 < abs(row["loss/ratio_max"] - 1) < 0.2
    assert bytes_["bfloat16"] * 2 == bytes_["float32"]


# ---- Faults ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [p for p in HERE if p.values[0] in ("object_store", "nixl")])
def test_generator_that_died_is_replaced(trainable: Any, name: str) -> None:
    running = trainable(trial_config(transport=name, lag=1, rounds=4))
    running.step()
    running._actors[1].kill()
    for _ in range(2):
        row = running.step()
    assert row["count/redispatched"] >= 2


MURDER_ONCE = """
import os, pathlib, signal
done = pathlib.Path({file!r})

def reward(response, ground_truth):
    count = done.stat().st_size if done.exists() else 0
    with done.open("a") as file:
        file.write(".")
    if count == {at}:
        os.kill(os.getppid(), signal.SIGKILL)
    return 1.0
"""


def test_a_collective_group_is_made_anew_from_the_last_checkpoint(
    ray_session: None, tmp_path: Path
) -> None:
    reward = tmp_path / "murder.py"
    # The evaluation of round 0 asks for 12 rewards, a round for 16: in the third round.
    reward.write_text(MURDER_ONCE.format(file=str(tmp_path / "calls"), at=12 + 2 * 16 + 4))
    (result,) = fit(
        trial_config(
            transport="gloo",
            rounds=4,
            task={"reward": f"{reward}:reward", "reward_deadline_s": 2.0},
            checkpoint={"every": 1},
        ),
        tmp_path / "results",
        failure_config=tune.FailureConfig(max_failures=1),
    )
    assert result.error is None
    assert result.metrics is not None
    assert result.metrics["training_iteration"] == 4
    assert "generator-0" in (Path(result.path) / "error.txt").read_text()
    assert_no_actor_left()


def run(trainable: Any, rounds: int) -> None:
    for _ in range(rounds):
        trainable.step()


def test_a_lost_generator_of_a_collective_group_is_an_error(trainable: Any) -> None:
    running = trainable(trial_config(transport="gloo", lag=1, rounds=50))
    running.step()
    running._actors[1].kill()
    with pytest.raises(ActorFailed, match=r"(generator-0|learner) died"):
        run(running, 5)


def test_transport_that_an_actor_cannot_use_fails_before_training(
    trainable: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing_for("nixl") is None:
        pytest.skip("nixl is installed")
    with pytest.raises(ActorFailed, match=r"transport=nixl: the library nixl is not installed"):
        trainable(trial_config(transport="nixl"))
    assert_no_actor_left()
