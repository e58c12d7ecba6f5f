"""Save, keep and restore a trial's checkpoints in Tune's storage path."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
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
    unverified_state,
)
from grpo_trainable.storage.object_store import AnyPath, StoredPath, reason
from grpo_trainable.storage.ray_private import EXPR_RESULT_FILE, TRAINING_ITERATION, StorageContext

TUNES_OWN = re.compile(r"(params|error)\.")  # files to which Tune writes a trial's config and error

# Number of shared checkpoints (those from which other trials may start) that are kept in addition
# to the newest `checkpoint.keep`. Under synchronous PBT, a clone may start from the checkpoint of
# its donor's last perturbation until the donor has passed the next perturbation. Each restore can
# let the donor pass one more perturbation: Tune's last snapshot may be older than the donor's
# newest checkpoint. 4 is enough for two restores before the clone starts.
SHARED_ROUNDS = 4
LAST_ROWS_BYTES = 1 << 18  # bytes to read at the end of a `result.json`; a row takes about 10 KB


class TrialStorage:
    """Checkpoints of one trial."""

    def __init__(
        self,
        context: StorageContext | None,
        keep: int | None,
        has_settings: Callable[[Mapping[str, Any]], bool] = lambda config: True,
    ) -> None:
        """Open the storage of a trial.

        Args:
            context: Tune's storage context, or None outside Tune.
            keep: Number of newest checkpoints to keep. None keeps all.
            has_settings: Returns True if a checkpoint's config has the trial's present settings.
        """
        self._context = context
        self._keep = keep
        self._has_settings = has_settings
        # Rounds of the checkpoints from which other trials may start.
        self.shared_rounds: list[int] = []
        # The checkpoint of another trial from which this trial has continued, such as
        # TRIAL/checkpoint_000003. None if this trial itself has trained from round 0.
        self.origin: str | None = None
        self._verified: dict[str, int] = {}  # name -> round of checkpoints that were found intact

    @property
    def _directory(self) -> AnyPath | None:
        """The trial's directory in the storage path, or None outside Tune."""
        context = self._context
        return (
            None if context is None else path_on(context.storage_filesystem, context.trial_fs_path)
        )

    @contextlib.contextmanager
    def saving(self) -> Iterator[str]:
        """Yield the directory that a checkpoint is first written to. The block runs Tune's save.

        After an OSError, the copied part of the checkpoint is removed, and the error is raised
        again. If that part is in an object store, it is removed later.

        Raises:
            OSError: The checkpoint was not written, or one of its files is missing from the object
                store.
        """
        context = self._context
        assert context is not None
        # Tune's own temporary directory would remain if the process were killed.
        directory = Path(context.trial_working_directory) / "saving"
        shutil.rmtree(directory, ignore_errors=True)
        # Tune numbers the next checkpoint after the last one that it registered. A checkpoint that
        # Tune did not register, because of a kill or a failed copy, must not be overwritten: it may
        # be the only intact one.
        context.current_checkpoint_index = before = newest_index(context)
        try:
            yield str(directory)
            verify_copy(directory, path_on(context.storage_filesystem, context.checkpoint_fs_path))
        except OSError:
            # A partial copy would take up disk space that is already short. An object store that
            # has just failed gets no further request: the partial copy in the store is removed
            # later, with older checkpoints.
            local = isinstance(context.storage_filesystem, LocalFileSystem)
            if context.current_checkpoint_index > before and local:
                with contextlib.suppress(OSError):
                    context.storage_filesystem.delete_dir(context.checkpoint_fs_path)
            raise
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def share(self, round_: int) -> None:
        """Record that another trial may start from this trial's checkpoint of `round_`."""
        rounds = [*(other for other in self.shared_rounds if other != round_), round_]
        self.shared_rounds = rounds[-SHARED_ROUNDS:]

    def follow(self, checkpoint: tune.Checkpoint) -> str | None:
        """Record that the trial has just been restored from a checkpoint.

        A checkpoint of another trial becomes the origin of this trial. A checkpoint that this trial
        wrote itself does not change the origin.

        Returns:
            The name of the other trial's directory. None: the checkpoint is this trial's own.
        """
        path = path_on(checkpoint.filesystem, checkpoint.path)
        if self._directory is None or self._directory == _parent(path):
            return None
        self.origin = _in_experiment(path)
        return _parent(path).name

    def remove_older(self, *, rows_follow: bool) -> list[str]:
        """Remove checkpoints that need not be kept.

        Args:
            rows_follow: True if callbacks copy the rows to an object store after the checkpoints
                have been copied. After a kill, a checkpoint that is newer than the last row in the
                store would be useless, so it does not count towards `checkpoint.keep`.

        Returns:
            A list with one line that gives the reason, if checkpoints could not be removed.
            Otherwise an empty list.
        """
        directory = self._directory
        if self._keep is None or directory is None:
            return []
        try:
            confirmed = self._last_round(rows_follow)
            remove_older(directory, self._keep, self.shared_rounds, confirmed, self._verified)
        except (CheckpointError, OSError) as error:
            return [f"older checkpoints were not removed: {error}"]
        return []

    def go_on(
        self, noted: Any, restore: Callable[[Any], int], *, rows_follow: bool = False
    ) -> list[str]:
        """Restore the newest intact checkpoint, and report it if it differs from `noted`.

        If a checkpoint is an incomplete copy, or was removed by `checkpoint.keep` after Tune's last
        snapshot of the experiment, the next older one is tried. If no checkpoint is left, the trial
        starts from round 0, and everything that it had written is set aside.

        `noted` may be the checkpoint of another trial, from which PBT wants this trial to continue.
        If this trial has already continued from `noted` with its present settings, and has saved a
        checkpoint since, then its own checkpoint is the newer one.

        PBT may have let the trial copy another trial after Tune's last snapshot. Tune then restores
        the trial with the settings that it had before the copy, so the trial continues from a
        checkpoint that it wrote before the copy, if there is one. The checkpoints since the copy
        are set aside.

        Args:
            noted: The checkpoint that Tune or a user names, or None if Tune has noted none.
            restore: Verifies and restores a checkpoint, and returns its round. If this function
                raises `CheckpointError`, it must have changed nothing.
            rows_follow: As for `remove_older`.

        Returns:
            A list with one line, which names the chosen checkpoint and any problems with newer
            checkpoints. The list is empty if `noted` was chosen without a problem, or if the trial
            starts for the first time.

        Raises:
            CheckpointError: A checkpoint cannot be read, or is of another format. No file has
                changed, so the same command can be repeated.
        """
        try:
            return self._go_on(noted, restore, rows_follow)
        except (UnreadableCheckpoint, OSError) as error:
            text = reason(error) if isinstance(error, OSError) else str(error)
            raise UnreadableCheckpoint(
                f"{text}; nothing is lost: try again with --resume"
            ) from error

    def _go_on(self, noted: Any, restore: Callable[[Any], int], rows_follow: bool) -> list[str]:
        noted = self._in_moved_experiment(noted)
        named, own = _path_of(noted), self._own_checkpoints()
        if named is None and not own:
            return self._repeated_rounds()
        last = before_copy = self._last_round(rows_follow)
        problems: list[str] = []
        forgotten: list[AnyPath] = []  # checkpoints that follow a copy that Tune does not know
        foreign = False
        for path in itertools.chain(self._candidates(named, own), forgotten):
            if path not in forgotten and self._follows_unknown_copy(path, named):
                forgotten.append(path)
                # If the copied trial was at an earlier round, its rows have replaced those of later
                # rounds.
                before_copy = min(last, self._last_row() or math.inf)
                continue
            limit = last if path in forgotten else before_copy
            if path in own and _is_ahead(path, limit):
                problems.append(f"{path.name} is newer than the trial's last row (round {limit:g})")
                continue
            try:
                if not path.exists():
                    raise DamagedCheckpoint(f"{path}: does not exist")
                round_ = restore(noted if path == named else checkpoint_at(path))
            except DamagedCheckpoint as error:
                if self._directory is None:
                    raise
                said = str(error)
                problems.append(said[max(0, said.find(path.name)) :])
                foreign |= isinstance(error, ForeignCheckpoint)
            else:
                copies = self._set_other_copies_aside(path, own)
                if path == named and not problems and not copies:
                    return []
                if path in forgotten:
                    problems.append(f"Tune does not know of the copy that {path.name} follows")
                # Without a problem in this list, the reason is that Tune has no record of this
                # checkpoint: Tune's last snapshot of the experiment is older, or the trial wrote
                # the checkpoint when the trial was interrupted.
                return [
                    "; ".join([*problems, f"continuing from {path.name} (round {round_})", *copies])
                ]
        if foreign:
            raise CheckpointError(f"{'; '.join(problems)}; no other checkpoint can be used")
        assert self._directory is not None
        problems.append(f"the trial's earlier files are in {set_aside(self._directory).name}")
        return [f"{'; '.join(problems)}; starting from round 0"]

    def _candidates(self, named: AnyPath | None, own: list[AnyPath]) -> list[AnyPath]:
        """Return the checkpoints from which the trial may continue, in order of preference.

        Args:
            named: The noted checkpoint. If `own` does not contain it, it has been removed or it
                belongs to another trial.
            own: The trial's checkpoints, newest first.
        """
        if named is None or named in own:
            return own
        since = [path for path in own if self._continues(path, named)]
        return [*since, named, *(path for path in own if path not in since)]

    def _in_moved_experiment(self, noted: Any) -> Any:
        """Return the noted checkpoint at its present place.

        If the experiment has been moved, Tune still names another trial's checkpoint by its path
        before the move.
        """
        named, directory = _path_of(noted), self._directory
        if named is None or directory is None:
            return noted
        with contextlib.suppress(OSError):  # the old path may be inaccessible
            if named.exists():
                return noted
        moved = _parent(directory) / _parent(named).name / named.name
        return checkpoint_at(moved) if moved.exists() else noted

    def _follows_unknown_copy(self, path: AnyPath, named: AnyPath | None) -> bool:
        """Return True if a checkpoint follows a copy (of another trial) that Tune does not know.

        Such a checkpoint is one of the trial's own and is newer than the noted checkpoint. Its
        origin differs from that of the noted checkpoint, and its settings differ from the trial's.
        """
        directory = self._directory
        if directory is None or _parent(path) != directory:
            return False
        noted = None
        if named is not None:
            if _parent(named) != directory or path.name <= named.name:
                return False
            noted = unverified_state(named)  # None if the noted checkpoint has been removed
        return self._follows_other_copy(path, noted)

    def _follows_other_copy(self, path: AnyPath, other: Mapping[str, Any] | None) -> bool:
        """Return True if a checkpoint differs from `other` in origin, and from the trial in config.

        Args:
            path: The checkpoint.
            other: The state of another checkpoint. None counts as a state without an origin.
        """
        state = unverified_state(path)
        return (
            state is not None
            and state.get("origin") != (other or {}).get("origin")
            and not self._has_settings(state.get("config", {}))
        )

    def _set_other_copies_aside(self, restored: AnyPath, own: list[AnyPath]) -> list[str]:
        """Set aside newer checkpoints that do not follow the same copy as the restored checkpoint.

        Otherwise they would count as the newest ones until the trial has saved again.

        Args:
            restored: The restored checkpoint.
            own: The trial's checkpoints, newest first.

        Returns:
            A list with one line about these checkpoints. The list is empty if there are none.
        """
        directory = self._directory
        if directory is None or restored not in own:
            return []
        state = unverified_state(restored)
        newer = [] if state is None else own[: own.index(restored)]
        copies = [path.name for path in newer if self._follows_other_copy(path, state)]
        if not copies:
            return []
        aside = set_aside(directory, copies)
        return [
            f"now in {aside.name}, because Tune does not know of the copy that they follow: "
            f"{', '.join(reversed(copies))}"
        ]

    def _continues(self, path: AnyPath, origin: AnyPath) -> bool:
        """Return True if a checkpoint continues from `origin` and has the trial's present settings.

        PBT may choose the same checkpoint twice. It then changes the settings again, so a
        checkpoint with the earlier settings does not count.
        """
        state = unverified_state(path)
        return (
            state is not None
            and state.get("origin") == _in_experiment(origin)
            and self._has_settings(state.get("config", {}))
        )

    def _repeated_rounds(self) -> list[str]:
        """Return a line about any rounds that the trial repeats for lack of a checkpoint."""
        trained = self._last_row()
        if not trained:
            return []  # the trial starts for the first time
        return [
            f"the trial stopped after round {trained}, and no checkpoint was saved; starting from "
            "round 0"
        ]

    def _last_row(self) -> int:
        """Return the round of the trial's last row in the storage path, or 0 if it has no row."""
        context = self._context
        if context is None:
            return 0
        directory = StoredPath(context.storage_filesystem, context.trial_fs_path)
        return round_of_last_row(directory / EXPR_RESULT_FILE)

    def _own_checkpoints(self) -> list[AnyPath]:
        """Return the trial's checkpoints, newest first."""
        directory = self._directory
        return [] if directory is None else list(reversed(numbered_checkpoints(directory)))

    def _last_round(self, rows_follow: bool) -> float:
        """Return the last round whose row would survive a kill.

        If the trial is stored in an object store, this is the round of the last row in the store.
        After a kill, the store may contain a checkpoint without the rows up to the checkpoint's
        round.
        """
        if rows_follow and isinstance(self._directory, StoredPath):
            return self._last_row()
        return math.inf


