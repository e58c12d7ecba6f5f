"""Keeps a mirror of each trial's files where the experiment is in an object store."""

from __future__ import annotations

import time
from typing import Any

from callbacks.fail_safe import FailSafeCallback
from callbacks.interruption import requested
from callbacks.mirror import LAST_S, Mirror
from callbacks.trial_files import (
    label,
    restored_iteration,
    trial_directory,
    trial_place,
)
from grpo_trainable.storage import StoredPath
from grpo_trainable.wording import plural

INTERRUPTED_S = 4.0  # time limit after Ctrl-C, when the command is about to be ended
# Training waits for a store that lacks an older row. A row that is written while a pass is under
# way comes with the next pass, so this is half of the 10 s that are promised.
MOST_BEHIND_S = 5.0
TELL_S = 10.0  # the shortest lag that the user is told of
LOOK_S = 0.2  # how often a wait looks for Ctrl-C


class MirrorCallback(FailSafeCallback):
    """Brings the files of each trial to the object store. It comes after the callbacks that write
    them.

    Training waits for the store while it answers and lacks rows of more than `MOST_BEHIND_S`. A
    store that fails or is silent holds nobody up: files wait on this machine, and the trial's
    process removes no checkpoint that it could go on from.
    """

    def __init__(self) -> None:
        self._mirrors: dict[str, Mirror] = {}  # one mirror a trial id

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mirrors": {}}  # threads belong to this process

    def on_trial_start(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        place = trial_place(trial)
        if not isinstance(place, StoredPath):
            return
        if trial.trial_id not in self._mirrors:
            self._mirrors[trial.trial_id] = Mirror(trial_directory(trial), place)
        self._mirrors[trial.trial_id].restored = restored_iteration(trial)

    def on_trial_result(
        self, iteration: int, trials: list, trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        mirror = self._mirrors.get(trial.trial_id)
        if mirror is None:
            return
        mirror.row_written()
        most_s = MOST_BEHIND_S
        if mirror.restored is not None:
            mirror.cut(mirror.restored)
            mirror.restored = None
            # The store may have rows of rounds that are done again. They must be gone before the
            # trial writes a checkpoint, which they would seem to belong to.
            most_s = 0.0
        while mirror.behind_s > most_s and mirror.answers and not requested.is_set():
            mirror.wait_for_pass(LOOK_S)
            tell(trial, mirror)
        tell(trial, mirror)

    def on_experiment_end(self, trials: list, **info: Any) -> None:
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
