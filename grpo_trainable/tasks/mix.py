"""Several tasks in one trial. Each prompt, with all its responses, belongs to one task."""

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
    """Return the assignment of prompts to tasks, or None if the trial has a single task."""
    return Mixture(weights_of(config.task.mix), config.seed) if config.parts else None


class MixTask:
    """The prompts of several tasks, each of which has its own seeded stream.

    The responses to a prompt are scored by the task that the prompt comes from.
    """

    def __init__(self, parts: Mapping[str, Task], mixture: Mixture) -> None:
        """Combine tasks.

        Args:
            parts: A task for each label of the mixture.
            mixture: Assigns a task to each prompt.
        """
        self.parts = parts
        self._mixture = mixture

    @property
    def stop(self) -> tuple[str, ...]:
        """Stop strings of all tasks.

        The strings of one task also end responses to the prompts of the other tasks, because all
        responses that are sampled in one call have the same limits.
        """
        return tuple(dict.fromkeys(text for task in self.parts.values() for text in task.stop))

    def train_example(self, prompt_index: int) -> Example:
        """Return training example `prompt_index` of the mix, which comes from one of the tasks."""
        place = self._mixture.train(prompt_index)
        return self.parts[place.label].train_example(place.index)

    def eval_examples(self, count: int) -> list[Example]:
        """Return `count` held-out examples, taken from the tasks in turn."""
        places = [self._mixture.held_out(index) for index in range(count)]
        counts = Counter(place.label for place in places)
        of_parts = {label: self.parts[label].eval_examples(n) for label, n in counts.items()}
        return [of_parts[place.label][place.index] for place in places]

    def label(self, stream: str, prompt_index: int) -> str:
        """Return the label of a prompt's task."""
        return self._mixture.origin(stream, prompt_index).label


class PromptOrigin(NamedTuple):
    """Origin of a prompt in a mix."""

    label: str  # the task's label
    index: int  # the prompt's index in the stream of this task


class Mixture:
    """Assignment of prompts to tasks. It depends on the weights, the seed and the prompt's index.

    A task with share w gets ⌊n·w⌋ or ⌈n·w⌉ of the first n training prompts, for every n. A round
    therefore follows the weights closely, without the noise of random draws. Prompt j of a task
    must lie within a window of the mix: from prompt ⌊j / w⌋ until just before prompt ⌈(j + 1) / w⌉.
    Among the tasks whose windows have begun, the next prompt comes from the task whose window ends
    first. This rule keeps every prompt within its window (Baruah et al. 1996, "Proportionate
    progress"). The seed breaks ties.

    Held-out prompts ignore the weights and come from the tasks in turn, so the prompt counts of any
    two tasks differ by at most one.
    """

    def __init__(self, weights: Mapping[str, float], seed: int) -> None:
        """Compute the shares of the tasks.

        Args:
            weights: Weight of each label, above 0. Weights need not add up to 1.
            seed: Seed of the trial.
        """
        # Use the decimal form of a weight: the float 0.1 is slightly more than a tenth.
        exact = {label: Fraction(repr(weight)) for label, weight in weights.items()}
        total = sum(exact.values())
        self.labels = tuple(weights)
        self._shares = {label: weight / total for label, weight in exact.items()}
        self._seed = seed
        self._taken = dict.fromkeys(weights, 0)
        self._places: list[PromptOrigin] = []
        self._growing = threading.Lock()  # a separate thread scores responses, so a lock is needed

    def train(self, prompt_index: int) -> PromptOrigin:
        """Return the origin of a training prompt."""
        with self._growing:
            while len(self._places) <= prompt_index:
                self._places.append(self._next())
        return self._places[prompt_index]

    def held_out(self, prompt_index: int) -> PromptOrigin:
        """Return the origin of a held-out prompt."""
        index, which = divmod(prompt_index, len(self.labels))
        return PromptOrigin(self.labels[which], index)

    def origin(self, stream: str, prompt_index: int) -> PromptOrigin:
        """Return the origin of a prompt in the stream `train` or `eval`."""
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
        """Return the start of the window for a task's next prompt j: ⌊j / w⌋."""
        return self._taken[label] // self._shares[label]

    def _ends(self, label: str) -> int:
        """Return the end (exclusive) of the window for a task's next prompt j: ⌈(j + 1) / w⌉."""
        return -(-(self._taken[label] + 1) // self._shares[label])
