"""Save the policy after a trial's last round.

A trial whose policy cannot be saved counts as failed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

Saved = TypeVar("Saved")

PAUSES_S = (1.0, 2.0, 4.0, 8.0)  # pauses between the attempts to save the policy


class PolicyNotSaved(RuntimeError):
    """A trial has finished all rounds, but the policy after the last round could not be saved."""


def save_persistently(
    save: Callable[[], Saved],
    pauses_s: Sequence[float] = PAUSES_S,
    sleep: Callable[[float], None] = time.sleep,
) -> Saved:
    """Call `save` until it succeeds, with a pause after each OSError, and return its result.

    Raises:
        OSError: The attempt after the last pause failed too.
    """
    for pause_s in pauses_s:
        try:
            return save()
        except OSError:
            sleep(pause_s)
    return save()
