"""Adapter for Gymnasium (https://gymnasium.farama.org), with words as actions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpo_trainable.adapters.optional_library import library
from grpo_trainable.environments import JSONValue, Turn


def gymnasium_environment(
    name: str, *, actions: Sequence[str] = (), describe: Callable[[Any], str] = str, **options: Any
) -> type:
    """Return a class for `env.name` that plays `gymnasium.make(name, **options)`.

    An episode's specification is {"seed": N}. An invalid action leaves the environment unchanged,
    and the policy reads "not an action".

    Args:
        name: Name of the environment in Gymnasium.
        actions: Words for the actions of a discrete space, in order. By default the words are the
            numbers of the actions. In a text space, every text in the space is an action.
        describe: Describes an observation as text. A line break is added to this text.
        **options: Options of `gymnasium.make`.

    Raises:
        ValueError: If Gymnasium is not installed. The returned class raises this error if the
            actions of the environment are neither discrete nor text. The message is one line.
    """
    gymnasium = library("gymnasium", extra="rllib")

    class Adapted:
        def __init__(self) -> None:
            self._env: Any = gymnasium.make(name, **options)
            self._space = space = self._env.action_space
            if not isinstance(space, (gymnasium.spaces.Discrete, gymnasium.spaces.Text)):
                raise ValueError(f"{name}: the action space {space} is neither discrete nor text")
            first = getattr(space, "start", 0)  # a text space has neither `start` nor `n`
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
            observation, reward, ended, cut, info = self._env.step(chosen)
            text, done = f"{describe(observation)}\n", bool(ended or cut)
            return Turn(text, float(reward), done, {**info, "illegal": 0})

        def close(self) -> None:
            self._env.close()

    return Adapted
