"""Copies what the callbacks write to the object store that an experiment is kept in.

A store cannot append to a file, may be slow and may fail. So the files of a trial are written to a
directory of this machine as ever, and a thread brings what has changed to the store, a pass a
second. It never makes Tune wait: what a store does not take now is brought with a later pass.

`result.json` comes last in a pass, as it was when the pass began: the store then has whatever the
other callbacks wrote in each round that it has a row of. So a trial that goes on elsewhere, from
a checkpoint whose round has a row, finds all of its files.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ray.air.constants import EXPR_RESULT_FILE

from grpo_trainable.storage import StoredPath, reason

logger = logging.getLogger(__name__)

PASS_S = 1.0  # pause between two passes
IDLE_S = 8.0  # the most, where nothing has changed for a while
LAST_S = 60.0  # time limit for what is left at the end of the experiment

State = tuple[int, int]  # when a file was last written, and its bytes


class Mirror:
    """Keeps the directory of a trial in a store as `local` is, in a thread of its own."""

    def __init__(self, local: Path, stored: StoredPath) -> None:
        self.local = local
        self._stored = stored
        self._brought: dict[str, State] = {}  # what the store has, by relative path
        self._gone: deque[str] = deque()  # files to remove from the store
        self._failing = False
        self._lock = threading.Lock()  # held by who does a pass
        self._end = threading.Event()
        # A store that is silent must not keep the program from ending.
        self._thread = threading.Thread(target=self._run, name=f"mirror {local.name}", daemon=True)
        self._thread.start()

    def remove(self, names: Iterable[str]) -> None:
        """Has files removed from the store, given by their paths from the trial's directory."""
        self._gone.extend(names)

    def close(self, last_s: float = LAST_S) -> int:
        """Brings what is left, and tries again for so long. Returns the number of files that the
        store did not take."""
        self._end.set()
        until = time.monotonic() + last_s
        while left := self._left():
            if time.monotonic() >= until:
                break
            if self._lock.acquire(timeout=max(0.0, until - time.monotonic())):
                try:
                    self._try_pass()
                finally:
                    self._lock.release()
            if self._left():
                time.sleep(min(PASS_S, max(0.0, until - time.monotonic())))
        return len(left)

    def _run(self) -> None:
        wait_s = PASS_S
        while not self._end.wait(wait_s):
            wait_s = PASS_S if self._left() else min(2 * wait_s, IDLE_S)
            with self._lock:
                self._try_pass()

    def _try_pass(self) -> None:
        try:
            self.bring()
        except OSError as error:
            if not self._failing:
                logger.error(
                    "%s does not take the files of a trial (%s); they wait in %s",
                    *(self._stored, reason(error), self.local),
                )
            self._failing = True
        else:
            if self._failing:
                logger.error("%s takes files again", self._stored)
            self._failing = False

    def bring(self) -> None:
        """One pass: brings every file that has changed since it was brought.

        Raises:
            OSError: the store did not take one; those before it are there.
        """
        rows = self.local / EXPR_RESULT_FILE
        state, content = _state(rows), _content(rows)
        while self._gone:
            if not (self.local / self._gone[0]).exists():
                self._remove(self._gone[0])
            self._gone.popleft()
        for name, changed in self._changed().items():
            if name != EXPR_RESULT_FILE:
                self._bring(name, changed, _content(self.local / name))
        if self._brought.get(EXPR_RESULT_FILE) != state:
            self._bring(EXPR_RESULT_FILE, state, content)

    def _bring(self, name: str, state: State | None, content: bytes | None) -> None:
        if state is not None and content is not None:  # None: it was removed meanwhile
            (self._stored / name).write_bytes(content)
            self._brought[name] = state

    def _remove(self, name: str) -> None:
        self._brought.pop(name, None)
        if (self._stored / name).exists():
            (self._stored / name).unlink()

    def _left(self) -> list[str]:
        return [*self._changed(), *self._gone]

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
