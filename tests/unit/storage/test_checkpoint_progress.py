"""A learner that reads or writes a checkpoint is distinguished from one that hangs.

A learner that cannot see the checkpoint directory sends the content of its files to
the trial's process, which writes them. In these tests, the clock moves only while the disk works.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from policies import write_quick_policy
from rank_threads import a_round, config_with

from grpo_trainable.learner.learner import Learner
from grpo_trainable.pipeline.learner_group import LearnerGroup
from grpo_trainable.protocol.calls import ActorLost
from grpo_trainable.protocol.messages import LearnerState
from grpo_trainable.storage import checkpointing, tensor_files
from grpo_trainable.storage.checkpointing import (
    CheckpointError,
    begun,
    finish_checkpoint,
    part_file,
    read_checkpoint,
    verified_digests,
)

DEADLINE_S = 8.0
PIECE_BYTES = 4096  # the disk moves one piece per second


class SlowDisk:
    """A disk that moves `PIECE_BYTES` a second. `move` returns when its bytes have been moved."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._credit = 0.0  # bytes that may still move; negative while a thread waits

    def move(self, count: int) -> None:
        with self._changed:
            self._credit -= count
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._credit >= 0)

    def work(self, seconds: float, is_done: Callable[[], bool]) -> None:
        """Let time pass until a thread waits for the disk again or the work is done."""
        with self._changed:
            self._credit += seconds * PIECE_BYTES
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._credit < 0 or is_done())

    def notify(self) -> None:
        with self._changed:
            self._changed.notify_all()


@dataclass(eq=False)
class ThreadCall:
    actor: ThreadActor
    stage: str
    values: list[Any] = field(default_factory=list)  # holds the answer once there is one


class ThreadActor:
    """An actor that answers `progress` at once and runs any other call in a thread."""

    def __init__(self, name: str, role: Any, disk: SlowDisk) -> None:
        self.name = name
        self.role = role
        self.methods: list[str] = []
        self._disk = disk

    def submit(self, stage: str, method: str, *args: Any) -> ThreadCall:
        call = ThreadCall(self, stage)
        if method == "progress":
            call.values.append(self.role.progress())
            return call
        self.methods.append(method)

        def work() -> None:
            call.values.append(getattr(self.role, method)(*args))
            self._disk.notify()

        threading.Thread(target=work, daemon=True).start()
        return call

    def kill(self) -> None:
        raise AssertionError("nobody is killed")


class DiskRuntime:
    """A runtime that waits for `ThreadCall`s while the disk works."""

    def __init__(self, disk: SlowDisk) -> None:
        self._disk = disk
        self._now_s = 0.0

    def now(self) -> float:
        return self._now_s

    def wait(self, calls: Sequence[ThreadCall], timeout_s: float) -> list[ThreadCall]:
        if not any(call.values for call in calls):
            self._now_s += timeout_s
            self._disk.work(timeout_s, lambda: any(call.values for call in calls))
        return [call for call in calls if call.values]

    def share(self, value: Any) -> Any:
        return value

    def result(self, call: ThreadCall) -> Any:
        return call.values[0]


class SlowFile:
    """A file on the slow disk."""

    def __init__(self, file: Any, disk: SlowDisk) -> None:
        self._file, self._disk = file, disk

    def write(self, content: Any) -> None:
        self._disk.move(len(content))
        self._file.write(content)

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto(buffer)
        self._disk.move(count)
        return count


@pytest.fixture(scope="module")
def policy_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_quick_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def trained(policy_path: str) -> Learner:
    learner = Learner(config_with(policy_path), None)
    learner.update([a_round(0)])
    return learner


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SlowDisk:
    """Return a slow disk for everything that a checkpoint writes and reads."""
    monkeypatch.setattr(tensor_files, "PIECE_BYTES", PIECE_BYTES)
    disk = SlowDisk()
    for name in ("replacing", "_reading"):
        monkeypatch.setattr(checkpointing, name, slow(getattr(checkpointing, name), disk))
    return disk


def slow(opened: Callable[..., Any], disk: SlowDisk) -> Callable[..., Any]:
    @contextmanager
    def on_the_disk(*args: Any, **kwargs: Any) -> Iterator[SlowFile]:
        with opened(*args, **kwargs) as file:
            # Work of the trial's own process is not timed.
            main = threading.current_thread() is threading.main_thread()
            yield file if main else SlowFile(file, disk)

    return on_the_disk


def group_of(role: Any, disk: SlowDisk) -> tuple[LearnerGroup, DiskRuntime, ThreadActor]:
    runtime, actor = DiskRuntime(disk), ThreadActor("learner", role, disk)
    return LearnerGroup([actor], runtime, DEADLINE_S), runtime, actor


