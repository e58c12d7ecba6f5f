"""The task `control`: each example is an initial state of the environment."""

from __future__ import annotations

from grpo_trainable.config import TaskSettings
from grpo_trainable.control.spaces import episode_seed
from grpo_trainable.tasks.task import Example, JSONValue, Score


class ControlTask:
    """The initial states of an environment, as examples.

    Training example i has environment seed i, whatever the trial's seed is. In an episode, the
    trial's seed affects only the draws of actions.
    """

    stop = ()

    def __init__(self, settings: TaskSettings, seed: int) -> None:
        pass

    def train_example(self, prompt_index: int) -> Example:
        """Return the initial state of training example `prompt_index`."""
        return _example("train", prompt_index)

    def eval_examples(self, count: int) -> list[Example]:
        """Return `count` initial states with seeds that training does not use."""
        return [_example("eval", index) for index in range(count)]

    def reward(self, response: str, ground_truth: JSONValue) -> Score:
        """Raise a TypeError, because the environment gives the rewards."""
        raise TypeError("the environment gives the rewards during an episode")


def _example(stream: str, index: int) -> Example:
    seed = episode_seed(stream, index)
    return Example(f"seed {seed}", {"seed": seed})
