"""Every transport that works on this machine: complete weights, no leaks, and faults."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
import ray
import torch
from conftest import kill, trial_config, untimed, written_by_the_page
from ray import cloudpickle
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from weight_lines import Line, Reader, Restless

from grpo_trainable.cluster.ray_actors import RayActor, RayRuntime
from grpo_trainable.cluster.transport_choice import make_receiver, make_sender
from grpo_trainable.config import GRPOConfig
from grpo_trainable.config.transport_catalog import TRANSPORTS
from grpo_trainable.models.store import build_policy
from grpo_trainable.protocol.calls import ActorFailed, ActorLost, await_call
from grpo_trainable.protocol.checksums import storage_checksum
from grpo_trainable.protocol.rollout import LiveWeights
from grpo_trainable.transports.chunks import StoredParts
from grpo_trainable.transports.object_store import (
    ObjectStoreReceiver,
    ObjectStoreSender,
    StoredWeights,
)
from grpo_trainable.transports.shm import ShmReceiver, ShmSender
from grpo_trainable.transports.transport import TransportError

# The transports cuda_ipc and nccl need GPUs and are tested in tests/gpu.
ALL = ("object_store", "shm", "gloo", "nixl")
WARM_UP = 60  # syncs before the first half
SYNCS = 150  # in each half of the test for leaks
# A tenth of the megabytes that a half transfers. Less growth is no leak, because Ray keeps a
# little data about each call.
TENTH_MB = 0.1 * SYNCS * 0.64
Held = list[tuple[int, int, float]]  # (files, mappings, memory in MB), for each actor
HERE = [
    pytest.param(name, marks=pytest.mark.skipif(bool(missing), reason=str(missing)))
    for name, missing in ((name, TRANSPORTS[name].missing()) for name in ALL)
]


@pytest.fixture
def line(ray_session: None) -> Iterator[Any]:
    made: list[Line] = []

    def make(name: str, **kwargs: Any) -> Line:
        made.append(Line(name, **kwargs))
        return made[-1]

    yield make
    for line in made:
        for actor in line.actors:
            actor.kill()


@pytest.mark.parametrize("name", HERE)
def test_weights_that_never_rest_arrive_whole_and_leave_nothing(line: Any, name: str) -> None:
    """Check that memory, files and /dev/shm are the same after 300 syncs.

    A leak would grow in both halves of the syncs. A one-time allocation by Ray or glibc appears in
    only one half.
    """
    way = line(name)
    for round_ in range(WARM_UP):
        assert way.sync(round_)
    before, names = way.held(), set(os.listdir("/dev/shm"))
    for round_ in range(WARM_UP, WARM_UP + SYNCS):
        assert way.sync(round_)
    middle = way.held()
    for round_ in range(WARM_UP + SYNCS, WARM_UP + 2 * SYNCS):
        assert way.sync(round_)
    # On a busy machine Ray takes a while to release the data that it received.
    until = time.monotonic() + 30.0
    while (leaks := grown(before, middle, way.held())) and time.monotonic() < until:
        time.sleep(1.0)
    assert leaks == []
    assert set(os.listdir("/dev/shm")) - names == set()


def grown(*held: Held) -> list[str]:
    """Return the quantities that grew from every measurement to the next, in either actor."""
    return [
        f"{what}: {values}"
        for own in zip(*held, strict=True)
        for what, values, allowed in zip(
            ("files", "mappings", "memory"),
            zip(*own, strict=True),
            (1, 8, TENTH_MB),  # the growth allowed; glibc's own mappings come and go
            strict=True,
        )
        if all(later > earlier + allowed for earlier, later in pairwise(values))
    ]


# The actors' processes cannot import this module, which defines the class below.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Live(ShmSender):
    """A forbidden transport: receivers see the learner's own memory."""

    def publish(self, weights: LiveWeights, frozen: Collection[str] = ()) -> Any:
        handle = super().publish(weights)
        (slot,) = self.slots
        weights.tensors.update(slot._views)
        return handle


def test_tearing_would_be_seen(ray_session: None) -> None:
    learner = ray.remote(num_cpus=1)(Restless).remote(Live(), "cpu")
    generator = ray.remote(num_cpus=1)(Reader).remote(ShmReceiver(), "cpu")
    handle, published = ray.get(learner.publish.remote(0), timeout=60)  # type: ignore[attr-defined]
    seen = [
        ray.get(generator.load.remote(handle), timeout=60)  # type: ignore[attr-defined]
        for _ in range(20)
    ]
    assert any(checksum != published for checksum in seen)
    for actor in (learner, generator):
        ray.kill(actor)  # type: ignore[arg-type]


