"""The policy after a trial's last round must be saved: a trial without it has failed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

Saved = TypeVar("Saved")

PAUSES_S = (1.0, 2.0, 4.0, 8.0)  # between the attempts to save it


class PolicyNotSaved(RuntimeError):
    """A trial has trained all its rounds, and the policy after the last one could not be saved."""


def save_persistently(
    save: Callable[[], Saved],
    pauses_s: Sequence[float] = PAUSES_S,
    sleep: Callable[[float], None] = time.sleep,
) -> Saved:
    """What `save` gives, which is tried once more after each pause where it raises an OSError.

    Raises:
        OSError: the last attempt failed as well.
    """
    for pause_s in pauses_s:
        try:
            return save()
        except OSError:
            sleep(pause_s)
    return save()
