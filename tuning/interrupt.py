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

# Seconds that trials have to finish their round and save. A user who presses Ctrl-C once would
# rather wait than lose rounds, and can press it again. After SIGTERM, Slurm and Kubernetes kill
# within 30 s.
ROUND_S = {signal.SIGINT: 60.0, signal.SIGTERM: 15.0}
# Seconds after that: for Tune to end, and for our last words. Ray needs up to 3 s more to end what
# we leave.
TUNE_S, WORDS_S = 7.0, 3.0


class Interrupt:
    """The handler of Ctrl-C and SIGTERM.

    The first signal lets every trial finish its round and save, for `ROUND_S`; the second ends the
    program at once. Where Tune has not ended `TUNE_S` after `ROUND_S`, the program ends without it.
    """

    def __init__(
        self, say_last_words: Callable[[], None], release_terminal: Callable[[], None]
    ) -> None:
        """Make the handler, without installing it.

        Args:
            say_last_words: Tell the user what is saved and how to go on, where Tune has not ended.
            release_terminal: Give back the screen.
        """
        self.received = False
        self._say_last_words = say_last_words
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
                _exit()
        self.received = True
        name = signal.Signals(number).name
        round_s = ROUND_S[signal.Signals(number)]
        for seconds, act in (
            (round_s, self._end_now),
            (round_s + TUNE_S, self._give_up),
            (round_s + TUNE_S + WORDS_S, _exit),
        ):
            watchdog = threading.Timer(seconds, act)
            watchdog.daemon = True
            watchdog.start()
        self._requested.set()
        text = (
            f"{name}: finishing the current round and saving every trial, for {round_s:.0f} s at "
            "most (once more: stop at once)"
        )
        print(text, file=sys.stderr, flush=True)
        if not tune_is_running():
            raise KeyboardInterrupt

    def _end_now(self) -> None:
        """End Tune. A trial that has not saved by now goes on from its last checkpoint."""
        if tune_is_running():
            text = "time is up: a trial that has not saved continues from its last checkpoint"
            print(text, file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGUSR1)

    def _give_up(self) -> None:
        try:
            self._release_terminal()
            self._say_last_words()
        finally:
            _exit()


def _exit() -> None:
    os._exit(INTERRUPTED)


def tune_is_running() -> bool:
    """Whether SIGUSR1, by which Tune is told to end, has Tune's handler."""
    return callable(signal.getsignal(signal.SIGUSR1))


# ---- What is left --------------------------------------------------------------------------------


def left_off(trials: Sequence[TrialRecord], planned: int) -> list[str]:
    """A line for the experiment and one for each trial that has begun and is not done. `planned`:
    how many trials there are to be; those of `trials` are in directories of this machine."""
    done = sum(trial.done for trial in trials)
    begun = [trial for trial in trials if not trial.done]
    waiting = planned - done - len(begun)
    lines = [f"interrupted: {done} of {plural(planned, 'trial')} done, {waiting} not begun"]
    width = max((len(_label(trial)) for trial in begun), default=0)
    return lines + [f"  {_label(trial):<{width}}  {_where(trial)}" for trial in begun]


def _label(trial: TrialRecord) -> str:
    return f"{trial.arm}/{trial.config.seed}"


def _where(trial: TrialRecord) -> str:
    rounds = trial.config.rounds
    if not trial.rows:
        how = "failed before its first row" if trial.failed else "its first round had not ended"
        return f"{how}: starts from round 0"
    try:
        saved = newest_round(trial.directory)
    except UnreadableCheckpoint as error:
        return f"reached round {trial.round} of {rounds}; {error}"
    if saved is None:
        return f"reached round {trial.round} of {rounds}, not saved: starts from round 0"
    if saved < trial.round:
        return f"reached round {trial.round} of {rounds}, goes on from round {saved}"
    return f"saved after round {saved} of {rounds}"
