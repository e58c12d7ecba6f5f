"""The order of prompts in a stream. Each pass has a different order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from grpo_trainable.tasks.task import Example


@lru_cache(maxsize=4)
def permutation(key: str, epoch: int, size: int) -> tuple[int, ...]:
    """Return the order of `size` prompts in pass `epoch` of the stream `key`."""
    order = list(range(size))
    random.Random(f"{key} epoch {epoch}").shuffle(order)
    return tuple(order)


@dataclass(frozen=True)
class Rows:
    """An endless stream of the examples in a file. A pass uses each example once."""

    rows: Sequence[Example]

    @property
    def size(self) -> int:
        """Number of examples in one pass."""
        return len(self.rows)

    def example(self, key: str, prompt_index: int) -> Example:
        """Return example `prompt_index` of the stream named `key`."""
        epoch, place = divmod(prompt_index, self.size)
        return self.rows[permutation(key, epoch, self.size)[place]]
