"""Base class of callbacks that write every round of a trial exactly once."""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

from callbacks.fail_safe import FailSafeCallback
from callbacks.trial_files import label
from grpo_trainable.protocol.round_records import details_of

logger = logging.getLogger(__name__)

MOST_WAITING = 256  # maximum number of rounds per trial that wait in memory


class RoundWriter(FailSafeCallback):
    """Writes the rounds of a trial in order, each exactly once.

    A trial that starts again repeats the rounds after its checkpoint. These rounds are cut from the
    files only when the first repeated round arrives, because its arrival proves that the checkpoint
    could be restored. A trial that fails to start leaves every file unchanged.

    A round that cannot be written waits in memory, and is written before the next round.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, deque[tuple[int, Any]]] = {}  # trial id -> (round, content)
        self._started: set[str] = set()  # ids of trials that have reported since they started
        self._uncut: set[str] = set()  # ids of started trials whose files have not been cut yet

    def __getstate__(self) -> dict[str, Any]:
        # Tune pickles callbacks with the experiment. After a resume, every unfinished trial starts
        # again, so this state would be out of date.
        return {**self.__dict__, "_waiting": {}, "_started": set(), "_uncut": set()}

    # ---- For subclasses ----------------------------------------------------------------------

    def content(self, result: dict[str, Any]) -> Any:
        """Return what to write of a row (by default its details), or None to write nothing."""
        return details_of(result)

    def cut(self, trial: Any, last: int) -> None:
        """Prepare the files of a trial for writing the rounds after `last`.

        If this method raises OSError, the caller may call it again.
        """
        raise NotImplementedError

    def write(self, trial: Any, iteration: int, content: Any) -> None:
        """Write a round. A call that raises OSError must leave the files unchanged."""
        raise NotImplementedError

    def finish(self, trial: Any) -> None:
        """Write anything that follows the last round of a trial."""

    # ---- Hooks of Tune -----------------------------------------------------------------------

    def on_trial_start(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        """Record that the trial has not reported since this start."""
        self._started.discard(trial.trial_id)

    def on_trial_result(
        self, iteration: int, trials: list, trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        """Write a round, after any rounds that are still waiting."""
        round_, content = result["training_iteration"], self.content(result)
        if content is None:
            return
        waiting = self._waiting.setdefault(trial.trial_id, deque())
        if trial.trial_id not in self._started:
            self._started.add(trial.trial_id)
            self._uncut.add(trial.trial_id)
            while waiting and waiting[-1][0] >= round_:
                waiting.pop()
        waiting.append((round_, content))
        if len(waiting) > MOST_WAITING:
            lost, _ = waiting.popleft()
            logger.error(
                "%s: %s has been unable to write for too long; round %d will be missing",
                *(label(trial), type(self).__name__, lost),
            )
        self._write_waiting(trial)

    def on_trial_save(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        """Try again to write the rounds that still wait."""
        # A trial that continues from this checkpoint does not report the waiting rounds again.
        self._try_again(trial)

    def on_experiment_end(self, trials: list, **info: Any) -> None:
        """Try one last time to write the rounds that still wait."""
        for trial in trials:
            self._try_again(trial)

    def on_trial_complete(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        """Write waiting rounds and anything that follows the last round."""
        self._end(trial)

    def on_trial_error(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        """Write waiting rounds and anything that follows the last round."""
        self._end(trial)

    def _end(self, trial: Any) -> None:
        if trial.trial_id in self._started:
            self._try_again(trial)
            self.finish(trial)

    def _try_again(self, trial: Any) -> None:
        if self._waiting.get(trial.trial_id):
            self._write_waiting(trial)

    def _write_waiting(self, trial: Any) -> None:
        waiting = self._waiting[trial.trial_id]
        if trial.trial_id in self._uncut:
            self.cut(trial, waiting[0][0] - 1)
            self._uncut.remove(trial.trial_id)
        while waiting:
            self.write(trial, *waiting[0])
            waiting.popleft()
