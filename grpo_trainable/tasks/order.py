"""The order in which a stream goes through its prompts: pass after pass, each in an order of its
own."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from grpo_trainable.tasks.task import Example


@lru_cache(maxsize=4)
def permutation(key: str, epoch: int, size: int) -> tuple[int, ...]:
    """The order of a pass over `size` prompts, by the name of the stream and the pass."""
    order = list(range(size))
    random.Random(f"{key} epoch {epoch}").shuffle(order)
    return tuple(order)


@dataclass(frozen=True)
class Rows:
    """An endless stream of the examples of a file; a pass uses each once."""

    rows: Sequence[Example]

    @property
    def size(self) -> int:
        """Examples of one pass."""
        return len(self.rows)

    def example(self, key: str, prompt_index: int) -> Example:
        epoch, place = divmod(prompt_index, self.size)
        return self.rows[permutation(key, epoch, self.size)[place]]
