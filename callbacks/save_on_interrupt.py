"""Stop and save all trials on Ctrl-C or SIGTERM, and say what is saved and what is lost."""

from __future__ import annotations

import math
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeAlias

from ray.tune.result import DONE

from callbacks.checkpoints import forget_missing
from callbacks.fail_safe import FailSafeCallback
from callbacks.trial_files import config_of, label, trial_path
from grpo_trainable.command_line import output_dropped_on_error
from grpo_trainable.protocol.stopping import Finishing, Stopped
from grpo_trainable.storage.checkpointing import UnreadableCheckpoint, newest_round
from grpo_trainable.storage.ray_private import TRAINING_ITERATION, _TrainingResult
from grpo_trainable.storage.stop_requests import TuneStopRequest, forget_all
from grpo_trainable.storage.trial_storage import checkpoint_at, path_on

SIGNALS = (signal.SIGINT, signal.SIGTERM)
LEAST_LOST_S = 0.5  # abandoned work that took less time than this is not reported

# Set once the user has asked the experiment to end. One event suffices, because a process never
# runs two experiments at the same time.
requested = threading.Event()

NotCopied: TypeAlias = Callable[[Sequence[Any]], list[str]]


class CheckpointOnInterrupt(FailSafeCallback):
    """Handles Ctrl-C and SIGTERM while Tune runs.

    After the first signal, every running trial is asked to stop. If a trial has not begun the
    gradient steps of its round, it abandons this round at once; otherwise it finishes the round.
    Then the trial saves its last finished round. When all running trials have answered that they
    have stopped, the callback sends SIGUSR1, which makes Tune end. No time limit applies, because a
    second signal ends everything at once: it raises KeyboardInterrupt.

    Trials of other Trainables cannot be asked to stop. Tune ends them without saving.

    If the first signal comes after all trials have ended, the callback only prints a line.

    Tune's own handler of Ctrl-C, which this callback replaces, ends trials without saving them. If
    Tune does not run in the main thread, the callback cannot receive signals and does nothing.
    """

    def __init__(self, not_copied: NotCopied | None = None) -> None:
        """Prepare to handle signals.

        Args:
            not_copied: Returns a line for each given trial whose object store lacks files of this
                machine. None: no files are copied to a store.
        """
        self._not_copied = not_copied
        self._former: dict[int, Any] = {}  # signal -> handler before the experiment
        self._trials: Sequence[Any] = ()
        self._saved: dict[str, int] = {}  # trial id -> `saved_round` before the request
        # Trial id -> the request that was made, or None if the trial does not obey requests.
        self._asked: dict[str, TuneStopRequest | None] = {}
        self._answers: dict[str, Finishing | Stopped] = {}  # trial id -> the trial's last answer
        self._output = ExitStack()
        self._ended = False  # True once Tune has been told to end

    # Tune pickles callbacks with the experiment. After a resume, nothing has been requested.
    def __getstate__(self) -> dict[str, Any]:
        return {"_not_copied": self._not_copied}

    def __setstate__(self, state: dict[str, Any]) -> None:
        CheckpointOnInterrupt.__init__(self, state.get("_not_copied"))

    # ---- Signals -----------------------------------------------------------------------------

    def setup(self, **info: Any) -> None:
        """Install the handler. Tune calls this method after it has installed its own handler."""
        CheckpointOnInterrupt.__init__(self, self._not_copied)
        requested.clear()
        if threading.current_thread() is threading.main_thread():
            self._former = {number: signal.signal(number, self._handle) for number in SIGNALS}
            forget_all()  # an earlier experiment in this process may have left requests behind

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if requested.is_set():
            self._end_at_once()
        requested.set()
        # If the output goes to `| tee`, Ctrl-C may have ended `tee` too. Printing must not end this
        # process before the trials are saved.
        self._output.enter_context(output_dropped_on_error())
        say(f"{signal.Signals(number).name}: {self._effect()}")

    def _effect(self) -> str:
        """Describe the effect of the first signal."""
        if self._trials and all(trial.is_finished() for trial in self._trials):
            return (
                "all trials have ended; the experiment ends once their files are complete "
                "(interrupt again to stop at once)"
            )
        return (
            "every trial stops and saves its last finished round; a trial that has begun the "
            "gradient steps of a round finishes the round first (interrupt again to stop at once "
            "without saving)"
        )

    def _end_at_once(self) -> NoReturn:
        say("interrupted again: stopping at once")
        try:
            self._say_what_is_lost()
        finally:
            self._restore_signals()
        raise KeyboardInterrupt

    def _say_what_is_lost(self) -> None:
        unsaved = [trial for trial in self._trials if self._is_unsaved(trial)]
        for trial in unsaved:
            saved = self._newest_saved(trial) if is_in_snapshot(trial) else 0
            say(f"{label(trial)}: not saved: {cost(trial, saved)}")
        waiting = [] if self._not_copied is None else self._not_copied(self._trials)
        for line in waiting:
            say(line)
        if not unsaved and not waiting:
            say("nothing more is lost, because all running trials have stopped")

    def _is_unsaved(self, trial: Any) -> bool:
        """Return True if a trial is running and has not answered that it has stopped."""
        stopped = isinstance(self._answers.get(trial.trial_id), Stopped)
        return trial.status == "RUNNING" and not stopped

    def _newest_saved(self, trial: Any) -> int:
        """Return the round of a running trial's newest checkpoint, or 0."""
        return max(self._saved.get(trial.trial_id, 0), noted_round(trial))

    def _restore_signals(self) -> None:
        former, self._former = self._former, {}
        for number, handler in former.items():
            # None: the former handler was not installed from Python.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._output.close()

    # ---- Hooks of Tune -----------------------------------------------------------------------

    def on_step_end(self, iteration: int, trials: list, **info: Any) -> None:
        """Ask running trials to stop, print their answers, and end Tune once all have stopped."""
        self._trials = trials
        if not requested.is_set() or self._ended:
            return
        for trial in filter(self._is_unsaved, trials):
            self._ask(trial)
        unsaved = list(filter(self._is_unsaved, trials))
        if not any(self._asked[trial.trial_id] for trial in unsaved):
            for trial in unsaved:
                why = f"{trial.trainable_name} does not stop on request"
                lost = cost(trial, self._newest_saved(trial))
                say(f"{label(trial)}: not saved, because {why}: {lost}")
            self._end()

    def _ask(self, trial: Any) -> None:
        """Make the request unless it was already made, and print the trial's newest answer."""
        id_ = trial.trial_id
        if id_ not in self._asked:
            self._saved[id_] = saved_round(trial)
            self._asked[id_] = request = TuneStopRequest(id_) if obeys(trial) else None
            if request is not None:
                request.make()
        request = self._asked[id_]
        answer = None if request is None else request.answer()
        if answer is None or answer == self._answers.get(id_):
            return
        self._answers[id_] = answer
        if isinstance(answer, Finishing):
            lines = [finishing(answer)]
        else:
            if answer.checkpoint is not None:
                note_checkpoint(trial, answer.checkpoint)
            lines = [*answer.notes, stopped(answer, config_of(trial).rounds, self._saved[id_])]
        for line in lines:
            say(f"{label(trial)}: {line}")

    def _end(self) -> None:
        self._ended = True
        signal.raise_signal(signal.SIGUSR1)
        if self._former:
            # Tune's SIGUSR1 handler has restored the SIGINT handler from before Tune.
            self._former[signal.SIGINT] = signal.signal(signal.SIGINT, self._handle)
        for request in filter(None, self._asked.values()):
            request.release()

    def on_experiment_end(self, trials: list, **info: Any) -> None:
        """Restore the signal handlers from before the experiment.

        If there was a signal but Tune was not told to end, all trials had ended before the signal.
        """
        if not self._ended:
            requested.clear()
        if self._asked:
            forget_all()
        self._restore_signals()


