"""A count of the steps of an actor's process, so callers can tell slow work from a hang."""

from __future__ import annotations

_steps = 0


def advance() -> None:
    """Count one finished step.

    Examples of steps: sampling the next token of each response in a batch, scoring a response (or
    failing to do so), processing a microbatch, and writing a piece of a checkpoint file.
    """
    global _steps
    _steps += 1


def steps_done() -> int:
    """Return the number of steps that this process has finished."""
    return _steps
