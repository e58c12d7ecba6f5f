"""Where a trial's checkpoints lie in Tune's storage path, and which of them are kept."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pyarrow.fs import FileSelector, FileSystem, LocalFileSystem
from ray import tune

from grpo_trainable.storage.checkpointing import (
    ASIDE,
    CHECKPOINT,
    CheckpointError,
    DamagedCheckpoint,
    ForeignCheckpoint,
    UnreadableCheckpoint,
    numbered_checkpoints,
    remove_older,
    unverified_round,
)
from grpo_trainable.storage.object_store import AnyPath, StoredPath, reason
from grpo_trainable.storage.ray_private import EXPR_RESULT_FILE, TRAINING_ITERATION, StorageContext

TUNES_OWN = re.compile(r"(params|error)\.")  # what Tune itself writes of a trial's config and end

# How many shared checkpoints outlive `checkpoint.keep`: under synchronous PBT a clone may start
# from its donor's checkpoint of one perturbation until the donor has been through the next.
SHARED_ROUNDS = 2
LAST_ROWS_BYTES = 1 << 18  # of a `result.json`: some rows of 10 KB


class TrialStorage:
    """The checkpoints of one trial."""

    def __init__(self, context: StorageContext | None, keep: int | None) -> None:
        """`context`: Tune's; None outside of Tune. `keep`: how many of the newest; None: all."""
        self._context = context
        self._keep = keep
        self.shared_rounds: list[int] = []  # another trial may start from their checkpoints
        self._verified: dict[str, int] = {}  # rounds of checkpoints that were found whole, by name

    @property
    def _directory(self) -> AnyPath | None:
        """The trial's directory in the storage path; None outside of Tune."""
        context = self._context
        return (
            None if context is None else path_on(context.storage_filesystem, context.trial_fs_path)
        )

    @contextlib.contextmanager
    def saving(self) -> Iterator[str]:
        """Surrounds Tune's save; gives the directory that the checkpoint is first written to.

        An OSError passes through, after the part of the checkpoint that was copied is removed.
        """
        context = self._context
        assert context is not None
        # Tune's own temporary directory would stay when the process is killed.
        directory = Path(context.trial_working_directory) / "saving"
        shutil.rmtree(directory, ignore_errors=True)
        # Tune counts on from the last checkpoint that it registered. One that it did not register,
        # because it was killed or the copy failed, must not be overwritten: it may be the only
        # whole one.
        context.current_checkpoint_index = before = newest_index(context)
        try:
            yield str(directory)
        except OSError:
            # A partial copy would take the space that is missing. A store that has just failed is
            # not asked once more: what it has of this one goes with the older ones.
            local = isinstance(context.storage_filesystem, LocalFileSystem)
            if context.current_checkpoint_index > before and local:
                with contextlib.suppress(OSError):
                    context.storage_filesystem.delete_dir(context.checkpoint_fs_path)
            raise
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def share(self, round_: int) -> None:
        """Notes that another trial may start from this trial's checkpoint of `round_`."""
        rounds = [*(other for other in self.shared_rounds if other != round_), round_]
        self.shared_rounds = rounds[-SHARED_ROUNDS:]

    def remove_older(self, *, rows_follow: bool) -> list[str]:
        """Remove what need not be kept; return why, where that cannot be done.

        `rows_follow`: callbacks bring the rows to an object store, after the checkpoints. A
        checkpoint that is newer than the rows is of no use after a kill, so it does not count.
        """
        directory = self._directory
        if self._keep is None or directory is None:
            return []
        try:
            confirmed = self._last_round(rows_follow)
            remove_older(directory, self._keep, self.shared_rounds, confirmed, self._verified)
        except (CheckpointError, OSError) as error:
            return [f"older checkpoints stay: {error}"]
        return []

    def go_on(
        self, noted: Any, restore: Callable[[Any], int], *, rows_follow: bool = False
    ) -> list[str]:
        """Restore the newest whole checkpoint, and say where it is not the one that was noted.

        A torn copy, or a checkpoint that `checkpoint.keep` removed after Tune's last snapshot of
        the experiment, gives way to the next one. Where none is left, the trial starts from round
        0, and all that it had written is set aside.

        Args:
            noted: The checkpoint that Tune or a user names; None where Tune has noted none.
            restore: Verify and restore a checkpoint, and return its round. Must change nothing
                before it raises `CheckpointError`.
            rows_follow: As for `remove_older`.

        Returns:
            A line that says what was chosen and why, if it was not the noted one, or that a trial
            which had trained begins again.

        Raises:
            CheckpointError: A checkpoint cannot be read, or is of another format. No file has
                changed: the same command can be given again.
        """
        try:
            return self._go_on(noted, restore, rows_follow)
        except (UnreadableCheckpoint, OSError) as error:
            text = reason(error) if isinstance(error, OSError) else str(error)
            raise UnreadableCheckpoint(
                f"{text}; nothing is lost: try again with --resume"
            ) from error

    def _go_on(self, noted: Any, restore: Callable[[Any], int], rows_follow: bool) -> list[str]:
        named, own = _path_of(noted), self._own_checkpoints()
        if named is None and not own:
            return self._repeated_rounds()
        # One that is not here is gone, or of another trial: PBT means to go on from that.
        elsewhere = [] if named is None or named in own else [named]
        last = self._last_round(rows_follow)
        problems, foreign = [], False
        for path in [*elsewhere, *own]:
            if path in own and _is_ahead(path, last):
                problems.append(f"{path.name} is newer than the trial's rows, of round {last:g}")
                continue
            try:
                if not path.exists():
                    raise DamagedCheckpoint(f"{path}: is gone")
                round_ = restore(noted if path == named else checkpoint_at(path))
            except DamagedCheckpoint as error:
                if self._directory is None:
                    raise
                said = str(error)
                problems.append(said[max(0, said.find(path.name)) :])
                foreign |= isinstance(error, ForeignCheckpoint)
            else:
                if path == named and not problems:
                    return []
                # Tune notes checkpoints in snapshots, which a kill may leave behind.
                problems = problems or [f"Tune had noted {named.name if named else 'none'}"]
                return [f"{'; '.join(problems)}; going on from {path.name} (round {round_})"]
        if foreign:
            raise CheckpointError(f"{'; '.join(problems)}; no other one can be used")
        assert self._directory is not None
        problems.append(f"what the trial had is in {set_aside(self._directory).name}")
        return [f"{'; '.join(problems)}; starting from round 0"]

    def _repeated_rounds(self) -> list[str]:
        """Return a line that says what a trial without a checkpoint trains again, if anything."""
        context = self._context
        if context is None:
            return []
        directory = StoredPath(context.storage_filesystem, context.trial_fs_path)
        trained = round_of_last_row(directory / EXPR_RESULT_FILE)
        if not trained:
            return []  # it starts for the first time
        return [
            f"it stopped after round {trained}, and no checkpoint was saved; starting from round 0"
        ]

    def _own_checkpoints(self) -> list[AnyPath]:
        """The trial's checkpoints, newest first."""
        directory = self._directory
        return [] if directory is None else list(reversed(numbered_checkpoints(directory)))

    def _last_round(self, rows_follow: bool) -> float:
        """Return the last round whose row is certain to stay: in a store, the last that is there.

        A kill may leave a checkpoint in a store without the rows up to its round.
        """
        directory = self._directory
        if rows_follow and isinstance(directory, StoredPath):
            return round_of_last_row(directory / EXPR_RESULT_FILE)
        return math.inf