def verify_copy(directory: Path, copy: AnyPath) -> None:
    """Raise OSError if an object store lacks a file of a directory that was copied to it.

    If the store refuses a small file, pyarrow's `copy_files`, which Tune calls, raises no error.
    """
    if isinstance(copy, Path):
        return
    sizes = copy.files()
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        relative = path.relative_to(directory).as_posix()
        if sizes.get(relative) != path.stat().st_size:
            raise OSError(f"the store did not accept {copy.name}/{relative}")


def _is_ahead(path: AnyPath, last: float) -> bool:
    """Return True if a checkpoint is of a round after `last`."""
    round_ = None if last == math.inf else unverified_round(path)
    return round_ is not None and round_ > last


def _path_of(noted: Any) -> AnyPath | None:
    """Return the directory of a checkpoint, given in any form that `Trainable.restore` accepts."""
    checkpoint = getattr(noted, "checkpoint", noted)
    if checkpoint is None or isinstance(checkpoint, str):
        return None if checkpoint is None else Path(checkpoint)
    return path_on(checkpoint.filesystem, checkpoint.path)


def _parent(path: AnyPath) -> AnyPath:
    if isinstance(path, Path):
        return path.parent
    return StoredPath(path.filesystem, path.path.rpartition("/")[0], path.scheme)


