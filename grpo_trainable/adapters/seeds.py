"""A task whose specifications are seeds, for environments that begin from one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from grpo_trainable.environments import Environment
from grpo_trainable.tasks import Example

HELD_OUT = 1 << 30  # the first held-out seed; training takes those from 0 on


def seeded_task(environment: Callable[[], Environment], stop: Sequence[str] = ("\n",)) -> type:
    """A class for `task.name`: training example i is the episode of the specification {"seed": i}.

    `stop`: strings after which an action ends.
    """
    strings = tuple(stop)

    class SeededTask:
        stop = strings

        def __init__(self, seed: int) -> None:
            # A trial's seed draws the responses. Episodes are the same for all trials.
            self._environment = environment()

        def train_example(self, prompt_index: int) -> Example:
            return self._example(prompt_index)

        def eval_examples(self, count: int) -> list[Example]:
            return [self._example(HELD_OUT + i) for i in range(count)]

        def _example(self, seed: int) -> Example:
            spec = {"seed": seed}
            return Example(self._environment.reset(spec), spec)

    return SeededTask
