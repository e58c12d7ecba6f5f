"""Several tasks in one trial: a prompt, and all responses to it, are of one of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from grpo_trainable.config import GRPOConfig, weights_of
from grpo_trainable.tasks.mixture import Mixture
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
        return self._mixture.place(stream, prompt_index).label
