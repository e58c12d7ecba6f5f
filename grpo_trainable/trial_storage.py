"""Where a trial's checkpoints lie in Tune's storage path, and which of them are kept."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyarrow.fs import FileSelector, FileSystem, LocalFileSystem
from ray import tune
from ray.air.constants import EXPR_RESULT_FILE, TRAINING_ITERATION
from ray.train._internal.session import _TrainingResult
from ray.train._internal.storage import StorageContext

from grpo_trainable.checkpointing import CHECKPOINT, CheckpointError, newest_whole, remove_older
from grpo_trainable.storage import Place, StoredPath

logger = logging.getLogger(__name__)

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
    def _directory(self) -> Place | None:
        """The trial's directory in the storage path; None outside of Tune."""
        context = self._context
        return None if context is None else place(context.storage_filesystem, context.trial_fs_path)

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
        confirmed = math.inf
        try:
            if rows_follow and isinstance(directory, StoredPath):
                confirmed = round_of_last_row(directory / EXPR_RESULT_FILE)
            remove_older(directory, self._keep, self.shared_rounds, confirmed, self._verified)
        except (CheckpointError, OSError) as error:
            return [f"older checkpoints stay: {error}"]
        return []

    def instead_of_removed(self, noted: Any) -> Any:
        """The checkpoint that Tune noted, or the newest whole one where that one is gone.

        `checkpoint.keep` may have removed it after Tune's last snapshot of the experiment.
        """
        checkpoint, directory = getattr(noted, "checkpoint", None), self._directory
        if checkpoint is None or directory is None:
            return noted
        if place(checkpoint.filesystem, checkpoint.path).exists():
            return noted
        whole = newest_whole(directory)
        if whole is None:
            return noted
        path, round_ = whole
        logger.warning("%s is gone; going on from %s", checkpoint.path, path)
        return _TrainingResult(
            checkpoint=checkpoint_at(path),
            metrics={**noted.metrics, TRAINING_ITERATION: round_},
        )


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


def place(filesystem: FileSystem, path: str) -> Place:
    """A path of a file system of Tune's: on this machine, or in a store."""
    local = isinstance(filesystem, LocalFileSystem)
    return Path(path) if local else StoredPath(filesystem, path)


def checkpoint_at(path: Place) -> tune.Checkpoint:
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
