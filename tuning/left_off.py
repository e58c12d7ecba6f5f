"""What an interrupted experiment leaves, in a few lines: what is saved, and how to go on."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_trainable.storage.checkpointing import UnreadableCheckpoint, newest_round
from grpo_trainable.text import plural
from reports.records import TrialRecord


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
