"""Copies what the callbacks write to the object store that an experiment is kept in.

A store cannot append to a file, may be slow and may fail. So the files of a trial are written to a
directory of this machine as ever, and a thread brings what has changed to the store, a pass a
second. Training waits for a store that answers and is behind; what a store does not take is brought
with a later pass.

`result.json` comes last in a pass, as it was when the pass began: the store then has whatever the
other callbacks wrote in each round that it has a row of. So a trial that goes on elsewhere, from
a checkpoint whose round has a row, finds all of its files; and a trial removes no checkpoint before
enough newer ones have a row there (`TrialStorage.remove_older`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
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
IDLE_S = 8.0  # the most, where nothing has changed for a while
LAST_S = 60.0  # time limit for what is left at the end of the experiment
SILENT_S = 15.0  # without having taken a file: the store does not answer
AT_ONCE = 8  # files

INTERRUPTED_S = 4.0  # time limit after Ctrl-C, when the command is about to be ended
# Training waits for a store that lacks an older row. A row that is written while a pass is under
# way comes with the next pass, so this is half of the 10 s that are promised.
MOST_BEHIND_S = 5.0
TELL_S = 10.0  # the shortest lag that the user is told of
LOOK_S = 0.2  # how often a wait looks for Ctrl-C

State = tuple[int, int]  # when a file was last written, and its bytes


class Mirror:
    """Keeps the directory of a trial in a store as `local` is, in a thread of its own."""

    def __init__(
        self, local: Path, stored: StoredPath, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.local = local
        self.told_s = 0.0  # the longest lag that the user has been told of
        self.told = False  # the user believes that the store is behind
        self._stored = stored
        self._clock = clock
        self._brought: dict[str, State] = {}  # what the store has, by relative path
        self._cut_after: int | None = None  # the store may have parts of later rounds: remove them
        self._rows: deque[float] = deque()  # when each row was written that the store lacks
        self._failing = False
        self._answered_at = clock()  # the last time that the store took a file
        self._lock = threading.Lock()  # held during a pass
        self._passes = 0
        self._news = False  # a row was written: ends an idle pause
        self._hurry = False  # somebody waits for a pass: ends any pause
        self._end = False
        self._changes = threading.Condition()  # of the four above
        # A store that is silent must not keep the program from ending.
        self._thread = threading.Thread(target=self._run, name=f"mirror {local.name}", daemon=True)
        self._thread.start()

    def cut(self, last: int) -> None:
        """Have the store lose the parts of rounds after `last`, but for those that are here."""
        self._cut_after = last

    def row_written(self) -> None:
        """Note that the callbacks have written down one more round."""
        self._rows.append(self._clock())
        with self._changes:
            self._news = True
            self._changes.notify_all()

    @property
    def rows_behind(self) -> int:
        """The number of rows that the store lacks."""
        return len(self._rows)

    @property
    def behind_s(self) -> float:
        """Seconds since the oldest row was written that the store lacks; 0 if it has all."""
        with suppress(IndexError):  # the pass that brings it may end just now
            return self._clock() - self._rows[0]
        return 0.0

    @property
    def answers(self) -> bool:
        """False while the store fails or is silent."""
        return not self._failing and self._clock() - self._answered_at < SILENT_S

    def wait_for_pass(self, at_most_s: float) -> None:
        """Begin a pass without a pause, and wait until one has ended."""
        with self._changes:
            passes, self._hurry = self._passes, True
            self._changes.notify_all()
            self._changes.wait_for(lambda: self._passes > passes, at_most_s)

    def close(self, last_s: float = LAST_S) -> int:
        """End the mirror when nothing is left to bring, or after `last_s`.

        Returns:
            The number of files that the store did not take.
        """
        until = time.monotonic() + last_s
        while self.has_work and (rest_s := until - time.monotonic()) > 0:
            self.wait_for_pass(min(PASS_S, rest_s))
        with self._changes:
            self._end = True
            self._changes.notify_all()
        return len(self._changed())

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
        except Exception as error:  # libraries of stores have errors of their own
            if not self._failing:
                said = reason(error) if isinstance(error, OSError) else repr(error)
                logger.error(
                    "%s does not take the files of a trial (%s); they wait in %s",
                    *(self._stored, said, self.local),
                )
            self._failing = True
        else:
            if self._failing:
                logger.error("%s takes files again", self._stored)
            self._failing = False

    def bring(self) -> None:
        """Bring every file that has changed since it was brought: one pass.

        Raises:
            OSError: the store did not take a file; others may be there.
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
            # After the rows: a row in the store always has its files.
            if (after := self._cut_after) is not None:
                self._remove_after(after)
                if self._cut_after == after:  # it may have been cut again meanwhile
                    self._cut_after = None

    def _bring_all(self, changed: Mapping[str, State]) -> None:
        """Bring files, `AT_ONCE` at a time.

        Raises:
            OSError: the store did not take one; what was under way has ended.
        """
        left, errors = iter(list(changed.items())), deque[Exception]()

        def run() -> None:
            for name, state in left:  # the threads share the iterator: each file is brought once
                if errors:
                    return
                try:
                    self._bring(name, state, _content(self.local / name))
                except Exception as error:  # raised below, in the thread of the pass
                    errors.append(error)

        # Not a pool: its threads would keep the program from ending while the store is silent.
        count = min(AT_ONCE, len(changed))
        threads = [threading.Thread(target=run, daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def _bring(self, name: str, state: State | None, content: bytes | None) -> None:
        if state is not None and content is not None:  # None: it was removed meanwhile
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
        """Return True while the store lacks something that is here."""
        return self._cut_after is not None or bool(self._changed())

    def _changed(self) -> dict[str, State]:
        """Files that are not in the store as they are here, but for those being written."""
        found = {}
        for path in sorted(self.local.rglob("*")):
            name, state = path.relative_to(self.local).as_posix(), _state(path)
            being_written = path.name.startswith(".")
            if state is not None and not being_written and self._brought.get(name) != state:
                found[name] = state
        return found


def _state(path: Path) -> State | None:
    """None where there is no file."""
    with suppress(FileNotFoundError):
        status = path.stat()
        return (status.st_mtime_ns, status.st_size) if path.is_file() else None
    return None


def _content(path: Path) -> bytes | None:
    """None where there is no file."""
    with suppress(FileNotFoundError):
        return path.read_bytes()
    return None


# ---- What Tune calls -----------------------------------------------------------------------------


class MirrorCallback(RoundWriter):
    """Brings the files of each trial to the object store. It comes after the callbacks that write
    them.

    Training waits for the store while it answers and lacks rows of more than `MOST_BEHIND_S`. A
    store that fails or is silent holds nobody up: files wait on this machine, and the trial's
    process removes no checkpoint that it could go on from.
    """

    def __init__(self) -> None:
        super().__init__()
        self._mirrors: dict[str, Mirror] = {}  # one mirror a trial id

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_mirrors": {}}  # threads belong to this process

    def on_trial_start(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        super().on_trial_start(iteration=iteration, trials=trials, trial=trial, **info)
        place = trial_path(trial)
        if isinstance(place, StoredPath):
            if trial.trial_id not in self._mirrors:
                put_older_aside(trial_directory(trial), place)
                self._mirrors[trial.trial_id] = Mirror(trial_directory(trial), place)
            # The trial goes on from a checkpoint whose rows the store has.
            self._wait(trial, lambda mirror: mirror.has_work)

    def content(self, result: dict[str, Any]) -> Any:
        return True

    def cut(self, trial: Any, last: int) -> None:
        """Wait until the store has no rows and parts of rounds that are done again.

        They would seem to belong to the next checkpoint.
        """
        if (mirror := self._mirrors.get(trial.trial_id)) is not None:
            mirror.cut(last)
            self._wait(trial, lambda mirror: mirror.has_work)

    def write(self, trial: Any, iteration: int, content: Any) -> None:
        """Wait for the store where it is too far behind: its thread brings the files."""
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
        super().on_experiment_end(trials=trials, **info)
        until = time.monotonic() + (INTERRUPTED_S if requested.is_set() else LAST_S)
        for trial in trials:
            mirror = self._mirrors.pop(trial.trial_id, None)
            left = 0 if mirror is None else mirror.close(max(0.0, until - time.monotonic()))
            if mirror is not None and left:
                print(
                    f"{label(trial)}: {trial_path(trial)} did not take {left} of its files; they "
                    f"are in {mirror.local}",
                    flush=True,
                )


def put_older_aside(local: Path, stored: StoredPath) -> None:
    """Put local files aside unless the store is known to have no later rows.

    Where it has, the trial has gone on from another machine since they were written.
    """
    rows = read_rows(local / EXPR_RESULT_FILE)
    last = max((row["training_iteration"] for row in rows), default=0)
    try:
        older = any(local.iterdir()) and round_of_last_row(stored / EXPR_RESULT_FILE) > last
    except OSError:
        older = True
    if older:
        aside = local.with_name(f"{local.name}-until-round-{last}-{time.time_ns()}")
        local.rename(aside)
        local.mkdir()
        print(f"{stored} has later rows; what this machine had is in {aside}", flush=True)


def tell(trial: Any, mirror: Mirror) -> None:
    """Print how far the store is behind, again when that has doubled, and once it has all rows."""
    behind_s, rows = mirror.behind_s, mirror.rows_behind
    if behind_s >= max(TELL_S, 2 * mirror.told_s):
        mirror.told, mirror.told_s = True, behind_s
        what = "training waits for it" if mirror.answers else f"files wait in {mirror.local}"
        lag = f"is {behind_s:.0f} s ({plural(rows, 'round')}) behind"
        print(f"{label(trial)}: {trial_path(trial)} {lag}; {what}", flush=True)
    elif mirror.told and behind_s <= MOST_BEHIND_S:
        mirror.told = False
        print(f"{label(trial)}: {trial_path(trial)} has caught up", flush=True)
