"""A full disk at the end of a trial: the command reports what is lost, and a resume recovers it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from commands import SMALL, environment_with, trial_directories, tune, tune_command
from conftest import checkpoints, rows, wait_for

from grpo_trainable.storage.checkpointing import checkpoint_round

NAME = "full"

# In every process of the command, this code shortens the pauses between the attempts to save the
# last policy.
IMPATIENT = """
import sys, time

plain = time.sleep


def sleep(seconds):
    caller = sys._getframe(1).f_code.co_name
    plain(min(seconds, 0.1) if caller == "save_persistently" else seconds)


time.sleep = sleep
"""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a small disk, and return its path."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(tmp_path)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def test_the_command_ends_with_status_1_and_its_resume_saves_the_policy(
    disk: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    argv = ["--space", "async_vs_sync", "--name", NAME, "--set", "arm=colocated_k1", *SMALL]
    argv += ["--iterations", "5", "--set", "checkpoint.every=2", "--max-failures", "0"]
    process = subprocess.Popen(
        tune_command(*argv, storage=disk),
        stdout=subprocess.PIPE,
        text=True,
        cwd=disk,
        env=environment_with(IMPATIENT, tmp_path_factory.mktemp("site")),
    )
    (trial,) = wait_for(lambda: trial_directories(disk / NAME), 120)
    wait_for(lambda: any((trial / "checkpoint_000000").glob("manifest.json")), 120)
    filler = disk / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(1 << 16)):
            pass
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 1, out
    (failed,) = [line for line in out.splitlines() if line.startswith("failed: ")]
    assert "colocated_k1/0: the last policy, of round 5, was not saved (No space left on" in failed
    assert "continue with: " in out
    assert 5 not in map(checkpoint_round, whole(trial))

    filler.unlink()
    done = tune("--resume", "--name", NAME, storage=disk)
    assert done.returncode == 0, done.stderr
    assert checkpoint_round(checkpoints(trial)[-1]) == 5
    assert [row["training_iteration"] for row in rows(trial)] == [1, 2, 3, 4, 5]


def whole(trial: Path) -> list[Path]:
    return [path for path in checkpoints(trial) if (path / "manifest.json").exists()]