def _in_experiment(path: AnyPath) -> str:
    """Return a checkpoint's path relative to its experiment, which may be moved as a whole."""
    return f"{_parent(path).name}/{path.name}"


def follows_known_copy(checkpoint: AnyPath, noted: AnyPath | None) -> bool:
    """Return True if a trial's checkpoint and the checkpoint `noted` have the same origin.

    Args:
        checkpoint: The checkpoint.
        noted: The newest checkpoint that Tune knows. If this checkpoint belongs to another trial,
            the trial has copied it.
    """
    origin = (unverified_state(checkpoint) or {}).get("origin")
    if noted is not None and _parent(noted) != _parent(checkpoint):
        return origin == _in_experiment(noted)
    known = None if noted is None else unverified_state(noted)
    return origin == (known or {}).get("origin")


def set_aside(directory: AnyPath, which: Collection[str] | None = None) -> AnyPath:
    """Move a trial's files and checkpoints into a new subdirectory, and return its path.

    Args:
        directory: The trial's directory.
        which: Names of the files and checkpoints to move. None moves everything.

    Raises:
        OSError: A file or directory cannot be moved. Nothing is lost: checkpoints are moved last,
            so the next attempt finds the same checkpoints.
    """
    names = directory.names() if isinstance(directory, StoredPath) else os.listdir(directory)
    taken = [int(match[1]) for match in map(ASIDE.fullmatch, names) if match]
    aside = directory / f"set-aside-{max(taken, default=0) + 1}"
    if which is None:
        which = [name for name in names if not TUNES_OWN.match(name) and not ASIDE.fullmatch(name)]
    if isinstance(aside, Path):
        aside.mkdir()
    for name in sorted(which, key=lambda name: (bool(CHECKPOINT.fullmatch(name)), name)):
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
    """Return the round of the last row of a `result.json`, or 0 if it has no row.

    Raises:
        OSError: The file cannot be read.
    """
    row = last_row(rows)
    return 0 if row is None else int(row[TRAINING_ITERATION])


