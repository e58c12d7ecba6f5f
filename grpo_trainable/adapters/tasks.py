"""Tasks for environments that start from a seed or from a row of data."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from grpo_trainable.environments import Environment, JSONValue
from grpo_trainable.tasks import Example
from grpo_trainable.tasks.order import permutation

HELD_OUT = 1 << 30  # the first held-out seed; training seeds start at 0


def seeded_task(environment: Callable[[], Environment], stop: Sequence[str] = ("\n",)) -> type:
    """Return a class for `task.name` whose training example i has the specification {"seed": i}.

    Args:
        environment: Class of the environment.
        stop: Strings that end an action.
    """
    strings = tuple(stop)

    class SeededTask:
        stop = strings

        def __init__(self, seed: int) -> None:
            # The trial's seed affects only the responses. All trials play the same episodes.
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
    """Return a class for `task.name` that iterates over `specs`, in a new order in each pass.

    Args:
        environment: Class of the environment.
        specs: Specifications of the training episodes.
        held_out: Specifications of the evaluation episodes, by default `specs`.
        stop: Strings that end an action.

    Raises:
        ValueError: If `specs` is empty.
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
