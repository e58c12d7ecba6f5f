"""Ends an experiment in order after Ctrl-C or SIGTERM."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType

from callbacks import interruption
from grpo_trainable.command_line import INTERRUPTED
from grpo_trainable.storage.checkpointing import UnreadableCheckpoint, newest_round
from grpo_trainable.text import plural
from reports.records import TrialRecord

# Seconds after an interrupt: to the end of the round and its checkpoint, and to our own end. Ray
# needs up to 3 s more to end what we leave.
ROUND_S, GRACE_S = 15.0, 22.0


class Interrupt:
    """The handler of Ctrl-C and SIGTERM. The first signal lets every trial finish its round and
    save, for `ROUND_S`; the second ends the program at once; `GRACE_S` after the first it ends in
    any case. `resume` is the line to print then, `release_terminal` gives back the screen."""

    def __init__(self, resume: str, release_terminal: Callable[[], None]) -> None:
        self.received = False
        self._resume = resume
        self._release_terminal = release_terminal
        self._requested = interruption.requested
        self._requested.clear()

    def install(self) -> None:
        """Call it before and after `ray.init`, which sets handlers of its own; Tune's handler is
        switched off, since it would hide the interrupt."""
        os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"
        signal.signal(signal.SIGINT, self._handle)
        signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            try:
                self._release_terminal()
                print("interrupted again: stopping at once", file=sys.stderr, flush=True)
            finally:
                os._exit(INTERRUPTED)
        self.received = True
        name = signal.Signals(number).name
        for seconds, act in ((ROUND_S, self._end_now), (GRACE_S, self._give_up)):
            watchdog = threading.Timer(seconds, act)
            watchdog.daemon = True
            watchdog.start()
        self._requested.set()
        text = (
            f"{name}: finishing the current round and saving every trial, for {ROUND_S:.0f} s at "
            "most (once more: stop at once)"
        )
        print(text, file=sys.stderr, flush=True)
        if not tune_is_running():
            raise KeyboardInterrupt

    def _end_now(self) -> None:
        """A trial that has not saved by now will go on from its last checkpoint."""
        if tune_is_running():
            os.kill(os.getpid(), signal.SIGUSR1)

    def _give_up(self) -> None:
        try:
            self._release_terminal()
            print(self._resume, flush=True)
        finally:
            os._exit(INTERRUPTED)


def tune_is_running() -> bool:
    """Whether SIGUSR1, by which Tune is told to end, has Tune's handler."""
    return callable(signal.getsignal(signal.SIGUSR1))


# ---- What is left --------------------------------------------------------------------------------


def left_off(trials: Sequence[TrialRecord], planned: int) -> list[str]:
    """A line for the experiment and one for each trial that has begun and is not done. `planned`:
    how many trials there are to be; those of `trials` are in directories of this machine."""
    done = sum(trial.done for trial in trials)
    begun = [trial for trial in trials if trial.rows and not trial.done]
    waiting = planned - done - len(begun)
    lines = [f"interrupted: {done} of {plural(planned, 'trial')} done, {waiting} not begun"]
    width = max((len(_label(trial)) for trial in begun), default=0)
    return lines + [f"  {_label(trial):<{width}}  {_where(trial)}" for trial in begun]


def _label(trial: TrialRecord) -> str:
    return f"{trial.arm}/{trial.config.seed}"


def _where(trial: TrialRecord) -> str:
    rounds = trial.config.rounds
    try:
        saved = newest_round(trial.directory)
    except UnreadableCheckpoint as error:
        return f"reached round {trial.round} of {rounds}; {error}"
    if saved is None:
        return f"reached round {trial.round} of {rounds}, not saved: begins anew"
    if saved < trial.round:
        return f"reached round {trial.round} of {rounds}, goes on from round {saved}"
    return f"saved after round {saved} of {rounds}"
