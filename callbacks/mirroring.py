"""Keeps a mirror of each trial's files where the experiment is in an object store."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from callbacks.interruption import requested
from callbacks.mirror import LAST_S, Mirror
from callbacks.round_writer import RoundWriter
from callbacks.trial_files import label, read_rows, trial_directory, trial_place
from grpo_trainable.storage.object_store import StoredPath
from grpo_trainable.storage.ray_private import EXPR_RESULT_FILE
from grpo_trainable.storage.trial_storage import round_of_last_row
from grpo_trainable.text import plural

INTERRUPTED_S = 4.0  # time limit after Ctrl-C, when the command is about to be ended
# Training waits for a store that lacks an older row. A row that is written while a pass is under
# way comes with the next pass, so this is half of the 10 s that are promised.
MOST_BEHIND_S = 5.0
TELL_S = 10.0  # the shortest lag that the user is told of
LOOK_S = 0.2  # how often a wait looks for Ctrl-C


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
        place = trial_place(trial)
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
                    f"{label(trial)}: {trial_place(trial)} did not take {left} of its files; they "
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
        print(f"{label(trial)}: {trial_place(trial)} {lag}; {what}", flush=True)
    elif mirror.told and behind_s <= MOST_BEHIND_S:
        mirror.told = False
        print(f"{label(trial)}: {trial_place(trial)} has caught up", flush=True)
