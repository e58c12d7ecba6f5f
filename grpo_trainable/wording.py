"""Words of which sentences for people are made."""

from __future__ import annotations


def plural(number: int, noun: str) -> str:
    """`1 trial`, `2 trials`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
