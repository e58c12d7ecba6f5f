"""Keeps a mirror of each trial's files where the experiment is in an object store."""

from __future__ import annotations

import time
from typing import Any

from callbacks.fail_safe import FailSafeCallback
from callbacks.interruption import requested
from callbacks.mirror import LAST_S, Mirror
from callbacks.trial_files import (
    label,
    parts_after,
    restored_iteration,
    trial_directory,
    trial_place,
)
from grpo_trainable.storage import StoredPath

INTERRUPTED_S = 4.0  # time limit after Ctrl-C, when the command is about to be ended


class MirrorCallback(FailSafeCallback):
    """Brings the files of each trial to the object store. It comes before the callbacks that write
    them, and says at the end which the store did not take."""

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
        self._mirrors[trial.trial_id].remove(parts_after(trial, restored_iteration(trial)))

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
