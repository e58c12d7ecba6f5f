"""How far an actor has come: a count of its process, by which others tell slow work from a hang."""

from __future__ import annotations

_steps = 0


def advance() -> None:
    """A step is done: a token of a batch, a reward that was answered or timed out, a microbatch, a
    piece of a checkpoint."""
    global _steps
    _steps += 1


def steps_done() -> int:
    """Steps of this process so far."""
    return _steps
