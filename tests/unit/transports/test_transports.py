"""Transports without Ray: snapshots do not change, arrive complete, and leave nothing behind."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from weight_reader import fetch_in_turn

from grpo_trainable.cluster.transport_choice import (
    Choice,
    Preflight,
    check_here,
    check_together,
    choose_transport,
    make_receiver,
    make_sender,
)
from grpo_trainable.cluster.trial_actors import MadeInActor
from grpo_trainable.command_line import UsageError
from grpo_trainable.config import ConfigError, GRPOConfig, transport_catalog
from grpo_trainable.config.transport_catalog import TRANSPORTS, Transport
from grpo_trainable.plugins import PluginError, load
from grpo_trainable.protocol.checksums import storage_checksum
from grpo_trainable.protocol.rollout import LiveWeights, PolicyWeights
from grpo_trainable.transports import rdt
from grpo_trainable.transports.in_process import InProcess
from grpo_trainable.transports.rdt import CudaIpcReceiver, CudaIpcSender
from grpo_trainable.transports.shm import SharedWeights, ShmReceiver, ShmSender
from grpo_trainable.transports.transport import TransportError
from tuning.checks import check_transport


def live(scale: float = 1.0) -> dict[str, Tensor]:
    """Return tensors of several types and layouts, with empty ones and a zero-dimensional one."""
    generator = torch.Generator().manual_seed(3)
    return {
        "by_row": scale * torch.randn(7, 5, generator=generator),
        "by_column": (scale * torch.randn(300, 40, generator=generator)).t(),
        "short": (scale * torch.randn(33, generator=generator)).to(torch.bfloat16),
        "empty": torch.zeros(0, 4),
        "empty_askew": torch.zeros(5, 0, 3).permute(2, 0, 1),
        "one_row": (scale * torch.randn(1, 77, generator=generator)).as_strided((1, 77), (1, 1)),
        "scalar": torch.tensor(float(scale)),
    }


def weights(tensors: dict[str, Tensor], round_: int = 0) -> LiveWeights:
    return LiveWeights(version=10 * round_, round=round_, tensors=tensors)


def assert_arrived(fetched: PolicyWeights, tensors: dict[str, Tensor]) -> None:
    assert fetched.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(fetched.tensors[name], tensor)
        assert fetched.tensors[name].dtype == tensor.dtype
        assert fetched.tensors[name].data_ptr() % 64 == 0
    assert storage_checksum(fetched.tensors) == fetched.checksum == storage_checksum(tensors)


@pytest.fixture
def sender() -> Iterator[ShmSender]:
    sender = ShmSender()
    yield sender
    sender.close()


# ---- Snapshots -------------------------------------------------------------------------------


def test_weights_arrive_with_their_version_round_and_layout(sender: ShmSender) -> None:
    tensors = live()
    fetched = ShmReceiver().fetch(sender.publish(weights(tensors, round_=3)))
    assert (fetched.version, fetched.round) == (30, 3)
    assert_arrived(fetched, tensors)
    # With other strides, a copy would not copy raw bytes, and its checksum would need a separate
    # pass over the data.
    for name, tensor in tensors.items():
        assert fetched.tensors[name].stride() == tensor.stride()


def test_layout_is_read_once_in_a_process(sender: ShmSender) -> None:
    first, second = (
        pickle.loads(pickle.dumps(sender.publish(weights(live(), round_=r)))) for r in range(2)
    )
    assert first.packed.layout is second.packed.layout
    assert first.packed.round != second.packed.round


@pytest.mark.parametrize("make", [InProcess, ShmSender])
def test_what_is_published_does_not_change_with_the_learner(make: Any) -> None:
    sender, tensors = make(), live()
    receiver = sender if make is InProcess else ShmReceiver()
    fetched = receiver.fetch(sender.publish(weights(tensors)))
    for tensor in tensors.values():
        tensor.fill_(7)
    sender.publish(weights(tensors, round_=1))
    assert_arrived(fetched, live())
    sender.close()


def test_the_live_tensors_by_themselves_would_be_torn() -> None:
    """Check that the checksum detects a transport that hands out live parameters."""
    tensors = live()
    published = storage_checksum(tensors)
    tensors["by_column"][3] += 1
    assert storage_checksum(tensors) != published


def test_slot_is_written_again_only_when_its_round_is_released(sender: ShmSender) -> None:
    receiver = ShmReceiver()
    handles = [sender.publish(weights(live(scale=r + 1), round_=r)) for r in range(3)]
    fetched = [receiver.fetch(handle) for handle in handles]
    for round_, snapshot in enumerate(fetched):
        assert_arrived(snapshot, live(scale=round_ + 1))

    sender.release(before_round=1)
    reused = sender.publish(weights(live(scale=9), round_=3))
    assert reused.fd == handles[0].fd
    with pytest.raises(TransportError, match="version 0 were overwritten before they were fetched"):
        receiver.fetch(handles[0])
    for round_ in (1, 2):
        assert_arrived(receiver.fetch(handles[round_]), live(scale=round_ + 1))
    fourth = sender.publish(weights(live(), round_=4))
    assert fourth.fd not in {handle.fd for handle in handles}


def test_weights_of_another_shape_get_a_slot_of_their_own(sender: ShmSender) -> None:
    first = sender.publish(weights(live()))
    sender.release(1)
    other = {"only": torch.arange(5000.0)}
    second = sender.publish(weights(other, round_=1))
    assert second.fd != first.fd
    assert_arrived(ShmReceiver().fetch(second), other)


def test_ray_hears_of_a_buffer_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that borrows a reference keeps Ray's record of it forever, so senders reuse one."""
    put: list[list[Tensor]] = []

    def number(value: list[Tensor], _tensor_transport: str) -> int:
        put.append(value)
        return len(put) - 1

    monkeypatch.setattr(rdt.ray, "put", number)
    monkeypatch.setattr(rdt, "get_in_time", lambda ref, *rest: put[ref])
    sender, receiver, tensors = CudaIpcSender(), CudaIpcReceiver(60.0), live()
    for round_ in range(20):
        for tensor in tensors.values():
            tensor += 1
        assert_arrived(receiver.fetch(sender.publish(weights(tensors, round_))), tensors)
        sender.release(round_)
    assert len(put) == 2