def last_row(rows: StoredPath) -> dict[str, Any] | None:
    """Return the last row of a `result.json`, or None if it has no row.

    Raises:
        OSError: The file cannot be read.
    """
    try:
        lines = rows.read_end(LAST_ROWS_BYTES).split(b"\n")
    except FileNotFoundError:
        return None
    for line in reversed(lines):
        with contextlib.suppress(ValueError, LookupError, TypeError):  # the line was cut short
            row = json.loads(line)
            int(row[TRAINING_ITERATION])
            return row
    return None


def path_on(filesystem: FileSystem, path: str) -> AnyPath:
    """Return a path on one of Tune's file systems: on this machine, or in a store."""
    local = isinstance(filesystem, LocalFileSystem)
    return Path(path) if local else StoredPath(filesystem, path)


def checkpoint_at(path: AnyPath) -> tune.Checkpoint:
    """Return Tune's checkpoint object for a directory."""
    if isinstance(path, Path):
        return tune.Checkpoint(str(path), LocalFileSystem())
    return tune.Checkpoint(path.path, path.filesystem)


def newest_index(context: StorageContext) -> int:
    """Return the index of a trial's newest checkpoint, or -1 if the trial has no checkpoint.

    A checkpoint that Tune has not registered counts too.
    """
    entries = context.storage_filesystem.get_file_info(
        FileSelector(context.trial_fs_path, allow_not_found=True)
    )
    matches = [CHECKPOINT.fullmatch(entry.base_name) for entry in entries]
    return max((int(match[1]) for match in matches if match), default=-1)
