"""The task of a policy that acts: each example is an initial state of its environment."""

from __future__ import annotations

from grpo_trainable.config import TaskSettings
from grpo_trainable.control.spaces import episode_seed
from grpo_trainable.tasks.task import Example, JSONValue, Score


class ControlTask:
    """Training example i begins from seed i, whatever the trial's seed, which draws the actions."""

    stop = ()

    def __init__(self, settings: TaskSettings, seed: int) -> None:
        pass

    def train_example(self, prompt_index: int) -> Example:
        return _example("train", prompt_index)

    def eval_examples(self, count: int) -> list[Example]:
        """`count` initial states from other seeds than those of training."""
        return [_example("eval", index) for index in range(count)]

    def reward(self, response: str, ground_truth: JSONValue) -> Score:
        raise TypeError("an environment rewards its episodes while they go on")


def _example(stream: str, index: int) -> Example:
    seed = episode_seed(stream, index)
    return Example(f"seed {seed}", {"seed": seed})
