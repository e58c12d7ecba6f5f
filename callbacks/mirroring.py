"""Keeps a mirror of each trial's files where the experiment is in an object store."""

from __future__ import annotations

import time
from typing import Any

from callbacks.interruption import requested
from callbacks.mirror import LAST_S, Mirror
from callbacks.round_writer import RoundWriter
from callbacks.trial_files import (
    label,
    parts_after,
    trial_directory,
    trial_place,
)
from grpo_trainable.storage import StoredPath

INTERRUPTED_S = 4.0  # time limit after Ctrl-C, when the command is about to be ended


class MirrorCallback(RoundWriter):
    """Brings the files of each trial to the object store. It comes before the callbacks that write
    them, and says at the end which the store did not take."""

    def __init__(self) -> None:
        super().__init__()
        self._mirrors: dict[str, Mirror] = {}  # one mirror a trial id

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_mirrors": {}}  # threads belong to this process

    def on_trial_start(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        super().on_trial_start(iteration=iteration, trials=trials, trial=trial, **info)
        place = trial_place(trial)
        if isinstance(place, StoredPath) and trial.trial_id not in self._mirrors:
            self._mirrors[trial.trial_id] = Mirror(trial_directory(trial), place)

    def content(self, result: dict[str, Any]) -> Any:
        return True

    def cut(self, trial: Any, last: int) -> None:
        if (mirror := self._mirrors.get(trial.trial_id)) is not None:
            mirror.remove(parts_after(trial, last))

    def write(self, trial: Any, iteration: int, content: Any) -> None:
        """Nothing: the thread of the mirror brings what the other callbacks write."""

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