def test_weights_in_parts_arrive_whole_and_as_they_were_published(ray_session: None) -> None:
    tensors = {f"layer {i}": torch.randn(300, 700).t() for i in range(4)}  # 3.4 MB, in three parts
    tensors |= {"scale": torch.ones(7, dtype=torch.bfloat16), "frozen": torch.zeros(400_000)}
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    sender = make_sender("object_store", far_machines=2)
    receivers = [make_receiver("object_store", 60.0, first=first) for first in (0.0, 0.5)]
    handle = sender.publish(LiveWeights(version=8, round=2, tensors=tensors), {"frozen"})
    assert len(handle.trained.refs) == 3
    for name in kept:
        tensors[name].add_(1)  # as the next gradient step does
    for fetched in (receiver.fetch(handle) for receiver in receivers):
        assert (fetched.version, fetched.round) == (8, 2)
        assert fetched.checksum == storage_checksum(fetched.tensors) == storage_checksum(kept)


def test_weights_in_parts_have_one_deadline_together(ray_session: None) -> None:
    tensors = {"layer": torch.zeros(1_000_000)}
    handle = ObjectStoreSender(2).publish(LiveWeights(version=1, round=1, tensors=tensors))
    assert isinstance(handle, StoredParts)

    @ray.remote(num_cpus=0)
    def late(seconds: float) -> None:
        time.sleep(seconds)

    first, *others = handle.refs
    never = replace(handle, refs=(first, *(late.remote(0.4) for _ in others[1:]), late.remote(30)))
    with pytest.raises(TransportError, match=r"did not arrive within resources\.deadline_s=0\.5 s"):
        ObjectStoreReceiver(0.5).fetch(never)


def test_each_generator_fetches_by_what_leads_to_its_machine(ray_session: None) -> None:
    tensors = {"layer": torch.arange(600_000.0)}
    sender, receiver = make_sender("by_machine", 2), make_receiver("by_machine", 60.0, first=0.5)
    for round_, way in enumerate(("shm", "object_store", "shm")):
        handle = sender.publish(LiveWeights(version=round_, round=round_, tensors=tensors))
        if way != "shm":
            handle = replace(handle, trained=replace(handle.trained, machine="another"))
        fetched = receiver.fetch(handle)
        assert (fetched.round, receiver.name) == (round_, way)
        assert fetched.checksum == storage_checksum(fetched.tensors) == storage_checksum(tensors)
    receiver.close()
    sender.close()


def test_the_transport_never_changes_a_synchronous_run_nor_does_a_users(
    begun: Any, trainable: Any, tmp_path: Path
) -> None:
    weights = tmp_path / "weights"
    page = written_by_the_page("transport.md", "my_transport.py", tmp_path)
    page.write_text(page.read_text().replace("/tmp/weights", str(weights)))
    told = {}
    for name in (*(n for n in ALL if TRANSPORTS[n].missing() is None), f"{page}:FILES"):
        begin = begun if name in ALL else trainable
        running = begin(trial_config(transport=name, rounds=2, eval={"every": 2}))
        running.step()
        told[name] = untimed(running.step())
    running.stop()
    assert weights.is_dir()  # the learner's process created it
    assert list(weights.iterdir()) == []  # the process removed its own directory in `weights`
    first, *others = told.values()
    assert len(others) >= 3
    assert all(other == first for other in others)


@pytest.mark.parametrize("name", HERE)
def test_weights_may_travel_as_bfloat16(begun: Any, name: str) -> None:
    config = trial_config(transport=name, transport_dtype="bfloat16", rounds=1)
    row = begun(config).step()
    model, _ = build_policy(GRPOConfig().model, 0)
    assert row["sync/bytes"] == 2 * sum(parameter.numel() for parameter in model.parameters())
    # Even in the first step, the ratio includes the rounding of the sampler's weights.
    assert 1e-5 < abs(row["loss/ratio_max"] - 1) < 0.2


def test_a_trial_may_sample_in_bfloat16(begun: Any) -> None:
    row = begun(trial_config(model={"sampler_dtype": "bfloat16"}, rounds=1)).step()
    assert 1e-6 < row["kl/sampler_mismatch_nats"] < 0.1
    # Ratios are relative to the learner's own log-probs, without the sampler's rounding. The
    # importance weights include this rounding.
    assert abs(row["loss/ratio_max"] - 1) < 1e-5


