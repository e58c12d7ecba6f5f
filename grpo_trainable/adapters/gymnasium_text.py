"""Environments of Gymnasium (https://gymnasium.farama.org) whose actions are words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpo_trainable.adapters.optional_library import library
from grpo_trainable.environments import JSONValue, Turn


def gymnasium_environment(
    name: str, *, actions: Sequence[str] = (), describe: Callable[[Any], str] = str, **options: Any
) -> type:
    """A class for `env.name`, of the environment that `gymnasium.make(name, **options)` makes.

    A specification is {"seed": N}. What is no action is told so and changes nothing.

    Args:
        actions: the words of a discrete space in its order; empty: the numbers of its actions. The
            actions of a text space are the texts.
        describe: the text of an observation, to which a line break is added.

    Raises:
        ValueError: Gymnasium is missing, or actions are neither discrete nor text; in one line.
    """
    gymnasium = library("gymnasium", extra="rllib")

    class Adapted:
        def __init__(self) -> None:
            self._env: Any = gymnasium.make(name, **options)
            self._space = space = self._env.action_space
            if not isinstance(space, (gymnasium.spaces.Discrete, gymnasium.spaces.Text)):
                raise ValueError(f"{name}: actions are {space}, neither discrete nor text")
            first = getattr(space, "start", 0)  # a text space has neither
            numbers = range(first, first + getattr(space, "n", 0))
            self._actions = dict(zip(actions or map(str, numbers), numbers, strict=True))

        def reset(self, spec: JSONValue) -> str:
            assert isinstance(spec, Mapping), spec
            observation, _ = self._env.reset(seed=spec["seed"])
            return f"{describe(observation)}\n"

        def step(self, action: str) -> Turn:
            word = action.strip()
            chosen = self._actions.get(word) if self._actions else word
            if chosen is None or not self._space.contains(chosen):
                return Turn("not an action\n", info={"illegal": 1})
            observation, reward, ended, cut, _ = self._env.step(chosen)
            text, done = f"{describe(observation)}\n", bool(ended or cut)
            return Turn(text, float(reward), done, {"illegal": 0})

        def close(self) -> None:
            self._env.close()

    return Adapted