# ---- Other processes -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def other_process() -> Iterator[tuple[Any, Any]]:
    context = multiprocessing.get_context("spawn")
    handles, answers = context.Queue(), context.Queue()
    process = context.Process(target=fetch_in_turn, args=(handles, answers))
    process.start()
    yield handles, answers
    handles.put(None)
    process.join(timeout=120)
    assert process.exitcode == 0


@pytest.mark.slow
def test_another_process_gets_whole_snapshots_while_the_learner_goes_on(
    sender: ShmSender, other_process: tuple[Any, Any]
) -> None:
    handles, answers = other_process
    tensors = live()
    for round_ in range(200):
        for tensor in tensors.values():
            tensor += 1
        handles.put(sender.publish(weights(tensors, round_=round_)))
        # Once the snapshot has been fetched, the generator needs no older snapshot.
        assert answers.get(timeout=120) == (round_, True)
        sender.release(before_round=round_)
        for tensor in tensors.values():
            tensor.mul_(-1)


@pytest.mark.slow
def test_it_would_be_noticed_if_slots_were_written_while_they_are_used(
    sender: ShmSender, other_process: tuple[Any, Any]
) -> None:
    handles, answers = other_process
    first = sender.publish(weights(live()))
    sender.release(1)  # a false claim: nobody has fetched the snapshot
    second = sender.publish(weights(live(scale=2), round_=1))
    assert second.fd == first.fd
    handles.put(first)
    assert "overwritten" in answers.get(timeout=120)[1]
    # Even with a correct header, the checksum does not match, because the weights are different.
    handles.put(replace(first, publication=second.publication))
    assert answers.get(timeout=120) == (0, False)


@pytest.mark.slow
def test_memory_of_a_sender_that_was_killed_stays_until_its_readers_are_gone(
    tmp_path: Path,
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED_SENDER], stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert process.stdout is not None
    handle: SharedWeights = pickle.loads(bytes.fromhex(process.stdout.readline()))
    receiver, before = ShmReceiver(), mapped_memory()
    fetched = receiver.fetch(handle)
    assert mapped_memory() == before + 1
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert torch.equal(fetched.tensors["a"], torch.arange(5000.0))
    with pytest.raises(TransportError, match=r"cannot be opened .*same user, on the same machine"):
        ShmReceiver().fetch(handle)
    del fetched
    receiver.close()
    assert mapped_memory() == before


KILLED_SENDER = """
import pickle
import time
import torch
from grpo_trainable.protocol.rollout import LiveWeights
from grpo_trainable.transports.shm import ShmSender
sender = ShmSender()
a = {"a": torch.arange(5000.0)}
handle = sender.publish(LiveWeights(version=1, round=1, tensors=a))
print(pickle.dumps(handle).hex(), flush=True)
time.sleep(60)
"""


def mapped_memory() -> int:
    """Return the number of mappings of senders' memory in this process."""
    return Path("/proc/self/maps").read_text().count("memfd:grpo-weights")