@pytest.mark.parametrize("name", [p for p in HERE if p.values[0] in ("gloo", "nixl")])
def test_weights_may_come_between_two_tokens(begun: Any, name: str) -> None:
    """Check transports of Ray Direct Transport. Tests of the pipeline check `in_flight` itself."""
    config = trial_config(transport=name, lag=1, weight_update="in_flight", rounds=4)
    running = begun(config)
    rows = [running.step() for _ in range(4)]
    assert max(row["lag/max"] for row in rows) <= 1
    model, _ = build_policy(GRPOConfig().model, 0)
    size = sum(parameter.nbytes for parameter in model.parameters())
    # The first publication, before round 1, does not count. A load may be counted a round late, so
    # the sum is checked.
    assert sum(row["sync/bytes"] for row in rows) == 4 * size
    assert rows[-1]["version/generator"] == rows[-1]["version/learner"] == 4


@pytest.mark.parametrize("name", [p for p in HERE if p.values[0] in ("gloo", "nixl")])
def test_actors_that_begin_anew_keep_their_way(begun: Any, name: str) -> None:
    """As for a PBT clone, the settings change, but the actors and their group stay."""
    running = begun(trial_config(transport=name, lag=1))
    running.step()
    before = [actor.handle for actor in running.trial.actors]
    assert running.reset_config(trial_config(transport=name, lag=1, optim={"lr": 2e-3}))
    row = [running.step() for _ in range(2)][-1]
    assert row["version/learner"] == 2
    assert [actor.handle for actor in running.trial.actors] == before


def test_what_is_frozen_travels_once(ray_session: None) -> None:
    tensors = {"still": torch.randn(300), "moving": torch.randn(20, 30).t()}
    sender, receiver, other = make_sender("shm"), *(make_receiver("shm", 60.0) for _ in range(2))
    handles, fetched = [], []
    for round_ in range(3):
        tensors["moving"] += 1
        checksum = storage_checksum(tensors)
        weights = LiveWeights(version=round_, round=round_, tensors=tensors)
        handles.append(sender.publish(weights, frozen=["still"]))
        fetched.append(receiver.fetch(handles[-1]))
        assert storage_checksum(fetched[-1].tensors) == fetched[-1].checksum == checksum
    assert len({id(handle.frozen) for handle in handles}) == 1
    # Only weights that change arrive as new tensors. The generator counts the bytes of new tensors.
    assert len({id(weights.tensors["still"]) for weights in fetched}) == 1
    assert len({id(weights.tensors["moving"]) for weights in fetched}) == 3
    # A replacement generator receives both the frozen and the changing weights.
    assert storage_checksum(other.fetch(handles[-1]).tensors) == checksum
    # For a new trial in the same actors, or for other names, frozen weights are published again.
    sender.close()
    assert sender.publish(weights, frozen=["still"]).frozen is not handles[-1].frozen
    assert sender.publish(weights).frozen is None
    sender.close()


# ---- Faults ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [p for p in HERE if p.values[0] in ("object_store", "nixl")])
def test_generator_that_died_is_replaced(begun: Any, name: str) -> None:
    running = begun(trial_config(transport=name, lag=1, rounds=4))
    running.step()
    kill(running, "generator-0")
    for _ in range(2):
        row = running.step()
    assert row["count/redispatched"] >= 2


ONE_SIDED = [p for p in HERE if p.values[0] != "gloo"]


@pytest.mark.parametrize("name", ONE_SIDED)
def test_learner_that_died_before_its_weights_were_fetched_leaves_an_error_or_whole_weights(
    line: Any, name: str
) -> None:
    """A new learner can replace the dead learner and use the same generator."""
    way = line(name)
    assert way.sync(0)
    handle, published = way.publish(1)
    way.kill_learner()
    load = way.generator.submit("sync", "load", handle)
    if name == "object_store":  # Ray's object store may still have the weights
        with contextlib.suppress(ActorFailed):
            assert way.ask(load) == published
    else:
        with pytest.raises(ActorLost, match=f"generator failed with TransportError.*{name}"):
            way.ask(load)
    way.replace_learner()
    for round_ in range(3):
        assert way.sync(round_)


