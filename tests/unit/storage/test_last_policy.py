"""After a trial's last round, the policy is saved, with further attempts if the disk fails."""

from __future__ import annotations

import errno

import pytest

from grpo_trainable.storage.last_policy import PAUSES_S, save_persistently


class Disk:
    """A disk without space for the first `full` attempts."""

    def __init__(self, full: int) -> None:
        self.full, self.attempts = full, 0
        self.pauses: list[float] = []

    def save(self) -> str:
        self.attempts += 1
        if self.attempts <= self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return "saved"


def test_a_save_is_tried_again_after_longer_and_longer_pauses() -> None:
    disk = Disk(full=2)
    assert save_persistently(disk.save, [1.0, 2.0, 4.0], disk.pauses.append) == "saved"
    assert (disk.attempts, disk.pauses) == (3, [1.0, 2.0])


def test_the_error_of_the_last_attempt_is_raised() -> None:
    disk = Disk(full=99)
    with pytest.raises(OSError, match="No space left"):
        save_persistently(disk.save, sleep=disk.pauses.append)
    assert (disk.attempts, disk.pauses) == (len(PAUSES_S) + 1, list(PAUSES_S))
    assert disk.pauses == sorted(disk.pauses)


def test_another_error_is_not_tried_again() -> None:
    disk = Disk(full=0)

    def save() -> None:
        disk.save()
        raise ValueError("the policy has no such part")

    with pytest.raises(ValueError, match="no such part"):
        save_persistently(save, [1.0], disk.pauses.append)
    assert (disk.attempts, disk.pauses) == (1, [])
