"""Handle interrupts while Tune is not running, and describe an interrupted experiment.

While Tune runs, `callbacks/save_on_interrupt.py` handles Ctrl-C and SIGTERM.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

from grpo_trainable.storage.checkpointing import UnreadableCheckpoint, newest_round
from grpo_trainable.text import plural
from reports.records import TrialRecord, count_stopped


def raise_on_interrupt() -> None:
    """Make Ctrl-C and SIGTERM raise KeyboardInterrupt.

    Call this function before and after `ray.init`, which replaces the signal handlers. The function
    also turns off Tune's handler, which would hide an interrupt that comes while Tune starts.
    """
    os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)


def left_off(trials: Sequence[TrialRecord], planned: int) -> list[str]:
    """Return one line about the experiment, and one for each trial that has begun but is not done.

    Args:
        trials: The trials that have begun, read from directories on this machine.
        planned: Number of trials in the plan.
    """
    finished = sum(trial.finished for trial in trials)
    begun = [trial for trial in trials if not trial.done]
    counts = [f"{finished} of {plural(planned, 'trial')} done", *count_stopped(trials)]
    counts += [f"{planned - len(trials)} not started"]
    lines = [f"interrupted: {', '.join(counts)}"]
    width = max((len(trial.label) for trial in begun), default=0)
    return lines + [f"  {trial.label:<{width}}  {_where(trial)}" for trial in begun]


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