def write(group: LearnerGroup, directory: Path, *, seen: bool = True) -> None:
    with begun(directory) as proof:
        (files,) = group.write(str(directory), proof if seen else "elsewhere")
    state = {"learner": files.counters, "pipeline": {"learner_round": 1}}
    finish_checkpoint(directory, [files], state, [])


def same(learner: Learner, state: LearnerState) -> bool:
    own = learner.state()
    return own.counters == state.counters and all(
        ours.keys() == theirs.keys() and all(ours[n].equal(theirs[n]) for n in ours)
        for ours, theirs in ((own.policy, state.policy), (own.optimizer, state.optimizer))
    )


def seconds_of(directory: Path) -> float:
    """Return the seconds that the disk takes for the learner's files."""
    files = (directory / part_file(part) for part in ("policy", "optimizer"))
    return sum(file.stat().st_size for file in files) / PIECE_BYTES


def test_a_learner_with_a_slow_disk_is_not_given_up(trained, disk, policy_path, tmp_path):
    group, runtime, _ = group_of(trained, disk)
    write(group, tmp_path)
    assert runtime.now() >= seconds_of(tmp_path) > 5 * DEADLINE_S

    fresh = Learner(config_with(policy_path), None)
    group, runtime, actor = group_of(fresh, disk)
    counters = read_checkpoint(tmp_path).state["learner"]
    group.read_state(tmp_path, verified_digests(tmp_path), counters)
    assert runtime.now() >= seconds_of(tmp_path)
    assert actor.methods == ["read_state"]
    assert same(fresh, trained.state())


def test_a_learner_whose_disk_stands_still_is_lost(trained, disk, monkeypatch, tmp_path):
    done = threading.Event()
    monkeypatch.setattr(disk, "work", lambda seconds, is_done: None)
    monkeypatch.setattr(disk, "move", lambda count: done.wait())
    group, runtime, _ = group_of(trained, disk)
    with pytest.raises(ActorLost, match=r"no answer .* from learner \(checkpoint\)"):
        write(group, tmp_path)
    assert runtime.now() < 2 * DEADLINE_S
    done.set()


@pytest.mark.slow
def test_a_learner_elsewhere_sends_its_files_in_messages(trained, disk, monkeypatch, tmp_path):
    most = 4 * PIECE_BYTES
    monkeypatch.setattr(checkpointing, "MESSAGE_BYTES", most)
    group, _, actor = group_of(trained, disk)
    write(group, tmp_path / "here")
    assert actor.methods == ["write"]

    actor.methods.clear()
    write(group, tmp_path / "elsewhere", seen=False)

    assert actor.methods[0] == "write"
    assert set(actor.methods[1:]) == {"next_message"}
    assert len(actor.methods) > seconds_of(tmp_path / "here") * PIECE_BYTES / (2 * most)
    for file in (tmp_path / "here").iterdir():
        assert (tmp_path / "elsewhere" / file.name).read_bytes() == file.read_bytes()


def test_a_message_is_no_larger_than_said(trained, monkeypatch):
    monkeypatch.setattr(tensor_files, "PIECE_BYTES", PIECE_BYTES)
    monkeypatch.setattr(checkpointing, "MESSAGE_BYTES", 4 * PIECE_BYTES)
    trained.write("nowhere", "elsewhere")
    sizes = [len(content) for _, content in iter(trained.next_message, None)]
    assert max(sizes) < 5 * PIECE_BYTES
    assert len(sizes) > 5


class Elsewhere(Learner):
    """A learner that does not see the checkpoints of the trial."""

    def read_state(self, directory: str, *args: Any) -> bool:
        return super().read_state(directory + "-elsewhere", *args)


def test_a_learner_elsewhere_is_sent_the_state(trained, disk, policy_path, tmp_path):
    write(group_of(trained, disk)[0], tmp_path)
    fresh = Elsewhere(config_with(policy_path), None)
    group, _, actor = group_of(fresh, disk)
    counters = read_checkpoint(tmp_path).state["learner"]
    group.read_state(tmp_path, verified_digests(tmp_path), counters)
    assert actor.methods == ["read_state", "load_state"]
    assert same(fresh, trained.state())


def test_files_that_change_after_they_were_verified_are_refused(
    trained, disk, policy_path, tmp_path
):
    write(group_of(trained, disk)[0], tmp_path)
    digests = verified_digests(tmp_path)
    file = tmp_path / part_file("optimizer")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)

    fresh = Learner(config_with(policy_path), None)
    before = fresh.state()
    with pytest.raises(CheckpointError, match=r"optimizer\S*: damaged"):
        group_of(fresh, disk)[0].read_state(tmp_path, digests, {})
    assert same(fresh, before)
