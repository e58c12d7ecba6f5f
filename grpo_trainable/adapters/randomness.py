"""Python's own generator of random numbers, shared by environments that all draw from it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager


class OwnRandomness:
    """The state of the generator for one of those that draw from it: what others draw or seed in
    between changes nothing for it, nor it for them."""

    def __init__(self) -> None:
        self._state = random.Random().getstate()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """While it lasts, `random` goes on where it was left here."""
        others = random.getstate()
        random.setstate(self._state)
        try:
            yield
        finally:
            self._state = random.getstate()
            random.setstate(others)
