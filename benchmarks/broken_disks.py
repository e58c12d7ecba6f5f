"""Checkpoints that are torn, damaged or not written at all."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from survival import CHECKPOINT_EVERY, ROUNDS, Experiment, Fault, Lost, Outcome, interrupt, judge
from write_points import killed_at

from grpo_trainable.checkpointing import (
    MANIFEST,
    checkpoint_round,
    newest_whole,
    read_checkpoint,
    write_checkpoint,
)

ARM = "sync"
STOPPED_AFTER = 9  # rounds: there are checkpoints of rounds 4, 8 and this one


@cache
def interrupted() -> Path:
    """The storage of an experiment that was interrupted; nothing in it changes."""
    storage = Path(tempfile.mkdtemp(prefix="grpo-faults-"))
    experiment = Experiment(storage, ARM, **{"checkpoint.keep": "null"})
    with experiment.start() as running:
        running.wait_for_rounds(STOPPED_AFTER)
        interrupt(running)
    shutil.copytree(experiment.directory, storage / "kept")
    return storage


def damage(how: Callable[[Path, random.Random], str], rng: random.Random) -> Outcome:
    """Damages the newest checkpoint of an interrupted experiment, and resumes it."""
    storage = interrupted()
    experiment = Experiment(storage, ARM)
    shutil.rmtree(experiment.directory)
    shutil.copytree(storage / "kept", experiment.directory)
    checkpoints = sorted(experiment.trial.glob("checkpoint_*"))
    previous = checkpoint_round(checkpoints[-2])
    done = how(checkpoints[-1], rng)
    before, struck = len(experiment.rows()), time.time()
    printed = experiment.resume()
    line = f"going on from {checkpoints[-2].name} (round {previous})"
    if line not in printed:
        raise Lost(f"{done}; {line!r} was not printed")
    if experiment.rows()[previous]["iterations_since_restore"] != 1:
        raise Lost(f"{done}; it did not go on after round {previous}")
    return judge(experiment, done, before, struck)


def truncated(checkpoint: Path, rng: random.Random) -> str:
    path = rng.choice(sorted(checkpoint.iterdir()))
    size = rng.randrange(path.stat().st_size - 1)
    os.truncate(path, size)
    return f"{path.name} cut to {size} bytes"


def flipped(checkpoint: Path, rng: random.Random) -> str:
    path = rng.choice(sorted(path for path in checkpoint.iterdir() if path.name != MANIFEST))
    content = bytearray(path.read_bytes())
    place, bit = rng.randrange(len(content)), rng.randrange(8)
    content[place] ^= 1 << bit
    path.write_bytes(content)
    return f"bit {bit} of byte {place} of {path.name} flipped"


def without_manifest(checkpoint: Path, rng: random.Random) -> str:
    (checkpoint / MANIFEST).unlink()
    return "no manifest"


def without_anything(checkpoint: Path, rng: random.Random) -> str:
    shutil.rmtree(checkpoint)
    return "no directory"


def every_write_point(rng: random.Random, repeat: int) -> Outcome:
    """SIGKILL at every file operation of writing a checkpoint: afterwards the one before is the
    newest whole one, or the new one is whole."""
    previous, trial = (
        read_checkpoint(path) for path in sorted(interrupted().glob("kept/*/checkpoint_*"))[-2:]
    )
    with tempfile.TemporaryDirectory() as directory:
        first, second = (Path(directory) / f"checkpoint_{i:06d}" for i in range(2))
        write_checkpoint(first, previous)
        names, points = [], 0
        while killed_at(points + 1, lambda: write_checkpoint(second, trial), second):
            points += 1
            path, _ = newest_whole(Path(directory)) or (None, 0)
            names.append(path and path.name)
            read_checkpoint(path or first)
            shutil.rmtree(second, ignore_errors=True)
    survived = names == [first.name] * (points - 1) + [second.name]
    return Outcome(
        survived=survived,
        happened=f"{points} points; the one before was the newest whole one {points - 1} times, "
        "at the last the new one" if survived else f"whole were {names}",
    )  # fmt: skip


@contextmanager
def small_disk(megabytes: int) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", directory]
        done = subprocess.run(mount, capture_output=True, text=True)
        if done.returncode != 0:
            raise Lost(f"could not be tried: {done.stderr.strip()}")
        try:
            yield Path(directory)
        finally:
            subprocess.run(["umount", directory], check=True)


def fill(disk: Path) -> Path:
    """Leaves no space on a disk; the file that takes it."""
    filler = disk / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(1 << 16)):
            pass
    return filler


def full_disk(rng: random.Random, repeat: int) -> Outcome:
    """The disk is full while a checkpoint is due, and has space again for the last one."""
    with small_disk(40) as storage:
        experiment = Experiment(storage, ARM)
        with experiment.start() as running:
            running.wait_for_rounds(rng.randint(CHECKPOINT_EVERY + 1, 2 * CHECKPOINT_EVERY - 1))
            before, filler = len(experiment.rows()), fill(storage)
            running.wait_for(lambda: "could not be written" in running.printed())
            filler.unlink()
            text = running.ends_well()
        whole = [checkpoint_round(p) for p in sorted(experiment.trial.glob("checkpoint_*"))]
        last = experiment.rows()[-1]
        rounds = [row["training_iteration"] for row in experiment.rows()]
        survived = (
            rounds == list(range(1, ROUNDS + 1))
            and last["count/checkpoint_failures"] > 0
            and whole[-1] == ROUNDS
            and "could not be written (No space left on device)" in text
        )
        return Outcome(
            survived=survived,
            happened=f"full after round {before}: {last['count/checkpoint_failures']:.0f} "
            f"checkpoints not written, rows {rounds[0]}-{rounds[-1]}, whole in the end: {whole}",
        )


def full_to_the_end(rng: random.Random, repeat: int) -> Outcome:
    """The disk is full when the last checkpoint is due, and has space again for a resume."""
    with small_disk(40) as storage:
        experiment = Experiment(storage, ARM)
        with experiment.start() as running:
            running.wait_for_rounds(rng.randint(ROUNDS - CHECKPOINT_EVERY + 1, ROUNDS - 1))
            before, filler = len(experiment.rows()), fill(storage)
            text = running.output()
            if running.process.returncode != 1 or f"of round {ROUNDS}, is not saved" not in text:
                raise Lost(f"status {running.process.returncode}: {text[-300:]}")
        filler.unlink()
        struck = time.time()
        experiment.resume()
        return judge(experiment, f"full after round {before} and to the end", before, struck)


FAULTS = (
    Fault(name="SIGKILL at every write point", repeats=3, strike=every_write_point),
    Fault(
        name="newest checkpoint truncated", repeats=5, strike=lambda rng, _: damage(truncated, rng)
    ),
    Fault(
        name="newest checkpoint, flipped bit", repeats=5, strike=lambda rng, _: damage(flipped, rng)
    ),
    Fault(
        name="newest checkpoint, no manifest",
        repeats=2,
        strike=lambda rng, _: damage(without_manifest, rng),
    ),
    Fault(
        name="newest checkpoint gone",
        repeats=2,
        strike=lambda rng, _: damage(without_anything, rng),
    ),
    Fault(name="ENOSPC while checkpointing", repeats=5, strike=full_disk),
    Fault(name="ENOSPC to the end, then --resume", repeats=3, strike=full_to_the_end),
)
