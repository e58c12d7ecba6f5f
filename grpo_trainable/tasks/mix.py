"""Several tasks in one trial: a prompt, and all responses to it, are of one of them."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from typing import NamedTuple

from grpo_trainable.config import GRPOConfig, weights_of
from grpo_trainable.tasks.task import Example, Task


def mixture_of(config: GRPOConfig) -> Mixture | None:
    """Which task each prompt of a trial is of; None where it has one task."""
    return Mixture(weights_of(config.task.mix), config.seed) if config.parts else None


class MixTask:
    """The prompts of several tasks, each with its own seeded stream. Its responses are scored by
    the task that they are of."""

    def __init__(self, parts: Mapping[str, Task], mixture: Mixture) -> None:
        """`parts`: a task for each label of the mixture."""
        self.parts = parts
        self._mixture = mixture

    @property
    def stop(self) -> tuple[str, ...]:
        """The strings of all tasks: those of one end the responses of the others too, since all
        responses of a call share their limits."""
        return tuple(dict.fromkeys(text for task in self.parts.values() for text in task.stop))

    def train_example(self, prompt_index: int) -> Example:
        """Example number `prompt_index` of the mix, which is the next one of its task."""
        place = self._mixture.train(prompt_index)
        return self.parts[place.label].train_example(place.index)

    def eval_examples(self, count: int) -> list[Example]:
        """`count` held-out examples, as many of each task, by turns."""
        places = [self._mixture.held_out(index) for index in range(count)]
        counts = Counter(place.label for place in places)
        of_parts = {label: self.parts[label].eval_examples(n) for label, n in counts.items()}
        return [of_parts[place.label][place.index] for place in places]

    def label(self, stream: str, prompt_index: int) -> str:
        """The task of a prompt."""
        return self._mixture.origin(stream, prompt_index).label


class PromptOrigin(NamedTuple):
    """Where the prompt of a mix comes from."""

    label: str  # the task's label
    index: int  # index in the task's own stream


class Mixture:
    """Which task each prompt is of: a function of the weights, the seed and the prompt's index.

    Of the first n training prompts a task with the share w has ⌊n·w⌋ or ⌈n·w⌉, for every n, so a
    round has what the weights say, and not what a die made of them. Number j of a task belongs
    between the prompts ⌊j / w⌋ and ⌈(j + 1) / w⌉, and the one whose time ends first comes first,
    which meets all times (Baruah et al. 1996, "Proportionate progress"). Ties are broken by the
    seed.

    Held-out prompts go round the tasks one by one, so that each task has as many whatever its
    weight.
    """

    def __init__(self, weights: Mapping[str, float], seed: int) -> None:
        """`weights`: above 0; they need not add up to 1."""
        # Weights count as they are written: the float 0.1 itself is a little more than a tenth.
        exact = {label: Fraction(repr(weight)) for label, weight in weights.items()}
        total = sum(exact.values())
        self.labels = tuple(weights)
        self._shares = {label: weight / total for label, weight in exact.items()}
        self._seed = seed
        self._taken = dict.fromkeys(weights, 0)
        self._places: list[PromptOrigin] = []
        self._growing = threading.Lock()  # responses are scored in a thread of its own

    def train(self, prompt_index: int) -> PromptOrigin:
        """Where a training prompt comes from."""
        with self._growing:
            while len(self._places) <= prompt_index:
                self._places.append(self._next())
        return self._places[prompt_index]

    def held_out(self, prompt_index: int) -> PromptOrigin:
        """Where a held-out prompt comes from."""
        index, which = divmod(prompt_index, len(self.labels))
        return PromptOrigin(self.labels[which], index)

    def origin(self, stream: str, prompt_index: int) -> PromptOrigin:
        return self.held_out(prompt_index) if stream == "eval" else self.train(prompt_index)

    def _next(self) -> PromptOrigin:
        now = len(self._places)
        due = [label for label in self.labels if self._begins(label) <= now]
        soonest = min(map(self._ends, due))
        first = [label for label in due if self._ends(label) == soonest]
        label = (
            first[0] if len(first) == 1 else random.Random(f"mix {self._seed} {now}").choice(first)
        )
        place = PromptOrigin(label, self._taken[label])
        self._taken[label] += 1
        return place

    def _begins(self, label: str) -> int:
        """The first prompt that the next one of a task may be: ⌊j / w⌋."""
        return self._taken[label] // self._shares[label]

    def _ends(self, label: str) -> int:
        """The prompt before which it must have come: ⌈(j + 1) / w⌉."""
        return -(-(self._taken[label] + 1) // self._shares[label])
