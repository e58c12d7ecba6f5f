"""Streams of prompts, and tasks that consist of two streams. Each pass has a different order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, Protocol, TypeVar

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


class Stream(Protocol):
    """An endless stream of examples."""

    @property
    def size(self) -> int:
        """Number of examples in one pass."""
        ...

    def example(self, key: str, prompt_index: int) -> Example:
        """Return example `prompt_index` of the stream named `key`."""
        ...


S = TypeVar("S", bound=Stream)


class SplitTask(Generic[S]):
    """A task with two streams: training examples and held-out examples."""

    _train: S
    _heldout: S
    _seed: int

    def train_example(self, prompt_index: int) -> Example:
        """Return training example `prompt_index`, a pure function of (seed, prompt_index)."""
        return self._asked(self._train.example(f"train {self._seed}", prompt_index))

    @property
    def train_size(self) -> int:
        """Number of training examples in one pass."""
        return self._train.size

    @property
    def eval_size(self) -> int:
        """Number of held-out examples before they repeat."""
        return self._heldout.size

    def eval_examples(self, count: int) -> list[Example]:
        """Return the same `count` held-out examples for every seed.

        A larger `count` only appends examples. If `count` exceeds `eval_size`, examples repeat.
        """
        return [self._asked(self._heldout.example("eval", i)) for i in range(count)]

    def _asked(self, example: Example) -> Example:
        """Return an example of a stream, in the form that the policy receives."""
        return example