def test_a_file_that_came_to_bear_the_number_is_not_taken_for_the_slot() -> None:
    sender = ShmSender()
    handle = sender.publish(weights(live()))
    other = ShmSender()
    impostor = other.publish(weights(live()))
    with pytest.raises(TransportError, match="is no longer the sender's memory"):
        ShmReceiver().fetch(replace(handle, fd=impostor.fd))
    sender.close()
    other.close()


@pytest.mark.slow
def test_a_thousand_syncs_leave_memory_files_and_dev_shm_as_they_were() -> None:
    def held() -> tuple[int, int, list[str]]:
        return len(os.listdir("/proc/self/fd")), mapped_memory(), sorted(os.listdir("/dev/shm"))

    before = held()
    sender, receiver, tensors = ShmSender(), ShmReceiver(), live()
    for round_ in range(1000):
        fetched = receiver.fetch(sender.publish(weights(tensors, round_=round_)))
        sender.release(before_round=round_)
    # Two slots, each mapped by the sender and by the receiver. Each mapping keeps a file open.
    files, mappings, names = held()
    assert (files - before[0], mappings - before[1], names) == (2 + 4, 4, before[2])
    del fetched
    sender.close()
    receiver.close()
    del sender, receiver
    assert held() == before


def test_memory_that_cannot_be_had_is_one_line(
    sender: ShmSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "ftruncate", full)
    with pytest.raises(TransportError, match=r"could not allocate [\d,]+ bytes .*No space left"):
        sender.publish(weights(live()))


# ---- The choice of a transport ---------------------------------------------------------------

APART = {"placement": "disaggregated"}


@pytest.mark.parametrize(
    ("data", "nodes", "name", "why"),
    [
        ({}, ["a"], "in_process", "one process"),
        (APART, ["a", "a"], "shm", "one machine"),
        (APART, ["a", "b", "c"], "object_store", "no generator is on the learner's machine"),
        (APART, ["a", "b", "a"], "by_machine", "shm on the learner's machine, object_store on"),
        (APART | {"transport": "object_store"}, ["a", "b"], "object_store", "as configured"),
        (APART | {"transport": "object_store"}, ["a"], "object_store", "as configured"),
        (APART | {"transport": "shm"}, ["a"], "shm", "as configured"),
        (APART | {"transport": "nixl"}, ["a"], "nixl", "uses nearly one CPU core"),
    ],
)
def test_auto_follows_where_the_actors_are(
    data: dict[str, Any], nodes: list[str], name: str, why: str
) -> None:
    choice = choose_transport(GRPOConfig.from_dict(data), nodes)
    assert choice.key == choice.transport.name == name
    assert why in choice.why


@pytest.mark.parametrize(
    ("ray", "missing"),
    [
        ("2.55.1", "needs Ray 2.56 or newer, and Ray 2.55.1 is installed"),
        ("2.56.0", None),
        ("3.0.0.dev0", None),
    ],
)
def test_nixl_needs_a_version_of_ray_that_unregisters_memory(
    monkeypatch: pytest.MonkeyPatch, ray: str, missing: str | None
) -> None:
    monkeypatch.setattr(transport_catalog, "missing_library", lambda name, install: None)
    monkeypatch.setattr("importlib.metadata.version", lambda name: ray)
    assert TRANSPORTS["nixl"].missing() == missing


def test_machines_are_counted_that_fetch_from_another() -> None:
    config = GRPOConfig.from_dict(APART)
    far = [choose_transport(config, nodes).far_machines for nodes in ("aa", "aab", "abcb")]
    assert far == [0, 1, 2]


def test_auto_does_without_memory_files_where_the_system_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    choice = choose_transport(GRPOConfig.from_dict(APART), ["a"])
    assert (choice.key, choice.why) == (
        "object_store",
        "this system has no memfd_create; it needs Linux",
    )


def test_actors_that_ray_gave_several_gpus_cannot_share_the_memory_of_one() -> None:
    first, second = (Preflight(gpus=(gpu,), seconds=0.1) for gpu in ("0", "1"))
    check_together(TRANSPORTS["cuda_ipc"], [first, first])
    check_together(TRANSPORTS["nccl"], [first, second])
    with pytest.raises(TransportError, match=r"must share one GPU, but Ray gave them GPUs 0, 1"):
        check_together(TRANSPORTS["cuda_ipc"], [first, second])


def test_shared_memory_between_machines_is_refused_and_never_replaced() -> None:
    with pytest.raises(TransportError, match=r"shm: .*2 machines.*use transport=object_store"):
        choose_transport(GRPOConfig.from_dict(APART | {"transport": "shm"}), ["a", "b"])


