"""Tasks for environments that begin from a seed, or from a row of data."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from grpo_trainable.environments import Environment, JSONValue
from grpo_trainable.tasks import Example
from grpo_trainable.tasks.order import permutation

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


def listed_task(
    environment: Callable[[], Environment],
    specs: Sequence[JSONValue],
    held_out: Sequence[JSONValue] = (),
    stop: Sequence[str] = ("\n",),
) -> type:
    """A class for `task.name`: the episodes of `specs`, in another order in each pass.

    Args:
        held_out: the specifications of evaluations; empty: the same.
        stop: strings after which an action ends.

    Raises:
        ValueError: there are no specifications.
    """
    if not specs:
        raise ValueError("a list of specifications must not be empty")
    strings, trained, evaluated = tuple(stop), tuple(specs), tuple(held_out or specs)

    class ListedTask:
        stop = strings
        train_size, eval_size = len(trained), len(evaluated)

        def __init__(self, seed: int) -> None:
            self._seed, self._environment = seed, environment()

        def train_example(self, prompt_index: int) -> Example:
            return self._example(trained, f"train {self._seed}", prompt_index)

        def eval_examples(self, count: int) -> list[Example]:
            return [self._example(evaluated, "eval", i) for i in range(count)]

        def _example(self, specs: Sequence[JSONValue], stream: str, index: int) -> Example:
            epoch, place = divmod(index, len(specs))
            spec = specs[permutation(stream, epoch, len(specs))[place]]
            return Example(self._environment.reset(spec), spec)

    return ListedTask