def _is_ahead(path: AnyPath, last: float) -> bool:
    """Return True if a checkpoint is of a round after `last`."""
    round_ = None if last == math.inf else unverified_round(path)
    return round_ is not None and round_ > last


def _path_of(noted: Any) -> AnyPath | None:
    """Return the directory of what `Trainable.restore` takes."""
    checkpoint = getattr(noted, "checkpoint", noted)
    if checkpoint is None or isinstance(checkpoint, str):
        return None if checkpoint is None else Path(checkpoint)
    return path_on(checkpoint.filesystem, checkpoint.path)


def set_aside(directory: AnyPath) -> AnyPath:
    """Move all that a trial has written into a new directory within its own, and return that.

    Raises:
        OSError: Something cannot be moved. Nothing is lost: the checkpoints go last, so the next
            try finds the trial as this one did.
    """
    names = directory.names() if isinstance(directory, StoredPath) else os.listdir(directory)
    taken = [int(match[1]) for match in map(ASIDE.fullmatch, names) if match]
    aside = directory / f"set-aside-{max(taken, default=0) + 1}"
    moved = [name for name in names if not TUNES_OWN.match(name) and not ASIDE.fullmatch(name)]
    if isinstance(aside, Path):
        aside.mkdir()
    for name in sorted(moved, key=lambda name: (bool(CHECKPOINT.fullmatch(name)), name)):
        _move(directory / name, aside / name)
    return aside


def _move(source: AnyPath, target: AnyPath) -> None:
    if isinstance(source, StoredPath):
        assert isinstance(target, StoredPath)
        source.move(target)
    else:
        assert isinstance(target, Path)
        source.rename(target)


def round_of_last_row(rows: StoredPath) -> int:
    """Return the round of the last row of a `result.json` in a store; 0 where there is none.

    Raises:
        OSError: the store cannot be read.
    """
    try:
        lines = rows.read_end(LAST_ROWS_BYTES).split(b"\n")
    except FileNotFoundError:
        return 0
    for line in reversed(lines):
        with contextlib.suppress(ValueError, LookupError, TypeError):  # a line that was cut short
            return int(json.loads(line)[TRAINING_ITERATION])
    return 0


def path_on(filesystem: FileSystem, path: str) -> AnyPath:
    """A path of a file system of Tune's: on this machine, or in a store."""
    local = isinstance(filesystem, LocalFileSystem)
    return Path(path) if local else StoredPath(filesystem, path)


def checkpoint_at(path: AnyPath) -> tune.Checkpoint:
    """A checkpoint as Tune knows it."""
    if isinstance(path, Path):
        return tune.Checkpoint(str(path), LocalFileSystem())
    return tune.Checkpoint(path.path, path.filesystem)


def newest_index(context: StorageContext) -> int:
    """The index of the newest checkpoint of a trial, registered or not; -1 when there is none."""
    entries = context.storage_filesystem.get_file_info(
        FileSelector(context.trial_fs_path, allow_not_found=True)
    )
    matches = [CHECKPOINT.fullmatch(entry.base_name) for entry in entries]
    return max((int(match[1]) for match in matches if match), default=-1)