# ---- A user's transport ----------------------------------------------------------------------

MINE = """
from grpo_trainable.config.transport_catalog import Transport

class Sender:
    def publish(self, weights, frozen=()):
        return weights.version

def receiver(deadline_s, device):
    return Sender()

MINE = Transport(name="mine", sender=Sender, receiver=receiver, cost="slow")
NEEDS = Transport(name="needs", sender=Sender, receiver=receiver, missing_library=lambda: "no luck")
ONE_GPU = Transport(name="one_gpu", sender=Sender, receiver=receiver, gpus="shared")
HERE = Transport(name="here", sender=Sender, receiver=receiver, one_machine=True)
PAIR = Transport(name="pair", sender=Sender, receiver=receiver, sidedness="two_sided")
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def chosen(reference: str, nodes: list[str]) -> Choice:
    return choose_transport(GRPOConfig.from_dict(APART | {"transport": reference}), nodes)


def test_a_users_record_is_chosen_by_name_and_tells_its_cost(mine: Path) -> None:
    choice = chosen(f"{mine}:MINE", ["a", "b"])
    assert (choice.key, choice.transport.name) == (f"{mine}:MINE", "mine")
    assert choice.why == "as configured; slow"


def test_the_ends_of_a_users_transport_are_made_by_its_record(mine: Path) -> None:
    made = pickle.loads(pickle.dumps(MadeInActor(make_sender, f"{mine}:MINE")))
    handle = made.publish(weights({}, round_=2))
    assert handle.trained == 20
    assert make_receiver(f"{mine}:MINE", 60.0).name == "mine"


@pytest.mark.parametrize(
    ("name", "nodes", "error", "message"),
    [
        ("NOTHING", ["a"], PluginError, "cannot be imported: AttributeError: .*NOTHING"),
        (
            "Sender",
            ["a"],
            PluginError,
            "must be a grpo_trainable.config.transport_catalog.Transport, got a type",
        ),
        (
            "PAIR",
            ["a"],
            PluginError,
            "sidedness=two_sided is only for built-in transports; use pull",
        ),
        ("ONE_GPU", ["a"], TransportError, "needs resources.generator_gpus > 0 and"),
        ("HERE", ["a", "b"], TransportError, "on 2 machines, which do not share memory"),
    ],
)
def test_a_users_record_that_does_not_suit_is_one_line(
    mine: Path, name: str, nodes: list[str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=rf"^transport={mine}:{name}: .*{message}"):
        chosen(f"{mine}:{name}", nodes)


def test_a_users_transport_on_one_gpu_is_refused_with_several_learners(mine: Path) -> None:
    key, resources = f"{mine}:ONE_GPU", {"num_learners": 2}
    config = GRPOConfig.from_dict(APART | {"transport": key, "resources": resources})
    line = rf"^transport={mine}:ONE_GPU: works with only one learner, got resources.num_learners=2"
    with pytest.raises(TransportError, match=line):
        choose_transport(config, ["a", "a"])
    with pytest.raises(UsageError, match=line):
        check_transport(config)


def test_a_record_with_an_unknown_rule_is_refused() -> None:
    with pytest.raises(ValueError, match="transport mine: gpus=two: must be one of any, none, sh"):
        Transport(name="mine", sender="m:S", receiver="m:R", gpus="two")  # type: ignore[arg-type]


def test_what_a_users_transport_lacks_is_told_by_each_actor(mine: Path) -> None:
    with pytest.raises(TransportError, match=rf"^transport={mine}:NEEDS: no luck$"):
        check_here(f"{mine}:NEEDS")


@pytest.mark.parametrize("transport", TRANSPORTS.values(), ids=TRANSPORTS)
def test_every_record_names_ends_that_exist(transport: Transport) -> None:
    assert TRANSPORTS[transport.name] is transport
    for reference in (transport.sender, transport.receiver, transport.start):
        assert reference is None or callable(load("transport", str(reference)))


@pytest.mark.parametrize("transport", TRANSPORTS.values(), ids=TRANSPORTS)
def test_the_config_and_the_records_agree_on_gpus(transport: Transport) -> None:
    if transport.sidedness == "in_process":
        return
    for gpus in ((0, 0), (0.5, 0.5), (1, 1), (1, 0)):
        resources = dict(zip(("generator_gpus", "learner_gpus"), gpus, strict=True))
        data = APART | {"transport": transport.name, "resources": resources}
        refused = transport.refuses_actors(**resources, num_generators=1, num_learners=1)
        if refused is None:
            GRPOConfig.from_dict(data)
        else:
            with pytest.raises(ConfigError, match=re.escape(refused)):
                GRPOConfig.from_dict(data)
