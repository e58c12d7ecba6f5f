"""End an experiment in an orderly way after Ctrl-C or SIGTERM."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType

from callbacks import save_on_interrupt
from grpo_trainable.command_line import INTERRUPTED
from grpo_trainable.storage.checkpointing import UnreadableCheckpoint, newest_round
from grpo_trainable.text import plural
from reports.records import TrialRecord, count_stopped

# Time limit, in seconds, within which trials must finish their round and save. A user who presses
# Ctrl-C once prefers waiting to losing rounds, and can press Ctrl-C again. Slurm and Kubernetes
# kill a job within 30 s of SIGTERM.
ROUND_S = {signal.SIGINT: 60.0, signal.SIGTERM: 15.0}
# Seconds for Tune to end after `ROUND_S`, and seconds for our last messages after that. Ray then
# needs up to 3 s to end the processes that we leave behind.
TUNE_S, WORDS_S = 7.0, 3.0


class Interrupt:
    """Handler for Ctrl-C and SIGTERM.

    The first signal gives every trial `ROUND_S` seconds to finish its round and save. Tune then has
    `TUNE_S` seconds to end. If Tune has not ended by then, the program ends without Tune. A second
    signal ends the program at once.
    """

    def __init__(
        self, say_last_words: Callable[[], None], release_terminal: Callable[[], None]
    ) -> None:
        """Create the handler without installing it.

        Args:
            say_last_words: Prints what has been saved and how to continue. Called if Tune does not
                end.
            release_terminal: Ends the live table, which occupies the terminal.
        """
        self.received = False
        self._say_last_words = say_last_words
        self._release_terminal = release_terminal
        self._requested = save_on_interrupt.requested
        self._requested.clear()

    def install(self) -> None:
        """Install the handler.

        Call this method before and after `ray.init`, which replaces handlers. The method also turns
        off Tune's handler, which would hide the interrupt.
        """
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
            f"{name}: every trial finishes its round and saves, within {round_s:.0f} s (interrupt "
            "again to stop at once without saving)"
        )
        print(text, file=sys.stderr, flush=True)
        if not tune_is_running():
            raise KeyboardInterrupt

    def _end_now(self) -> None:
        """End Tune. After a resume, an unsaved trial continues from its last checkpoint."""
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
    """Return True if Tune's handler of SIGUSR1 is installed. This signal makes Tune end."""
    return callable(signal.getsignal(signal.SIGUSR1))


# ---- Unfinished trials ---------------------------------------------------------------------------


def left_off(trials: Sequence[TrialRecord], planned: int) -> list[str]:
    """Return one line about the experiment, and one for each trial that has begun but is not done.

    Args:
        trials: The trials that have begun, from directories on this machine.
        planned: Number of trials in the plan.
    """
    finished = sum(trial.finished for trial in trials)
    begun = [trial for trial in trials if not trial.done]
    counts = [f"{finished} of {plural(planned, 'trial')} done", *count_stopped(trials)]
    counts += [f"{planned - len(trials)} not started"]
    lines = [f"interrupted: {', '.join(counts)}"]
    width = max((len(_label(trial)) for trial in begun), default=0)
    return lines + [f"  {_label(trial):<{width}}  {_where(trial)}" for trial in begun]


def _label(trial: TrialRecord) -> str:
    return trial.label if trial.member else f"{trial.arm}/{trial.config.seed}"


def _where(trial: TrialRecord) -> str:
    rounds = trial.config.rounds
    if not trial.rows:
        how = "failed before finishing" if trial.failed else "had not finished"
        return f"{how} its first round: starts from round 0"
    try:
        saved = newest_round(trial.directory)
    except UnreadableCheckpoint as error:
        return f"reached round {trial.round} of {rounds}; {error}"
    if saved is None:
        return f"reached round {trial.round} of {rounds}, not saved: starts from round 0"
    if saved < trial.round:
        return f"reached round {trial.round} of {rounds}, continues from round {saved}"
    return f"saved after round {saved} of {rounds}"