def say(text: str) -> None:
    """Print a line on standard error."""
    print(text, file=sys.stderr, flush=True)


# ---- Trials --------------------------------------------------------------------------------------


def obeys(trial: Any) -> bool:
    """Return True if the Trainable of a trial obeys requests to stop, as `GRPOTrainable` does."""
    return getattr(trial.get_trainable_cls(), "stops_on_request", False)


def noted_round(trial: Any) -> int:
    """Return the round of the newest checkpoint that Tune has recorded, or 0 if there is none."""
    noted = trial.latest_checkpoint_result
    return 0 if noted is None else noted.metrics.get(TRAINING_ITERATION, 0)


def saved_round(trial: Any) -> int:
    """Return the round of a trial's newest checkpoint, or 0 if it has none.

    Tune does not know about a checkpoint that an earlier run wrote because the run was asked to
    stop. A checkpoint that is being written or that cannot be read does not count. Checkpoints in
    an object store are not read, because the store may not answer.
    """
    noted, path = noted_round(trial), trial_path(trial)
    if trial.is_saving or not isinstance(path, Path):
        return noted
    with suppress(UnreadableCheckpoint):
        return max(noted, newest_round(path) or 0)
    return noted


def is_in_snapshot(trial: Any) -> bool:
    """Return False if Tune's last snapshot lacks a trial. A restore then begins the trial again.

    The trial begins in a new directory if the directory's name contains the time, as Tune's own
    names do. With a fixed name, the trial continues from its checkpoint.
    """
    path = trial_path(trial)
    if trial.custom_dirname is not None or not isinstance(path, Path):
        return True
    snapshots = sorted(path.parent.glob("experiment_state-*.json"))
    return not snapshots or trial.trial_id in snapshots[-1].read_text()