@pytest.mark.parametrize("name", HERE)
def test_what_was_fetched_stays_whole_though_the_learner_dies(line: Any, name: str) -> None:
    way = line(name)
    handle, published = way.publish(0)
    way.ask(way.generator.submit("sync", "fetch", handle))
    way.kill_learner()
    assert way.ask(way.generator.submit("sync", "read")) == published


def load_fails_when_killed(way: Line, victim: RayActor) -> bool:
    """Kill `victim` in the middle of the generator's load, and return True if the load fails.

    If the weights arrive nevertheless, they are complete.
    """
    for round_ in range(3):  # the first rounds set up the buffers
        handle, published = way.publish(round_)
        started = time.monotonic()
        try:
            assert way.load(handle) == published
        except ActorLost:
            # Once in CI, Ray 2.60 lost a transfer between new actors. The deadline makes such a
            # loss an error, and the caller starts new actors.
            assert way.transport.two_sided
            return False
        took = time.monotonic() - started
    process = way.process(victim)
    handle, published = way.publish(3)
    Timer(took / 2, process.kill).start()
    try:
        assert way.load(handle) == published
        return False
    except ActorFailed:
        return True
    finally:
        process.wait(60.0)


@pytest.mark.parametrize("name", HERE)
def test_actors_killed_in_mid_transfer_leave_an_error_or_whole_weights(
    line: Any, name: str
) -> None:
    """Kill actors while 64 MB of weights arrive. Mapped weights outlive the learner."""
    way = line(name, scale=100)
    mapped = name in ("shm", "object_store")
    for victim in ("learner", "generator"):
        for _ in range(5):  # try again if the kill comes too late
            failed = load_fails_when_killed(way, getattr(way, victim))
            if way.transport.two_sided:
                for actor in way.actors:  # the other actor too, if it still runs
                    actor.kill()
                way = line(name, scale=100)
            elif victim == "learner":
                way.replace_learner()
            else:
                way.replace_generator()
            if failed or (victim == "learner" and mapped):
                break
        else:
            pytest.fail(f"{victim} was never killed during a transfer")
    assert way.sync(0)


def test_weights_that_do_not_come_in_time_are_an_error(ray_session: None) -> None:
    never = ray.remote(num_cpus=0)(lambda: time.sleep(60)).remote()
    with pytest.raises(TransportError, match=r"not arrive within resources\.deadline_s=0\.5 s"):
        ObjectStoreReceiver(deadline_s=0.5).fetch(StoredWeights(never))
    ray.cancel(never, force=True)


def run(trainable: Any, rounds: int) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for _ in range(rounds):
        row = trainable.step()
    return row


def test_a_lost_generator_of_a_collective_group_is_an_error_after_which_the_group_is_made_anew(
    begun: Any, tmp_path: Path
) -> None:
    config = trial_config(transport="gloo", lag=1, rounds=6)
    running = begun(config)
    run(running, 2)
    running.save_checkpoint(str(tmp_path / "last"))
    kill(running, "generator-0")
    with pytest.raises(ActorFailed, match=r"(generator-0|learner) died"):
        run(running, 4)
    # Tune retries a trial in the same way.
    again = begun(config)
    again.restore(str(tmp_path / "last"))
    row = run(again, 4)
    assert row["done"]
    assert row["count/requested"] == row["count/trained"] == 24


class Starts:
    """A learner that makes Ray start another actor."""

    def start(self) -> bool:
        return ray.get(ray.remote(Starts).remote().__ray_ready__.remote(), timeout=120)


def test_what_ray_starts_beside_an_actor_needs_no_room_in_the_trials_reservation(
    ray_session: None,
) -> None:
    """For nccl, Ray starts a further actor, through which sender and receiver find each other.

    A trial's reservation has no room for this actor.
    """
    group = placement_group([{"CPU": 1}, {"CPU": 1}])

    def trial() -> bool:
        learner = RayActor(Starts, "learner", num_cpus=1, num_gpus=0)
        return await_call(RayRuntime(), learner.submit("sync", "start"), 150.0)

    place = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
    try:
        started = ray.remote(num_cpus=1, scheduling_strategy=place)(trial).remote()
        assert ray.get(started, timeout=240)
    finally:
        remove_placement_group(group)


def test_transport_that_an_actor_cannot_use_fails_before_training(
    trainable: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if TRANSPORTS["nixl"].missing() is None:
        pytest.skip("nixl is installed")
    running = trainable(trial_config(transport="nixl"))
    with pytest.raises(ActorFailed, match=r"transport=nixl: the library nixl is not installed"):
        running.step()
