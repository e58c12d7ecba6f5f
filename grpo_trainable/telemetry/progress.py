"""A count of the steps of an actor's process, so callers can tell slow work from a hang."""

from __future__ import annotations

_steps = 0


def advance() -> None:
    """Count one finished step.

    A step is a token of a batch, a reward that was answered or timed out, a microbatch, or a piece
    of a checkpoint.
    """
    global _steps
    _steps += 1


def steps_done() -> int:
    """Return the number of steps that this process has finished."""
    return _steps