def note_checkpoint(trial: Any, path: str) -> None:
    """Make Tune record a checkpoint that a trial has written without a request from Tune."""
    checkpoint = checkpoint_at(path_on(trial.storage.storage_filesystem, path))
    trial.on_checkpoint(_TrainingResult(checkpoint=checkpoint, metrics=dict(trial.last_result)))
    forget_missing(trial.run_metadata.checkpoint_manager)


# ---- Messages ------------------------------------------------------------------------------------


def finishing(answer: Finishing) -> str:
    """Describe how long a trial will take to finish its round."""
    text = f"round {answer.round} has begun its gradient steps and is finished first: "
    if answer.left_s is None:
        return text + "no earlier round shows how long that takes"
    if answer.left_s == 0:
        return text + "this has already taken longer than in earlier rounds"
    return text + f"about {math.ceil(answer.left_s)} s, judging by earlier rounds"


def stopped(answer: Stopped, rounds: int, saved: int) -> str:
    """Describe what a stopped trial has saved, and what is lost.

    Args:
        answer: The trial's answer.
        rounds: Number of rounds of the trial.
        saved: Round of the trial's newest checkpoint before the request, or 0.
    """
    spent = answer.lost_s >= LEAST_LOST_S
    lost = [f"{answer.lost_s:.0f} s of work on round {answer.round + 1}"] if spent else []
    if answer.saved:
        return f"saved after round {answer.round} of {rounds}{_lost(lost)}"
    if not answer.round:
        return f"nothing to save before the end of its first round{_lost(lost)}"
    return f"NOT SAVED: {continues(saved, answer.round, lost)}"


def cost(trial: Any, saved: int) -> str:
    """Describe what is lost if a running trial ends at once.

    `saved` is the round of the trial's newest checkpoint, or 0.
    """
    last = trial.last_result or {}
    reached = last.get(TRAINING_ITERATION, 0)
    return continues(saved, reached, [] if last.get(DONE) else [f"the work on round {reached + 1}"])


def continues(saved: int, reached: int, lost: Sequence[str]) -> str:
    """Describe from which round a trial continues, and what is lost.

    Args:
        saved: Round of the trial's newest checkpoint, or 0.
        reached: Number of finished rounds.
        lost: Names of everything else that is lost.
    """
    rounds = f"rounds {saved + 1} to {reached}" if reached > saved + 1 else f"round {reached}"
    return f"continues from round {saved}{_lost([*[rounds] * (reached > saved), *lost])}"


def _lost(things: Sequence[str]) -> str:
    return f"; lost: {' and '.join(things)}" if things else ""
