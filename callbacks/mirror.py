"""Copy the files that callbacks have written on this machine to the experiment's object store.

A store cannot append to a file, may be slow, and may fail. So the callbacks first write the files
of a trial to a directory on this machine. A thread copies changed files to the store, in one pass
per second. Training waits if the store answers but has fallen behind. If the store rejects a file,
a later pass copies the file.

A pass copies `result.json` last, in the state that the file had when the pass began. So for every
round that has a row in the store, the store also has all other files of that round. Suppose that
the round of a checkpoint has a row in the store. Then a trial that continues from this checkpoint
on another machine finds the files of all rounds up to the checkpoint. A trial removes a checkpoint
only when enough newer checkpoints belong to rounds that have a row in the store
(`TrialStorage.remove_older`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from callbacks.round_writer import RoundWriter
from callbacks.save_on_interrupt import requested
from callbacks.trial_files import label, parts_after, read_rows, trial_directory, trial_path
from grpo_trainable.storage.object_store import StoredPath, reason
from grpo_trainable.storage.ray_private import EXPR_RESULT_FILE
from grpo_trainable.storage.trial_storage import round_of_last_row
from grpo_trainable.text import plural

logger = logging.getLogger(__name__)

PASS_S = 1.0  # pause between two passes
IDLE_S = 8.0  # longest pause between two passes, while no file changes
LAST_S = 60.0  # time limit for copying the remaining files at the end of the experiment
SILENT_S = 15.0  # a store that accepts no file for this long during a pass counts as silent
AT_ONCE = 8  # files copied in parallel

# Training waits if a row that was written longer ago than this has not reached the store. A row
# that is written during a pass is copied in the next pass, so this limit is half of the 10 s that
# the docs promise.
MOST_BEHIND_S = 5.0
TELL_S = 10.0  # shortest delay of the store that is reported to the user
LOOK_S = 0.2  # interval at which a wait checks for Ctrl-C

State = tuple[int, int]  # time of a file's last change, and its size in bytes


class Mirror:
    """Copy of a trial's directory in a store, kept up to date by a separate thread."""

    def __init__(
        self, local: Path, stored: StoredPath, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start the thread.

        Args:
            local: The trial's directory on this machine.
            stored: The trial's directory in the store.
            clock: Returns the time in seconds.
        """
        self.local = local
        self.told_s = 0.0  # last reported delay; 0 once the store has caught up
        self._stored = stored
        self._clock = clock
        self._brought: dict[str, State] = {}  # relative path -> state of the file in the store
        # Last round whose Parquet files the store keeps. None: the store keeps all of them.
        self._cut_after: int | None = None
        # For each row that the store lacks, the time at which the row was written.
        self._rows: deque[float] = deque()
        self._failing = False
        self._answered_at = clock()  # last time that a pass began or the store accepted a file
        self._lock = threading.Lock()  # held during a pass
        self._passes = 0
        self._news = False  # set when a row is written, to end an idle pause
        self._hurry = False  # set when a caller requests a pass, to end any pause
        self._end = False
        self._changes = threading.Condition()  # guards `_passes`, `_news`, `_hurry` and `_end`
        # A daemon, because the program must be able to end while the store is silent.
        self._thread = threading.Thread(target=self._run, name=f"mirror {local.name}", daemon=True)
        self._thread.start()

    def cut(self, last: int) -> None:
        """In the next pass, remove Parquet files of rounds after `last` if only the store has them.

        Args:
            last: Last round whose Parquet files are all kept.
        """
        self._cut_after = last

    def row_written(self) -> None:
        """Record that the callbacks have written one more round."""
        self._rows.append(self._clock())
        with self._changes:
            self._news = True
            self._changes.notify_all()

    @property
    def rows_behind(self) -> int:
        """Number of rows that the store lacks."""
        return len(self._rows)

    @property
    def files_behind(self) -> int:
        """Number of files that the store lacks, or has in an older state."""
        return len(self._changed())

    @property
    def behind_s(self) -> float:
        """Age in seconds of the oldest row that the store lacks. 0 if it lacks none."""
        with suppress(IndexError):  # a pass in another thread may empty `_rows`
            return self._clock() - self._rows[0]
        return 0.0

    @property
    def answers(self) -> bool:
        """Return False while the store fails or is silent."""
        return not self._failing and self._clock() - self._answered_at < SILENT_S

    def wait_for_pass(self, at_most_s: float) -> None:
        """Make the next pass begin now, and wait up to `at_most_s` seconds until it has ended."""
        with self._changes:
            passes, self._hurry = self._passes, True
            self._changes.notify_all()
            self._changes.wait_for(lambda: self._passes > passes, at_most_s)

    def close(self, last_s: float = LAST_S) -> int:
        """End the thread when there is nothing left to copy, or after `last_s` seconds.

        Returns:
            Number of files that were not copied.
        """
        until = time.monotonic() + last_s
        while self.has_work and (rest_s := until - time.monotonic()) > 0:
            self.wait_for_pass(min(PASS_S, rest_s))
        with self._changes:
            self._end = True
            self._changes.notify_all()
        return self.files_behind

    def _run(self) -> None:
        idle_s = 0.0
        while not self._end:
            self._pause(idle_s)
            idle_s = 0.0 if self.has_work else min(2 * idle_s + PASS_S, IDLE_S - PASS_S)
            self._try_pass()
            with self._changes:
                self._passes += 1
                self._changes.notify_all()

    def _pause(self, idle_s: float) -> None:
        def asked() -> bool:
            return self._end or (self._hurry and not self._failing)

        with self._changes:
            if not self._changes.wait_for(asked, PASS_S) and not self._failing:
                self._changes.wait_for(lambda: asked() or self._news, idle_s)
            self._hurry = self._news = False

    def _try_pass(self) -> None:
        try:
            self.bring()
        except Exception as error:  # a store's library may raise errors other than OSError
            if not self._failing:
                said = reason(error) if isinstance(error, OSError) else repr(error)
                logger.error(
                    "%s does not accept the files of a trial (%s); they remain in %s for now",
                    *(self._stored, said, self.local),
                )
            self._failing = True
        else:
            if self._failing:
                logger.error("%s accepts files again", self._stored)
            self._failing = False

    def bring(self) -> None:
        """Make one pass: copy every file that has changed since it was last copied.

        Raises:
            OSError: The store did not accept a file. The store may have accepted other files.
        """
        with self._lock:
            self._answered_at = self._clock()
            rows, path = len(self._rows), self.local / EXPR_RESULT_FILE
            state, content = _state(path), _content(path)
            changed = self._changed()
            changed.pop(EXPR_RESULT_FILE, None)
            self._bring_all(changed)
            if self._brought.get(EXPR_RESULT_FILE) != state:
                self._bring(EXPR_RESULT_FILE, state, content)
            for _ in range(rows):
                self._rows.popleft()
            # Remove Parquet files only after copying `result.json`, because every round that has a
            # row in the store must also have its Parquet files there.
            if (after := self._cut_after) is not None:
                self._remove_after(after)
                if self._cut_after == after:  # `cut` may have been called again during the pass
                    self._cut_after = None

    def _bring_all(self, changed: Mapping[str, State]) -> None:
        """Copy files, `AT_ONCE` at a time.

        Raises:
            OSError: The store did not accept a file. Copies that had begun are finished first.
        """
        left, errors = iter(list(changed.items())), deque[Exception]()

        def run() -> None:
            for name, state in left:  # the threads share the iterator, so each file is copied once
                if errors:
                    return
                try:
                    self._bring(name, state, _content(self.local / name))
                except Exception as error:  # raised below, in the thread of the pass
                    errors.append(error)

        # No thread pool: its threads would keep the program from ending while the store is silent.
        count = min(AT_ONCE, len(changed))
        threads = [threading.Thread(target=run, daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def _bring(self, name: str, state: State | None, content: bytes | None) -> None:
        if state is not None and content is not None:  # None: the file was removed
            (self._stored / name).write_bytes(content)
            self._brought[name] = state
            self._answered_at = self._clock()

    def _remove_after(self, last: int) -> None:
        for name in parts_after(self._stored, last):
            if not (self.local / name).exists():
                (self._stored / name).unlink()
                self._brought.pop(name, None)

    @property
    def has_work(self) -> bool:
        """Return True while there is something to copy to the store or to remove from it."""
        return self._cut_after is not None or self.files_behind > 0

    def _changed(self) -> dict[str, State]:
        """Return the files that differ from the store's copies and are not being written."""
        found = {}
        for path in sorted(self.local.rglob("*")):
            name, state = path.relative_to(self.local).as_posix(), _state(path)
            being_written = path.name.startswith(".")
            if state is not None and not being_written and self._brought.get(name) != state:
                found[name] = state
        return found


def _state(path: Path) -> State | None:
    """Return the state of a file, or None if there is no file."""
    with suppress(FileNotFoundError):
        status = path.stat()
        return (status.st_mtime_ns, status.st_size) if path.is_file() else None
    return None


def _content(path: Path) -> bytes | None:
    """Return the content of a file, or None if there is no file."""
    with suppress(FileNotFoundError):
        return path.read_bytes()
    return None


# ---- Hooks of Tune -------------------------------------------------------------------------------


class MirrorCallback(RoundWriter):
    """Copies the files of each trial to the object store.

    This callback comes after the callbacks that write the files. Training waits while the store
    answers but a row that was written more than `MOST_BEHIND_S` seconds ago has not arrived there.
    A store that fails or is silent does not delay training: files remain on this machine, and the
    trial's process keeps every checkpoint that the trial could continue from.
    """

    def __init__(self) -> None:
        super().__init__()
        self._mirrors: dict[str, Mirror] = {}  # trial id -> its mirror

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_mirrors": {}}  # threads cannot be pickled

    def on_trial_start(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        """Start a trial's mirror. Wait until the store has all local files or stops answering."""
        super().on_trial_start(iteration=iteration, trials=trials, trial=trial, **info)
        place = trial_path(trial)
        if not isinstance(place, StoredPath):
            return
        if trial.trial_id not in self._mirrors:
            try:
                put_older_aside(trial_directory(trial), place)
            except OSError as error:
                # It is unknown whether the store has rows that are later than the local ones. The
                # trial must also read the rows in the store, so it fails if the store still does
                # not answer. If the store answers again by then, `cut` starts the mirror.
                said = f"the rows in {place} cannot be read ({reason(error)})"
                print(f"{label(trial)}: {said}", flush=True)
                return
            self._start(trial)
        # The trial continues only from a checkpoint whose rows are in the store.
        self._wait(trial, lambda mirror: mirror.has_work)

    def _start(self, trial: Any) -> None:
        place = trial_path(trial)
        assert isinstance(place, StoredPath)
        self._mirrors[trial.trial_id] = Mirror(trial_directory(trial), place)

    def content(self, result: dict[str, Any]) -> Any:
        """Return a placeholder: the other callbacks write the files."""
        return True

    def cut(self, trial: Any, last: int) -> None:
        """Wait until the store has no rows and no Parquet files of rounds that will be repeated.

        Otherwise these rows and files would seem to belong to the next checkpoint.
        """
        if isinstance(trial_path(trial), StoredPath) and trial.trial_id not in self._mirrors:
            self._start_late(trial, last)
        if (mirror := self._mirrors.get(trial.trial_id)) is not None:
            mirror.cut(last)
            self._wait(trial, lambda mirror: mirror.has_work)

    def _start_late(self, trial: Any, last: int) -> None:
        """Start the mirror of a trial that continues from round `last`.

        The rows in the store could not be read when the trial started. So the local files might
        lack rows that another machine has written. Such files must not replace the store's files.
        """
        local = trial_directory(trial)
        rounds = {row["training_iteration"] for row in read_rows(local / EXPR_RESULT_FILE)}
        if last == 0 or last in rounds:
            self._start(trial)
        else:
            print(
                f"{label(trial)}: the files in {local} lack round {last}, so none is copied to "
                f"{trial_path(trial)}",
                flush=True,
            )

    def write(self, trial: Any, iteration: int, content: Any) -> None:
        """Wait while the store is too far behind. The mirror's thread copies the files."""
        if (mirror := self._mirrors.get(trial.trial_id)) is not None:
            mirror.row_written()
            self._wait(trial, lambda mirror: mirror.behind_s > MOST_BEHIND_S)

    def _wait(self, trial: Any, unfinished: Callable[[Mirror], bool]) -> None:
        mirror = self._mirrors[trial.trial_id]
        while unfinished(mirror) and mirror.answers and not requested.is_set():
            mirror.wait_for_pass(LOOK_S)
            tell(trial, mirror)
        tell(trial, mirror)

    def on_experiment_end(self, trials: list, **info: Any) -> None:
        """End all mirrors, and print how many files of each trial could not be copied."""
        super().on_experiment_end(trials=trials, **info)
        until = time.monotonic() + LAST_S
        for mirror in self._mirrors.values():
            mirror.close(max(0.0, until - time.monotonic()))
        for line in self.not_copied(trials):
            print(line, flush=True)
        self._mirrors.clear()

    def not_copied(self, trials: Iterable[Any]) -> list[str]:
        """Return a line for each trial with files that its store lacks."""
        return [
            f"{label(trial)}: {trial_path(trial)} lacks {plural(count, 'file')} of the trial; see "
            f"{mirror.local}"
            for trial in trials
            if (mirror := self._mirrors.get(trial.trial_id)) is not None
            and (count := mirror.files_behind)
        ]


def put_older_aside(local: Path, stored: StoredPath) -> None:
    """Put local files aside if the store has later rows.

    Later rows mean that the trial has continued on another machine since the files were written.

    Raises:
        OSError: The rows in the store cannot be read. No file was moved.
    """
    rows = read_rows(local / EXPR_RESULT_FILE)
    last = max((row["training_iteration"] for row in rows), default=0)
    if any(local.iterdir()) and round_of_last_row(stored / EXPR_RESULT_FILE) > last:
        aside = local.with_name(f"{local.name}-until-round-{last}-{time.time_ns()}")
        local.rename(aside)
        local.mkdir()
        told = f"{stored} has later rows than this machine, whose files are now in {aside}"
        print(told, flush=True)


def tell(trial: Any, mirror: Mirror) -> None:
    """Print the store's delay if it has become much longer, or print that it is over.

    A delay is first printed when it reaches `TELL_S`, and again each time it has doubled.
    """
    behind_s, rows = mirror.behind_s, mirror.rows_behind
    if behind_s >= max(TELL_S, 2 * mirror.told_s):
        mirror.told_s = behind_s
        what = (
            "training waits for it" if mirror.answers else f"files remain in {mirror.local} for now"
        )
        lag = f"is {behind_s:.0f} s ({plural(rows, 'round')}) behind"
        print(f"{label(trial)}: {trial_path(trial)} {lag}; {what}", flush=True)
    elif mirror.told_s and behind_s <= MOST_BEHIND_S:
        mirror.told_s = 0.0
        print(f"{label(trial)}: {trial_path(trial)} has caught up", flush=True)
